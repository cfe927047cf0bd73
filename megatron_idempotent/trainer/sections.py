"""The configuration: one frozen dataclass per section, checked when it is built.

A string under a field is its documentation: `docs/trainer.md` is generated from these strings.
"""

from __future__ import annotations

import dataclasses

from megatron_idempotent.trainer.errors import ConfigError
from megatron_idempotent.trainer.setting import check_section, setting


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Where a run lives and how long it lasts. Example: `RunConfig(rollouts=3, out="runs/a")`."""

    rollouts: int = setting(110, low=1)
    """Rollouts in the whole run; each is followed by `optimizer.steps_per_rollout` steps."""
    seed: int = setting(1, low=0, high=2**31 - 1)
    """Seed of the initial weights, the order of the prompts and the sampled tokens."""
    ranks: int = setting(2, low=1, high=64)
    """Data-parallel processes on this machine, connected by gloo."""
    out: str = setting("")
    """Output directory: logs, curves, checkpoints; empty for the next free `runs/train-NNN`."""
    checkpoint_every: int = setting(25, low=0)
    """Rollouts between two checkpoints; 0 writes none at all, not even the last."""
    keep_checkpoints: int = setting(2, low=1)
    """Complete checkpoints that stay on disk; older ones are removed."""
    timeout_s: float = setting(3600.0, above=0)
    """Deadline of the whole run, in seconds; past it all ranks are ended."""

    def __post_init__(self) -> None:
        check_section(self, "run")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """Prompts and their verifier. Example: `TaskConfig(data="my_task.jsonl")`."""

    data: str = setting("")
    """JSONL file with `prompt`, `answer` and `split` in each row; empty for the shipped one."""
    reward: str = setting("megatron_idempotent.trainer.task.reward:position_reward")
    """The verifier, as `package.module:function`; it is imported on every rank."""

    def __post_init__(self) -> None:
        check_section(self, "task")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The decoder: RMSNorm, rotary positions, SwiGLU, grouped queries, no linear bias.

    Example: `ModelConfig(layers=2, hidden=64)`.
    """

    layers: int = setting(2, low=1, high=64)
    """Transformer layers."""
    hidden: int = setting(64, low=8, high=8192)
    """Width of the residual stream."""
    ffn: int = setting(128, low=8, high=32768)
    """Width of the SwiGLU block after gating."""
    heads: int = setting(4, low=1, high=128)
    """Query heads; they divide `hidden` into heads of an even width."""
    query_groups: int = setting(2, low=1, high=128)
    """Key and value heads; they divide `heads`."""
    rotary_base: int = setting(10000, low=2)
    """Base of the rotary position frequencies."""
    init_std: float = setting(0.02, above=0, high=1)
    """Standard deviation of the initial weights."""

    def __post_init__(self) -> None:
        check_section(self, "model")
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise ConfigError(
                f"model.heads is {self.heads} and model.hidden is {self.hidden}; allowed: heads "
                "that divide hidden into an even width, which rotary positions need"
            )
        if self.heads % self.query_groups:
            raise ConfigError(
                f"model.query_groups is {self.query_groups}; allowed: a divisor of model.heads, "
                f"which is {self.heads}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """What is sampled per rollout. Example: `RolloutConfig(prompts=32, group_size=8)`."""

    prompts: int = setting(64, low=1)
    """Prompts per rollout, over all ranks."""
    group_size: int = setting(16, low=2, high=1024)
    """Samples per prompt: the group that advantages are relative to."""
    temperature: float = setting(1.0, above=0, high=10)
    """Sampling temperature; log-probs are those of the distribution sampled from."""
    max_response_tokens: int = setting(4, low=1, high=1024)
    """Longest response, end token included."""

    def __post_init__(self) -> None:
        check_section(self, "rollout")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """The objective. Example: `LossConfig(clip_low=0.2, clip_high=0.28)`."""

    clip_low: float = setting(0.2, low=0, high=1)
    """The ratio to the old policy is clipped below at 1 - clip_low."""
    clip_high: float = setting(0.2, low=0, high=10)
    """The ratio to the old policy is clipped above at 1 + clip_high."""
    kl_coefficient: float = setting(0.0, low=0, high=100)
    """Weight of the KL penalty (k3 estimator); 0 computes no reference log-probs."""
    kl_reference: str = setting("initial", choices=("initial", "old"))
    """Whom the penalty ties the policy to: the initial weights, or the policy that sampled."""
    normalize_std: bool = setting(True)
    """Divide each group's advantages by the standard deviation of its rewards."""

    def __post_init__(self) -> None:
        check_section(self, "loss")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Adam, and how a rollout is cut into steps. Example: `OptimizerConfig(lr=3e-4)`."""

    lr: float = setting(1e-3, above=0, high=1)
    """Learning rate, constant after the warm-up."""
    warmup_steps: int = setting(4, low=0)
    """Optimizer steps over which the learning rate rises from zero."""
    steps_per_rollout: int = setting(4, low=1, high=1024)
    """Optimizer steps per rollout; each sample is used in exactly one of them."""
    microbatches_per_step: int = setting(2, low=1, high=1024)
    """Microbatches per optimizer step on each rank; gradients are reduced in the last one."""
    chunks_per_step: int = setting(1, low=1, high=1024)
    """Chunks that a step's microbatches come in, a divisor of them; weights do not depend on it."""
    beta1: float = setting(0.9, low=0, high=0.9999)
    """Adam's decay of the first moment."""
    beta2: float = setting(0.95, low=0, high=0.99999)
    """Adam's decay of the second moment."""
    weight_decay: float = setting(0.0, low=0, high=1)
    """Decoupled weight decay."""
    clip_grad: float = setting(1.0, low=0)
    """Gradient norm is clipped at this value; 0 never clips."""

    def __post_init__(self) -> None:
        check_section(self, "optimizer")
        if self.microbatches_per_step % self.chunks_per_step:
            raise ConfigError(
                f"optimizer.chunks_per_step is {self.chunks_per_step}; allowed: a divisor of "
                f"optimizer.microbatches_per_step, which is {self.microbatches_per_step}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """Measurements on held-out prompts. Example: `EvaluationConfig(every=10)`."""

    every: int = setting(10, low=0)
    """Rollouts between two evaluations; 0 evaluates at the start and at the end only."""
    prompts: int = setting(256, low=1)
    """Held-out prompts per evaluation, from the top of the file; one sample each."""

    def __post_init__(self) -> None:
        check_section(self, "evaluation")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All sections. Example: `Config(run=RunConfig(rollouts=3))`."""

    run: RunConfig = dataclasses.field(default_factory=RunConfig)
    task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
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
