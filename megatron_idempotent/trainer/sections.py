"""The sections of the configuration: frozen dataclasses, each checked when it is built.

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
    mode: str = setting("sync", choices=("sync", "async"))
    """Sampling and training in turn, or at the same time: see `[controller]`."""
    seed: int = setting(1, low=0, high=2**31 - 1)
    """Seed of the initial weights, the order of the prompts and the sampled tokens."""
    ranks: int = setting(2, low=1, high=64)
    """Data-parallel processes on this machine, connected by gloo."""
    out: str = setting("")
    """Output directory: logs, curves, checkpoints; empty for the next free `runs/train-NNN`."""
    checkpoint_every: int = setting(25, low=0)
    """Rollouts between two checkpoints; 0 writes none at all, not even the last, unless an
    asynchronous run is told to stop."""
    keep_checkpoints: int = setting(2, low=1)
    """Complete checkpoints that stay on disk; older ones are removed."""
    timeout_s: float = setting(3600.0, above=0)
    """Deadline of the whole run, in seconds; past it all ranks are ended. An asynchronous run has
    the limits in `[controller]` instead."""

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
    """The decoder that is trained. Example: `ModelConfig(path="checkpoints/Qwen3-0.6B")`.

    Without a path it is a small Llama with random weights, of the shape that the other keys give.
    """

    path: str = setting("")
    """Hugging Face checkpoint (Llama, Qwen2, Qwen3, Qwen3-MoE) to start from, with its tokenizer;
    empty for a random one."""
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
    max_response_tokens: int = setting(4, low=1, high=131072)
    """Longest response, end token included."""
    engine: str = setting("transformers", choices=("transformers", "vllm", "sglang"))
    """What samples: a model in each rank's process, or servers over HTTP that all ranks share."""
    engine_url: str = setting("")
    """Servers of vLLM or SGLang, separated by commas."""
    request_timeout_s: float = setting(600.0, above=0)
    """For one response of a server; behind it the run ends with an error."""

    def __post_init__(self) -> None:
        check_section(self, "rollout")
        if bool(self.engine_url) == (self.engine == "transformers"):
            raise ConfigError(
                f"rollout.engine is {self.engine!r} and rollout.engine_url is {self.engine_url!r}; "
                "allowed: a URL for each server of vllm or sglang, none for transformers"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SyncConfig:
    """New weights for what samples. Example: `SyncConfig(transport="shared_memory")`."""

    transport: str = setting("shared_memory", choices=("shared_memory", "disk", "gloo", "nccl"))
    """How weights reach vLLM; SGLang reads them from disk, and transformers in place."""
    directory: str = setting("")
    """Where weights lie on their way over disk, a folder that servers see too; empty for one in
    the run's own."""
    address: str = setting("")
    """Of this machine, as servers reach it, for gloo and nccl; empty for 127.0.0.1."""
    workers: int = setting(1, low=1)
    """Workers of each vLLM server (its tensor-parallel size), for gloo and nccl."""
    bucket_mb: int = setting(256, low=1)
    """Largest piece that is sent at once, in MB; two are in memory."""
    changed_only: bool = setting(False)
    """Send only tensors whose bytes have changed since the last update."""

    def __post_init__(self) -> None:
        check_section(self, "sync")


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
    old_logprobs: str = setting("behaviour", choices=("behaviour", "recomputed"))
    """Whose log-probs the ratio is to: the engine's, as it sampled, or those of the weights that
    training starts from, which are computed once more."""
    correction: str = setting("none", choices=("none", "truncate", "mask"))
    """What the importance ratio of recomputed log-probs to the engine's does: nothing; weigh each
    token, up to `correction_high`; or weigh it, and reject it outside both bounds."""
    correction_low: float = setting(0.5, low=0, high=1)
    """Smallest ratio that `mask` keeps."""
    correction_high: float = setting(2.0, low=1, high=1e6)
    """Largest weight of `truncate`, and largest ratio that `mask` keeps."""
    correction_level: str = setting("token", choices=("token", "sequence"))
    """Whether a token's ratio is its own, or the geometric mean of its sequence's."""

    def __post_init__(self) -> None:
        check_section(self, "loss")
        if self.correction != "none" and self.old_logprobs != "recomputed":
            raise ConfigError(
                f"loss.correction is {self.correction!r} and loss.old_logprobs is "
                f"{self.old_logprobs!r}; allowed: old_logprobs recomputed, or correction none, "
                "since the ratio is that of recomputed log-probs to the engine's"
            )


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
