"""The configuration of a run: its sections, their defaults, how it is read, and its errors.

The string under a field is its documentation. The table in docs/trainer.md, the JSON schema and the
errors are all made from these classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megatron_idempotent.settings import Field, SettingsReader, settings

from .errors import CheckpointError as CheckpointError
from .errors import ConfigError as ConfigError
from .errors import DataError as DataError
from .errors import OutputError as OutputError
from .errors import TrainerError as TrainerError
from .layout import ParallelConfig, RankLayout, check_layout


@settings(ConfigError, "run.")
class RunConfig:
    """Place and length of a run. Example: `RunConfig(rollouts=3, out="runs/a")`."""

    rollouts: int = Field(default=150, ge=1)
    """Rollouts in the whole run; each is followed by `optimizer.steps_per_rollout` steps."""
    mode: Literal["sync", "async"] = "sync"
    """Sampling and training in turn, or at the same time: see `[controller]`."""
    seed: int = Field(default=1, ge=0, le=2**31 - 1)
    """Seed of the initial weights, the order of the prompts and the sampled tokens."""
    ranks: int = Field(default=2, ge=1, le=64)
    """Processes on this machine, connected by gloo, or by NCCL on GPUs. Each has a replica of the
    model, unless `[parallel]` has several share one."""
    device: Literal["cpu", "cuda", "checked"] = "cpu"
    """The device of ranks and engines: the CPU, this machine's GPUs, or a CPU that refuses what a
    GPU would refuse, to try a change without one."""
    out: str = ""
    """Output directory: logs, curves, checkpoints; empty for the next free `runs/train-NNN`."""
    checkpoint_every: int = Field(default=25, ge=0)
    """Rollouts between two checkpoints; 0 writes none at all, not even the last, unless an
    asynchronous run is told to stop."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Complete checkpoints that stay on disk; older ones are removed."""
    timeout_s: float = Field(default=3600.0, gt=0)
    """Deadline of the whole run, in seconds; past it all ranks are ended. An asynchronous run has
    the limits in `[controller]` instead."""


@settings(ConfigError, "task.")
class TaskConfig:
    """Prompts and their verifier. Example: `TaskConfig(data="my_task.jsonl")`."""

    data: str = ""
    """JSONL file with `prompt`, `answer` and `split` in each row; empty for the shipped one."""
    reward: str = "megatron_idempotent.trainer.task.reward:position_reward"
    """The verifier, as `package.module:function`; it is imported on every rank."""


@settings(ConfigError, "model.")
class ModelConfig:
    """The decoder that is trained. Example: `ModelConfig(path="checkpoints/Qwen3-0.6B")`.

    Without a path it is a small Llama, or a small Qwen3-MoE where it has experts, with random
    weights, of the shape that the other keys give.
    """

    path: str = ""
    """Hugging Face checkpoint (Llama, Qwen2, Qwen3, Qwen3-MoE) to start from, with its tokenizer;
    empty for a random one."""
    layers: int = Field(default=2, ge=1, le=64)
    """Transformer layers."""
    hidden: int = Field(default=64, ge=8, le=8192)
    """Width of the residual stream."""
    ffn: int = Field(default=128, ge=8, le=32768)
    """Width of the SwiGLU block after gating, where there are no experts."""
    heads: int = Field(default=4, ge=1, le=128)
    """Query heads; they divide `hidden` into heads of an even width."""
    query_groups: int = Field(default=2, ge=1, le=128)
    """Key and value heads; they divide `heads`."""
    num_experts: int = Field(default=0, ge=0, le=1024)
    """Experts in each layer, as Qwen3-MoE has them; 0 for a Llama, which has none."""
    experts_per_token: int = Field(default=2, ge=1, le=1024)
    """Experts that a token is sent to, at most `num_experts`."""
    expert_ffn: int = Field(default=64, ge=8, le=32768)
    """Width of an expert after gating."""
    rotary_base: int = Field(default=10000, ge=2)
    """Base of the rotary position frequencies."""
    init_std: float = Field(default=0.06, gt=0, le=1)
    """Standard deviation of the initial weights."""

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise ValueError(
                f"model.heads is {self.heads} and model.hidden is {self.hidden}; allowed: heads "
                "that divide hidden into an even width, which rotary positions need"
            )
        if self.heads % self.query_groups:
            raise ValueError(
                f"model.query_groups is {self.query_groups}; allowed: a divisor of model.heads, "
                f"which is {self.heads}"
            )
        if self.num_experts and self.experts_per_token > self.num_experts:
            raise ValueError(
                f"model.experts_per_token is {self.experts_per_token} and model.num_experts is "
                f"{self.num_experts}; allowed: at most as many"
            )


