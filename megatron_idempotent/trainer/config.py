"""The configuration as a whole, and what follows from it.

A string under a field of `sections` is its documentation: `docs/trainer.md` is made from them.
"""

from __future__ import annotations

import dataclasses

from megatron_idempotent.trainer.errors import ConfigError
from megatron_idempotent.trainer.section_controller import ControllerConfig
from megatron_idempotent.trainer.sections import (
    EvaluationConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    SyncConfig,
    TaskConfig,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All sections. Example: `Config(run=RunConfig(rollouts=3))`."""

    run: RunConfig = dataclasses.field(default_factory=RunConfig)
    task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    sync: SyncConfig = dataclasses.field(default_factory=SyncConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    controller: ControllerConfig = dataclasses.field(default_factory=ControllerConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        if self.run.mode == "sync" and self.controller.cluster != "embedded":
            raise ConfigError(
                f"controller.cluster is {self.controller.cluster!r} and run.mode is 'sync'; "
                "allowed: run.mode = 'async', which --async is short for"
            )
        if self.rollout.prompts % self.run.ranks:
            raise ConfigError(
                f"rollout.prompts is {self.rollout.prompts}; allowed: a multiple of run.ranks, "
                f"which is {self.run.ranks}, because every rank takes whole groups"
            )
        pieces = self.optimizer.steps_per_rollout * self.optimizer.microbatches_per_step
        if self.samples_per_rank % pieces:
            raise ConfigError(
                f"optimizer.steps_per_rollout x microbatches_per_step is {pieces}; allowed: a "
                f"divisor of the {self.samples_per_rank} samples each rank holds per rollout"
            )

    @property
    def samples_per_rank(self) -> int:
        """Sequences that one rank samples, and trains on, per rollout."""
        return self.rollout.prompts * self.rollout.group_size // self.run.ranks

    @property
    def microbatch_size(self) -> int:
        """Sequences per microbatch on one rank."""
        pieces = self.optimizer.steps_per_rollout * self.optimizer.microbatches_per_step
        return self.samples_per_rank // pieces

    @property
    def rank_batch_size(self) -> int:
        """Sequences that one rank trains on in one optimizer step."""
        return self.microbatch_size * self.optimizer.microbatches_per_step

    @property
    def global_batch_size(self) -> int:
        """Sequences of all ranks in one optimizer step."""
        return self.rank_batch_size * self.run.ranks

    @property
    def chunk_size(self) -> int:
        """Sequences that one rank hands over at once, in whole microbatches."""
        return self.rank_batch_size // self.optimizer.chunks_per_step
