"""The reference RL trainer on Megatron, and the parts that it is made of.

`weights` and `hf` bring parameters into Hugging Face's names, `workers` run code on ranks,
`engines` sample, `sync` moves weights to them, `metrics` measure, `controller` decides what is
sampled and trained when, and `trainer` puts all together.

The shim (`patching`, `megatron`, `window`, `step`, `logprobs`, `fp8` and `patches`) imports nothing
of this package.
"""
