"""Proves on CPU ranks what the shim says of Megatron, and certifies a framework's training step.

- `cpu`: the real megatron-core on a CPU, with gloo ranks, and a pytest plugin on it.
- `certify`: a framework's training step against its definition in float64, and a pytest plugin.
- `prove`: each hazard's reproduction, on stock Megatron and with the patches.

The shim (`patching`, `megatron`, `window`, `step`, `logprobs`, `fp8` and `patches`) imports nothing
of this package.
"""
