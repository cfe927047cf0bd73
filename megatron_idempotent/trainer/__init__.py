"""The reference trainer: GRPO on a verifiable task, through stock `megatron.training`.

`megatron-idempotent train` runs it; `megatron_idempotent.trainer.loop` is the story, and every
part the loop names lives in its own file, with a protocol in `megatron_idempotent.trainer.batch`.
Nothing in the project imports this package: it uses the public API and nothing else.
"""