@settings(ConfigError, "rollout.")
class RolloutConfig:
    """Samples of one rollout. Example: `RolloutConfig(prompts=32, group_size=8)`."""

    prompts: int = Field(default=64, ge=1)
    """Prompts per rollout, over all ranks."""
    group_size: int = Field(default=16, ge=2, le=1024)
    """Samples per prompt: the group that advantages are relative to."""
    temperature: float = Field(default=1.0, gt=0, le=10)
    """Sampling temperature; log-probs are those of the distribution sampled from."""
    max_response_tokens: int = Field(default=4, ge=1, le=131072)
    """Longest response, end token included."""
    engine: Literal["transformers", "vllm", "sglang"] = "transformers"
    """Engine that samples: a model in each rank's process, or servers over HTTP for all ranks."""
    engine_url: str = ""
    """Servers of vLLM or SGLang, separated by commas."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds for one response of a server; after that the run ends with an error."""

    def __post_init__(self) -> None:
        if bool(self.engine_url) == (self.engine == "transformers"):
            raise ValueError(
                f"rollout.engine is {self.engine!r} and rollout.engine_url is {self.engine_url!r}; "
                "allowed: a URL for each server of vllm or sglang, none for transformers"
            )


@settings(ConfigError, "sync.")
class SyncConfig:
    """New weights for what samples. Example: `SyncConfig(transport="shared_memory")`."""

    transport: Literal["shared_memory", "disk", "gloo", "nccl", "cuda_ipc"] = "shared_memory"
    """The way of weights to vLLM (cuda_ipc: on the same GPU); SGLang reads them from disk, and
    transformers in place."""
    directory: str = ""
    """Folder for weights that go over disk; servers see it too. Empty for one in the run's own."""
    address: str = ""
    """Address of this machine, as servers reach it, for gloo and nccl; empty for 127.0.0.1."""
    workers: int = Field(default=1, ge=1)
    """Workers of each vLLM server (its tensor-parallel size), for gloo and nccl."""
    bucket_mb: int = Field(default=256, ge=1)
    """Largest piece that is sent at once, in MB; two are in memory."""
    changed_only: bool = False
    """Send only tensors whose bytes have changed since the last update."""


@settings(ConfigError, "loss.")
class LossConfig:
    """The objective. Example: `LossConfig(clip_low=0.2, clip_high=0.28)`."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio to the old policy is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0, le=10)
    """The ratio to the old policy is clipped above at 1 + clip_high."""
    # From random weights, exploration is all there is: the distance from the initial policy, which
    # is nearly uniform, is what keeps it alive.
    kl_coefficient: float = Field(default=0.01, ge=0, le=100)
    """Weight of the KL penalty (k3 estimator); 0 computes no reference log-probs."""
    kl_reference: Literal["initial", "old"] = "initial"
    """Policy that the penalty ties to: the initial weights, or the weights that sampled."""
    normalize_std: bool = True
    """Divide each group's advantages by the standard deviation of its rewards."""
    # From random weights, the clipped ratio to the weights that sampled learns more than recomputed
    # log-probs with truncated weights, of which the ratio is always 1 and nothing is clipped.
    old_logprobs: Literal["behaviour", "recomputed"] = "behaviour"
    """Log-probs that the ratio is to: the engine's, as it sampled, or those of the weights that
    training starts from, which are computed once more."""
    correction: Literal["none", "truncate", "mask"] = "none"
    """Use of the importance ratio of recomputed log-probs to the engine's: none; weigh each token,
    up to `correction_high`; or weigh it, and reject it outside both bounds."""
    correction_low: float = Field(default=0.5, ge=0, le=1)
    """Smallest ratio that `mask` keeps."""
    correction_high: float = Field(default=2.0, ge=1, le=1e6)
    """Largest weight of `truncate`, and largest ratio that `mask` keeps."""
    correction_level: Literal["token", "sequence"] = "token"
    """Ratio of a token: its own, or the geometric mean of its sequence's."""

    def __post_init__(self) -> None:
        if self.correction != "none" and self.old_logprobs != "recomputed":
            raise ValueError(
                f"loss.correction is {self.correction!r} and loss.old_logprobs is "
                f"{self.old_logprobs!r}; allowed: old_logprobs recomputed, or correction none, "
                "since the ratio is that of recomputed log-probs to the engine's"
            )


