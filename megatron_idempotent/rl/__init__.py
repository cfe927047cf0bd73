"""The reference RL trainer on Megatron, and its components.

`hf` converts parameters to tensors under Hugging Face names and back, `weights` transports tensors,
`workers` runs code on ranks, `engines` sample responses, `sync` updates the engines' weights,
`metrics` records measurements, `controller` schedules sampling and training, and `trainer` combines
these components.

The shim (`patching`, `megatron`, `window`, `step`, `logprobs`, `fp8` and `patches`) does not import
this package.
"""
