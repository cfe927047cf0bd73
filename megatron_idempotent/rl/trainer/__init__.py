"""Trains a model by GRPO on a verifiable task, through stock `megatron.training`, as a reference.

`megatron-idempotent train` runs it. `loop` has the algorithm on one page, and `async_run` has it
with sampling and training at the same time; both use the same parts. The package uses the public
API alone, and the library does not import it.
"""