@settings(ConfigError, "optimizer.")
class OptimizerConfig:
    """Adam, and how a rollout is cut into steps. Example: `OptimizerConfig(lr=3e-4)`."""

    lr: float = Field(default=1e-3, gt=0, le=1)
    """Learning rate, constant after the warm-up."""
    warmup_steps: int = Field(default=20, ge=0)
    """Optimizer steps over which the learning rate rises from zero."""
    steps_per_rollout: int = Field(default=4, ge=1, le=1024)
    """Optimizer steps per rollout; each sample is used in exactly one of them."""
    microbatches_per_step: int = Field(default=2, ge=1, le=1024)
    """Microbatches per optimizer step on each rank; gradients are reduced in the last one."""
    chunks_per_step: int = Field(default=0, ge=0, le=1024)
    """Chunks that a step's microbatches come in, a divisor of them; 0 for one each or, in a
    pipeline, one for as many as it has stages. Weights do not depend on it, unless
    `max_tokens_per_microbatch` has each chunk packed."""
    max_tokens_per_microbatch: int = Field(default=0, ge=0)
    """Most tokens of a microbatch, into which the sequences of a chunk are packed without the
    padding of rows; 0 for rows, `microbatches_per_step` of one size."""
    beta1: float = Field(default=0.9, ge=0, le=0.9999)
    """Adam's decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, le=0.99999)
    """Adam's decay of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Decoupled weight decay."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Gradient norm is clipped at this value; 0 never clips."""

    def __post_init__(self) -> None:
        if self.chunks_per_step and self.microbatches_per_step % self.chunks_per_step:
            raise ValueError(
                f"optimizer.chunks_per_step is {self.chunks_per_step}; allowed: a divisor of "
                f"optimizer.microbatches_per_step, which is {self.microbatches_per_step}"
            )


@settings(ConfigError, "controller.")
class ControllerConfig:
    """The run with `run.mode = "async"`. Example: `ControllerConfig(sampler="strict")`.

    A rollout is then an outer step: `rollout.prompts` groups, which train in
    `optimizer.steps_per_rollout` optimizer steps, and new weights for the engines.
    """

    sampler: str = "windowed"
    """Rule by which groups train next: windowed, strict, first_ready, in_order, or a path
    `package.module:Class`."""
    max_staleness: int = Field(default=2, ge=0)
    """Most optimizer steps between the weights that sampled a group and those it trains; for
    windowed and in_order."""
    order: Literal["freshest", "oldest"] = "oldest"
    """Groups that windowed takes first."""
    gated: bool = True
    """Start only groups that can train within the window; if not, as many as capacity allows, and
    more of them are thrown away; for windowed and strict."""
    abort_stale: bool = False
    """End the generation of groups that have become too old to train; for windowed and strict."""
    capacity: int = Field(default=0, ge=0)
    """Groups that may be generating or complete at once; 0 for what the sampler needs."""
    concurrency: int = Field(default=0, ge=0)
    """Groups that may be generating at once; 0 for as many as the capacity."""
    groups_per_call: int = Field(default=0, ge=0)
    """Groups that are handed to the ranks at once, where as many are there; 0 for half of an
    optimizer step's."""
    min_groups_per_call: int = Field(default=1, ge=1)
    """Groups that have to be there before any are handed over, but for the rest of a step."""
    drop_tied: bool = False
    """Leave out groups whose rewards are all equal; others are sampled in their place."""
    cluster: Literal["embedded", "torchrun", "ray"] = "embedded"
    """Place of ranks and engines: this machine, under torchrun, or on a Ray cluster."""
    ray_address: str = ""
    """Address of the Ray cluster, as `ray.init` takes it; empty for RAY_ADDRESS or one on this
    machine."""
    engines: int = Field(default=1, ge=1, le=4096)
    """Engines of rollout.engine transformers; on Ray, actors."""
    plane: Literal["memory", "transfer_queue"] = "memory"
    """Place of complete groups that wait: the controller's memory, or TransferQueue."""
    step_attempts: int = Field(default=3, ge=1)
    """Attempts at an optimizer step that fails, with the same groups, before the run ends."""
    group_attempts: int = Field(default=3, ge=1)
    """Attempts at a group that cannot be sampled, before it is dropped and reported."""
    restarts: int = Field(default=3, ge=0)
    """Restarts of lost ranks, without a step in between, before the run ends."""
    group_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds for all samples of a group, in one attempt."""
    call_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds for one call on the ranks, such as a microbatch or a checkpoint; after that they
    count as lost."""
    stall_s: float = Field(default=1200.0, gt=0)
    """Seconds without any progress, before the run ends with an error that says where it stands."""
    drain_s: float = Field(default=60.0, gt=0)
    """Seconds to finish the open step after SIGTERM; then it is undone."""
    loggers: str = ""
    """More loggers, separated by commas: wandb, or `package.module:callable`. Synchronous runs have
    them too."""
    timeline: bool = True
    """Record what every pump does, as a trace and a picture."""


