"""Runs one optimizer step in pieces: `TrainStep` on Megatron, `FSDPTrainStep` on FSDP2.

A batch flows through `lifecycle`, `open_step` and `microbatches` into a backend (`megatron`,
`fsdp`), and back as a `BatchResult`; the step ends in a `StepResult`. A step of rows on one rank
runs no code of `packs`, `pack_layout`, `ready`, `dummies`, `status` and `exact_sums`.
"""

from megatron_idempotent.lazy import attributes

__getattr__, __dir__ = attributes(__name__)
