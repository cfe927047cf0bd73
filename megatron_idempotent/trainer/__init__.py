"""The reference trainer: GRPO on a verifiable task, through stock `megatron.training`.

`megatron-idempotent train` runs it. `loop` is the algorithm on one page, `async_run` the same with
sampling and training side by side; both are built of the same parts.
Nothing in the project imports this package: it uses the public API and nothing else.
"""