@settings(ConfigError, "evaluation.")
class EvaluationConfig:
    """Measurements on held-out prompts. Example: `EvaluationConfig(every=10)`."""

    every: int = Field(default=10, ge=0)
    """Rollouts between two evaluations; 0 evaluates at the start and at the end only."""
    prompts: int = Field(default=256, ge=1)
    """Held-out prompts per evaluation, from the top of the file; one sample each."""


@settings(ConfigError)
class Config:
    """All sections. Example: `Config(run=RunConfig(rollouts=3))`.

    Its defaults are those of a synchronous run; `load_config` gives an asynchronous one `ASYNC`.
    """

    run: RunConfig = dataclasses.field(default_factory=RunConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
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
            raise ValueError(
                f"controller.cluster is {self.controller.cluster!r} and run.mode is 'sync'; "
                "allowed: run.mode = 'async', which --async is short for"
            )
        check_layout(self)
        if self.rollout.prompts % self.replicas:
            replicas = (
                "run.ranks" if self.replicas == self.run.ranks else "run.ranks / (tp x cp x pp)"
            )
            raise ValueError(
                f"rollout.prompts is {self.rollout.prompts}; allowed: a multiple of {replicas}, "
                f"which is {self.replicas}, because every replica takes whole groups"
            )
        pieces = self.optimizer.steps_per_rollout * self.optimizer.microbatches_per_step
        if self.samples_per_replica % pieces:
            raise ValueError(
                f"optimizer.steps_per_rollout x microbatches_per_step is {pieces}; allowed: a "
                f"divisor of the {self.samples_per_replica} samples each rank holds per rollout"
            )

    @property
    def layout(self) -> RankLayout:
        """The place of each rank."""
        parallel = self.parallel
        return RankLayout(tp=parallel.tp, cp=parallel.cp, pp=parallel.pp, replicas=self.replicas)

    @property
    def replicas(self) -> int:
        """Whole models that the ranks have between them: data-parallel ranks."""
        return self.run.ranks // self.parallel.members

    @property
    def chunks(self) -> int:
        """Chunks of one optimizer step."""
        optimizer, stages = self.optimizer, self.parallel.pp
        if optimizer.chunks_per_step:
            return optimizer.chunks_per_step
        # Fewer microbatches than stages would leave stages idle.
        whole, rest = divmod(optimizer.microbatches_per_step, stages)
        return 1 if rest else whole

    @property
    def packs(self) -> bool:
        """True where microbatches are packs of sequences, and not rows."""
        return self.optimizer.max_tokens_per_microbatch > 0

    @property
    def samples_per_replica(self) -> int:
        """Sequences that one replica trains on per rollout; its ranks sample them together."""
        return self.rollout.prompts * self.rollout.group_size // self.replicas

    @property
    def microbatch_size(self) -> int:
        """Sequences per microbatch on one replica."""
        pieces = self.optimizer.steps_per_rollout * self.optimizer.microbatches_per_step
        return self.samples_per_replica // pieces

    @property
    def rank_batch_size(self) -> int:
        """Sequences that one replica, and each of its ranks, trains on in one optimizer step."""
        return self.microbatch_size * self.optimizer.microbatches_per_step

    @property
    def global_batch_size(self) -> int:
        """Sequences of all replicas in one optimizer step."""
        return self.rank_batch_size * self.replicas

    @property
    def chunk_size(self) -> int:
        """Sequences that one replica hands over at once, in whole microbatches."""
        return self.rank_batch_size // self.chunks


SECTIONS: dict[str, Any] = {
    field.name: field.default_factory for field in dataclasses.fields(Config)
}
"""The class of each section, by its name."""

ASYNC: Mapping[str, Mapping[str, Any]] = {
    # As many samples as the synchronous run, and new weights after every optimizer step.
    "run": {"rollouts": 600, "checkpoint_every": 100},
    # More prompts with fewer samples each than in the synchronous run, where a step draws its 256
    # samples from 64 prompts.
    "rollout": {"prompts": 32, "group_size": 8},
    "optimizer": {"steps_per_rollout": 1},
    "evaluation": {"every": 40},
}
"""Defaults that are others in an asynchronous run."""


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a file, with `section.key=value` overrides applied in order.

    Keys that neither gives have their defaults: those of `Config`, and `ASYNC` over them where
    run.mode is async. Errors: `ConfigError` with a line for each key that is wrong.
    """
    given = SettingsReader(Config, ConfigError, path).set(*overrides)
    run = given.table.get("run")
    return given.build(ASYNC if isinstance(run, dict) and run.get("mode") == "async" else None)


def as_toml(config: Config) -> str:
    """The configuration as TOML that `load_config` reads back to an equal one."""
    import tomli_w

    return tomli_w.dumps(dataclasses.asdict(config))
