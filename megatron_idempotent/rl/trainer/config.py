"""Defines and reads the configuration of a run: its sections, keys, defaults and limits.

A setting is declared once: its default, its default in an asynchronous run, its range, its option
of the command, and whether a resumed run may change it. The string under it documents it. The JSON
schema, `train --help` and error messages are made of these classes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megatron_idempotent.rl.controller.protocol import LogprobsOf
from megatron_idempotent.rl.controller.state import ControllerLimits
from megatron_idempotent.rl.weights.urls import place_of, refuse_secrets
from megatron_idempotent.settings import (
    MAY_CHANGE,
    Field,
    SettingsReader,
    refused,
    schema,
    settings,
)

from . import ConfigError
from .layout import RankLayout

Transport = Literal["shared_memory", "disk", "gloo", "nccl", "cuda_ipc", "bucket"]


def setting(
    default: Any, *, with_async: Any = None, flag: str = "", may_change: bool = False, **limits: Any
) -> Any:
    """Declare a field of a settings class: its default, its range and its command-line option.

    Args:
        default: its default.
        with_async: its default in an asynchronous run, if that is another one.
        flag: its option of the command, and the name of the option's value, such as "--out DIR".
        may_change: True if a resumed run may have another value, because it affects no number.
        limits: its range, as for `Field`.
    """
    extra = {"with_async": with_async, "flag": flag} | (MAY_CHANGE if may_change else {})
    extra = {mark: value for mark, value in extra.items() if value not in (None, "")}
    return Field(default=default, json_schema_extra=extra, **limits)


def _need_divisor(key: str, value: int, size_key: str, size: int, reason: str = "") -> None:
    if size % value:
        message = f"{key} is {value} and {size_key} is {size}; allowed: a divisor of it{reason}"
        raise ValueError(message)


@settings(ConfigError, "run.")
class RunConfig:
    """Settings of a run as a whole: its length, device and output.

    Example: `RunConfig(rollouts=3, out="runs/a")`.
    """

    rollouts: int = setting(150, ge=1, with_async=600, flag="--rollouts N", may_change=True)
    """Rollouts in the run; each is followed by `optimizer.steps_per_rollout` optimizer steps."""
    mode: Literal["sync", "async"] = "sync"
    """`sync` samples and trains in turn, `async` concurrently; see `[controller]`."""
    seed: int = setting(1, ge=0, le=2**31 - 1, flag="--seed N")
    """Seed of the initial weights, the order of the prompts and the sampled tokens."""
    ranks: int = setting(2, ge=1, le=64, flag="--ranks N")
    """Number of training processes, connected by gloo, or by NCCL on GPUs; under torchrun, the
    number that it has started. Each has a replica of the model, unless `[parallel]` distributes one
    over several ranks."""
    device: Literal["cpu", "cuda", "checked"] = setting("cpu", flag="--device DEVICE")
    """Device of ranks and engines: the CPU, this machine's GPUs, or with `checked` the CPU with the
    restrictions of a GPU, to test a change without a GPU."""
    out: str = setting("", flag="--out DIR", may_change=True)
    """Output directory for logs, curves and checkpoints; empty for the next free
    `runs/train-NNN`."""
    checkpoint_every: int = setting(25, ge=0, with_async=100, may_change=True)
    """Rollouts between two checkpoints; there is also one after the last rollout. 0 writes none,
    except when SIGTERM stops an asynchronous run."""
    keep_checkpoints: int = setting(2, ge=1, may_change=True)
    """Number of complete checkpoints to keep on disk; older ones are removed."""
    timeout_s: float = setting(3600.0, gt=0, may_change=True)
    """Time limit of the run in seconds, after which all ranks are ended. An asynchronous run has
    the limits in `[controller]` instead."""


@settings(ConfigError, "parallel.")
class ParallelConfig:
    """Settings of model parallelism: how many ranks share a replica, and in which dimensions.
    Example: `ParallelConfig(tp=2, pp=2)`.
    """

    tp: int = setting(1, ge=1, le=64, flag="--tp N")
    """Tensor-parallel ranks; they split heads, feed-forward blocks and the vocabulary."""
    pp: int = setting(1, ge=1, le=64, flag="--pp N")
    """Pipeline stages; they split the layers."""
    cp: int = setting(1, ge=1, le=64, flag="--cp N")
    """Context-parallel ranks; they split the positions of each sequence."""
    vpp: int = setting(1, ge=1, le=64, flag="--vpp N")
    """Model chunks on each pipeline stage; above 1 the schedule is interleaved."""
    ep: int = setting(1, ge=1, le=64, flag="--ep N")
    """Expert-parallel ranks; they split the experts. They are ranks of several replicas, or the
    context-parallel ranks of one replica."""
    sequence_parallel: bool = False
    """True to make tensor-parallel ranks also split the positions, outside of attention and
    feed-forward blocks."""

    def __post_init__(self) -> None:
        if self.vpp > 1 and self.pp == 1:
            allowed = "2 or more stages, between which chunks alternate, or vpp = 1"
            raise refused(self, "vpp", "pp", allowed=allowed)
        if self.sequence_parallel and self.tp == 1:
            allowed = "2 or more ranks, which split the positions, or false"
            raise refused(self, "sequence_parallel", "tp", allowed=allowed)

    @property
    def is_whole(self) -> bool:
        """True if every rank has all of the model's weights: no tensor, pipeline or expert
        parallelism.
        """
        return self.tp == self.pp == self.ep == 1

    @property
    def members(self) -> int:
        """The number of ranks that together hold one replica: tp x cp x pp."""
        return self.tp * self.cp * self.pp

    def rounded(self, positions: int) -> int:
        """Return a row's number of positions, rounded up to a number that context- and
        sequence-parallel ranks can split evenly.
        """
        divisor = (self.tp if self.sequence_parallel else 1) * (2 * self.cp if self.cp > 1 else 1)
        return -(-positions // divisor) * divisor

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Raise `ValueError` if the ranks cannot split the heads, layers or experts of a model with
        these sizes evenly.

        `sizes` are named as in the user's configuration, in this order: heads, query groups, width
        of a feed-forward block or, in a model with experts, of an expert; layers; experts, 0 for
        none.

        Raises:
            ValueError: they cannot; the message has a size and the setting that it does not fit.
        """
        *cut, (name, experts) = sizes.items()
        ways = [("tp", self.tp)] * 3 + [("pp x vpp", self.pp * self.vpp)]
        for (key, ranks), (dimension, size) in zip(ways, cut, strict=True):
            _need_divisor(f"parallel.{key}", ranks, dimension, size)
        if self.ep > 1 and (not experts or experts % self.ep):
            raise ValueError(
                f"parallel.ep is {self.ep} and {name} is {experts}; allowed: a divisor of it, or 1 "
                "for a model without experts"
            )
        if experts and self.tp > 1 and not self.sequence_parallel:
            raise ValueError(
                f"parallel.sequence_parallel is false, parallel.tp is {self.tp} and {name} is "
                f"{experts}; allowed: true, which Megatron's experts need beside tensor parallelism"
            )


@settings(ConfigError, "task.")
class TaskConfig:
    """Settings of the task: the prompt file and the verifier. Example:
    `TaskConfig(data="my_task.jsonl")`.
    """

    data: str = setting("", flag="--data FILE", may_change=True)
    """JSONL file of prompts, with `prompt` (or `messages`), `answer`, `split` and fields for the
    verifier in each row; empty for the shipped file."""
    reward: str = "megatron_idempotent.rl.trainer.task.reward:position_reward"
    """Verifier, as `package.module:function`, which every rank imports."""


@settings(ConfigError, "model.")
class ModelConfig:
    """Settings of the decoder to train. Example: `ModelConfig(path="checkpoints/Qwen3-0.6B")`.

    Without a path, the other keys are the sizes of a Llama or, with experts, of a Qwen3-MoE with
    random weights.
    """

    path: str = setting("", flag="--model DIR")
    """Folder of the Hugging Face checkpoint (Llama, Qwen2, Qwen3, Qwen3-MoE) to start from, with
    its tokenizer; empty for random weights."""
    layers: int = setting(2, ge=1, le=64)
    """Transformer layers."""
    hidden: int = setting(64, ge=8, le=8192)
    """Width of the residual stream."""
    ffn: int = setting(128, ge=8, le=32768)
    """Width of the SwiGLU block after gating, in a model without experts."""
    heads: int = setting(4, ge=1, le=128)
    """Query heads; a divisor of `hidden` that makes an even head width."""
    query_groups: int = setting(2, ge=1, le=128)
    """Key and value heads; a divisor of `heads`."""
    num_experts: int = setting(0, ge=0, le=1024)
    """Experts in each layer of a Qwen3-MoE; 0 for a Llama without experts."""
    experts_per_token: int = setting(2, ge=1, le=1024)
    """Experts per token, at most `num_experts`."""
    expert_ffn: int = setting(64, ge=8, le=32768)
    """Width of an expert after gating."""
    rotary_base: int = setting(10000, ge=2)
    """Base of the rotary position frequencies."""
    init_std: float = setting(0.06, gt=0, le=1)
    """Standard deviation of the initial weights."""

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            allowed = "heads that divide hidden into an even width, which rotary positions need"
            raise refused(self, "heads", "hidden", allowed=allowed)
        _need_divisor("model.query_groups", self.query_groups, "model.heads", self.heads)
        if self.num_experts and self.experts_per_token > self.num_experts:
            raise refused(self, "experts_per_token", "num_experts", allowed="at most as many")


@settings(ConfigError, "rollout.")
class RolloutConfig:
    """Settings of rollouts: numbers of prompts and samples, sampling, and inference engine.
    Example: `RolloutConfig(prompts=32, group_size=8)`.
    """

    # An asynchronous run has as many samples as a synchronous one. Its steps have more prompts with
    # fewer samples each: a synchronous step has 256 samples of 64 prompts.
    prompts: int = setting(64, ge=1, with_async=32)
    """Prompts per rollout, over all ranks."""
    group_size: int = setting(16, ge=2, le=1024, with_async=8)
    """Samples per prompt, which form a group; advantages compare a sample with its group."""
    temperature: float = setting(1.0, gt=0, le=10)
    """Sampling temperature; log-probs are computed at this temperature."""
    max_response_tokens: int = setting(4, ge=1, le=131072)
    """The most tokens of a response, including the end token."""
    engine: Literal["transformers", "vllm"] = setting("transformers", flag="--engine ENGINE")
    """Inference engine: `transformers` runs a model in each rank's process; `vllm` uses servers
    over HTTP for all ranks."""
    engine_url: str = setting("", flag="--engine-url ENGINE_URL", may_change=True)
    """URLs of the vLLM servers, separated by commas, without passwords. If empty with
    `controller.cluster = "ray"`, actors start `controller.engines` servers."""
    vllm_python: str = setting("", may_change=True)
    """Path on the nodes of a Python with vLLM and this package, for servers that actors start;
    empty for the actors' Python."""
    vllm_arguments: str = setting("", may_change=True)
    """Further arguments for those servers, such as `--dtype bfloat16 --max-model-len 4096`."""
    request_timeout_s: float = setting(600.0, gt=0, may_change=True)
    """Time limit of one response in seconds, after which the run ends with an error."""
    router_replay: Literal["off", "measure", "replay"] = "off"
    """Use of the experts that the engine's routers selected, for models with experts: `replay`
    trains with them, `measure` only logs how often the trainer would select others. A vLLM server
    needs `--enable-return-routed-experts`."""

    def __post_init__(self) -> None:
        refuse_secrets(
            "rollout.engine_url",
            self.engine_url,
            "config.toml would keep it, and vLLM reads none: give the URL without it; a proxy on "
            "this machine can add what one in front of the servers asks for",
        )
        if self.engine_url and self.engine == "transformers":
            allowed = "a URL for each server of vllm, none for transformers"
            raise refused(self, "engine", "engine_url", allowed=allowed)


@settings(ConfigError, "sync.")
class SyncConfig:
    """Settings of weight updates to the engines, such as transport and bucket size. Example:
    `SyncConfig(transport="shared_memory")`.
    """

    transport: Transport = setting("shared_memory", may_change=True)
    """Transport of weights from ranks to vLLM (`cuda_ipc` needs trainer and vLLM on one GPU).
    Engines of transformers in the controller use shared memory if two buckets fit, otherwise files;
    so do engines on Ray."""
    directory: str = setting("", may_change=True)
    """Folder for transports through files, which servers must see under the same path. For `bucket`
    a URL without a password, such as `s3://weights/run`, with which servers must be started
    (`MEGATRON_IDEMPOTENT_BUCKET`). Empty for `sync/` in the output directory."""
    address: str = setting("", may_change=True)
    """This machine's address for the servers, with `gloo` and `nccl`; empty for 127.0.0.1."""
    workers: int = setting(1, ge=1, may_change=True)
    """Workers of each vLLM server (its tensor-parallel size), with `gloo` and `nccl`."""
    bucket_mb: int = setting(256, ge=1, may_change=True)
    """Maximum size of a bucket of weights in MiB; up to two are in memory."""
    senders: int = setting(0, ge=0, may_change=True)
    """Maximum number of ranks of an asynchronous run that send concurrently: the first ranks of
    pipeline stages and of expert-parallel ranks, each its own part. 0 for no limit, 1 for rank
    0."""
    deltas: bool = setting(False, may_change=True)
    """True to send only the elements whose bits have changed since the last publish, if all engines
    have that version. Ranks keep a copy of the weights that they send in host memory."""

    def __post_init__(self) -> None:
        refuse_secrets(
            "sync.directory",
            self.directory,
            "config.toml would keep it: give the URL without it, and the secret in the "
            "environment, as AWS_SECRET_ACCESS_KEY for s3, or in fsspec's own configuration",
        )
        if self.transport == "bucket":
            try:
                place_of(self.directory)
            except ValueError as error:
                raise ValueError(f"sync.directory: {error}") from None

    @property
    def bucket_bytes(self) -> int:
        """The maximum size of a bucket of weights in bytes."""
        return self.bucket_mb << 20


@settings(ConfigError, "loss.")
class LossConfig:
    """Settings of the GRPO loss: clipping, KL penalty, off-policy correction. Example:
    `LossConfig(clip_low=0.2, clip_high=0.28)`.
    """

    clip_low: float = setting(0.2, ge=0, le=1)
    """The ratio to the old policy is clipped below at 1 - `clip_low`."""
    clip_high: float = setting(0.2, ge=0, le=10)
    """The ratio to the old policy is clipped above at 1 + `clip_high`."""
    # Training from random weights depends on exploration, which the distance from the nearly
    # uniform initial policy keeps alive.
    kl_coefficient: float = setting(0.01, ge=0, le=100)
    """Coefficient of the KL penalty (k3 estimator); with 0, no reference log-probs are computed."""
    kl_reference: Literal["initial", "old"] = "initial"
    """Reference policy of the KL penalty: the `initial` weights, or the weights that sampled
    (`old`)."""
    normalize_std: bool = True
    """True to divide each group's advantages by the standard deviation of its rewards."""
    # From random weights, the clipped ratio to the weights that sampled learns better than
    # recomputed log-probs with truncated weights, whose ratio is always 1 and never clipped.
    old_logprobs: Literal["behaviour", "recomputed"] = "behaviour"
    """Old log-probs in the ratio: `behaviour` uses the engine's, from sampling; `recomputed`
    computes them with the trainer's weights before it trains on the batch."""
    correction: Literal["none", "truncate", "mask"] = "none"
    """Use of the importance ratio of recomputed log-probs to the engine's: `none` ignores it;
    `truncate` weights each token by it, up to `correction_high`; `mask` weights each token by it,
    and rejects tokens outside of both bounds."""
    correction_low: float = setting(0.5, ge=0, le=1)
    """Smallest importance ratio that `mask` keeps."""
    correction_high: float = setting(2.0, ge=1, le=1e6)
    """Largest weight of `truncate`, and largest importance ratio that `mask` keeps."""
    correction_level: Literal["token", "sequence"] = "token"
    """Level of the importance ratio: per token, or the geometric mean over the sequence."""

    def __post_init__(self) -> None:
        if self.correction != "none" and self.old_logprobs != "recomputed":
            allowed = (
                "old_logprobs recomputed, or correction none, since the ratio is that of "
                "recomputed log-probs to the engine's"
            )
            raise refused(self, "correction", "old_logprobs", allowed=allowed)

    @property
    def logprob_models(self) -> tuple[LogprobsOf, ...]:
        """The models whose log-probs a batch needs before the policy trains on it: `policy` to
        recompute the old ones, `reference` for the KL penalty to the initial weights.
        """
        models: list[LogprobsOf] = ["policy"] if self.old_logprobs == "recomputed" else []
        if self.kl_coefficient and self.kl_reference == "initial":
            models.append("reference")
        return tuple(models)


@settings(ConfigError, "optimizer.")
class OptimizerConfig:
    """Settings of Adam and of optimizer steps. Example: `OptimizerConfig(lr=3e-4)`."""

    lr: float = setting(1e-3, gt=0, le=1)
    """Learning rate, constant after the warm-up."""
    warmup_steps: int = setting(20, ge=0)
    """Optimizer steps over which the learning rate rises from zero."""
    steps_per_rollout: int = setting(4, ge=1, le=1024, with_async=1)
    """Optimizer steps per rollout; each sample is used in exactly one of them."""
    microbatches_per_step: int = setting(2, ge=1, le=1024)
    """Microbatches per optimizer step on each rank; the last one reduces gradients."""
    chunks_per_step: int = setting(0, ge=0, le=1024, may_change=True)
    """Number of calls that pass a step's microbatches, a divisor of `microbatches_per_step`; 0 for
    one microbatch per call or, in a pipeline, as many per call as stages. The weights do not depend
    on it, unless `max_tokens_per_microbatch` packs each call's sequences."""
    max_tokens_per_microbatch: int = setting(0, ge=0)
    """The most tokens of a microbatch, as a pack of sequences without padding; 0 for
    `microbatches_per_step` microbatches of padded rows."""
    beta1: float = setting(0.9, ge=0, le=0.9999)
    """Adam's decay of the first moment."""
    beta2: float = setting(0.95, ge=0, le=0.99999)
    """Adam's decay of the second moment."""
    weight_decay: float = setting(0.0, ge=0, le=1)
    """Decoupled weight decay."""
    clip_grad: float = setting(1.0, ge=0)
    """Gradient norm above which gradients are scaled down; 0 for no clipping."""

    def __post_init__(self) -> None:
        calls, microbatches = self.chunks_per_step or 1, self.microbatches_per_step
        size_key = "optimizer.microbatches_per_step"
        _need_divisor("optimizer.chunks_per_step", calls, size_key, microbatches)


@settings(ConfigError, "controller.")
class ControllerConfig(ControllerLimits):
    """Settings of asynchronous runs (`run.mode = "async"`). Example: `ControllerConfig(engines=2)`.

    A rollout is then an outer step: `rollout.prompts` groups train in
    `optimizer.steps_per_rollout` optimizer steps, and engines get the new weights.
    """

    sampler: str = "windowed"
    """Sampler, which decides which groups start and train: `windowed`, `strict`, `first_ready`,
    `in_order`, or a class as `package.module:Class`."""
    max_staleness: int = setting(2, ge=0)
    """The most optimizer steps between the weights that sampled a group and the weights that it
    trains; for `windowed` and `in_order`."""
    order: Literal["freshest", "oldest"] = "oldest"
    """Order in which `windowed` trains groups: newest weights first, or in order of completion."""
    gated: bool = True
    """True to start only groups that can train within the window; False to start as many as
    capacity allows, of which more become stale. For `windowed` and `strict`."""
    abort_stale: bool = False
    """True to abort groups that become too stale while they are being generated; for `windowed` and
    `strict`."""
    drop_tied: bool = False
    """True to drop groups whose rewards are all equal, and sample others instead."""
    cluster: Literal["embedded", "ray"] = setting(
        "embedded", flag="--cluster CLUSTER", may_change=True
    )
    """Location of the ranks: processes of this machine (`embedded`), or a Ray cluster."""
    ray_address: str = setting("", may_change=True)
    """Address of the Ray cluster for `ray.init`; empty for the address in RAY_ADDRESS or, if
    that is not set, a new cluster on this machine."""
    cpus_per_rank: int = setting(1, ge=1, may_change=True)
    """CPUs that Ray reserves for each rank, with `cluster = "ray"`."""
    gpus_per_rank: int = setting(0, ge=0, may_change=True)
    """GPUs that Ray reserves for each rank, with `cluster = "ray"`: 1 or more with
    `run.device = "cuda"`, otherwise 0."""
    engines: int = setting(1, ge=1, le=4096, may_change=True)
    """Number of engines, unless `rollout.engine_url` lists servers: models of transformers in the
    controller's process or, with `cluster = "ray"`, actors spread over the nodes."""
    cpus_per_engine: int = setting(1, ge=1, may_change=True)
    """CPUs that Ray reserves for each engine, with `cluster = "ray"`."""
    gpus_per_engine: int = setting(0, ge=0, may_change=True)
    """GPUs that Ray reserves for each engine, with `cluster = "ray"`; also the number of
    tensor-parallel workers of a vLLM server."""
    plane: Literal["memory", "transfer_queue"] = setting("memory", may_change=True)
    """Storage of complete groups: the controller's memory, or TransferQueue."""
    call_timeout_s: float = setting(600.0, gt=0, may_change=True)
    """Time limit of one call of the ranks, such as a microbatch or a checkpoint, in seconds, after
    which they count as lost."""
    loggers: str = setting("", may_change=True)
    """Further loggers, separated by commas: `wandb`, or `package.module:callable`. Synchronous runs
    use them, too."""
    timeline: bool = setting(True, may_change=True)
    """True to record a timeline of the run, as a trace for Perfetto."""

    def __post_init__(self) -> None:
        ControllerLimits.__post_init__(self)
        for role in ("rank", "engine"):
            keys = f"cpus_per_{role}", f"gpus_per_{role}"
            if self.cluster != "ray" and [getattr(self, key) for key in keys] != [1, 0]:
                allowed = f"cluster = 'ray', which reserves them for each {role}, or 1 and 0"
                raise refused(self, *keys, "cluster", allowed=allowed)


@settings(ConfigError, "evaluation.")
class EvaluationConfig:
    """Settings of evaluations on held-out prompts. Example: `EvaluationConfig(every=10)`."""

    every: int = setting(10, ge=0, with_async=40, may_change=True)
    """Rollouts between two evaluations; 0 for evaluations at the start and the end only."""
    prompts: int = setting(256, ge=1)
    """Held-out prompts per evaluation, the first ones of the file, with one sample each."""


@settings(ConfigError)
class Config:
    """The configuration of a training run: all its sections. Example:
    `Config(run=RunConfig(rollouts=3))`.

    The defaults are those of a synchronous run; `load_config` gives an asynchronous run its own.

    Raises:
        ConfigError: with a line for each wrong key.
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
        run, parallel, model, rollout = self.run, self.parallel, self.model, self.rollout
        optimizer, cluster = self.optimizer, self.controller.cluster
        if run.mode == "sync" and cluster != "embedded":
            allowed = "run.mode = 'async', which --async is short for"
            raise refused(self, "controller.cluster", "run.mode", allowed=allowed)
        gpus = self.controller.gpus_per_rank
        if cluster == "ray" and bool(gpus) != (run.device == "cuda"):
            allowed = (
                "one or more with run.device = 'cuda', none with another, because Ray shows ranks "
                "the GPUs that they request"
            )
            raise refused(self, "controller.gpus_per_rank", "run.device", allowed=allowed)
        if rollout.engine == "vllm" and not rollout.engine_url and cluster != "ray":
            allowed = (
                "a URL for each server, or controller.cluster = 'ray', whose actors start them"
            )
            raise refused(self, "rollout.engine", "rollout.engine_url", allowed=allowed)
        if rollout.router_replay != "off" and not (model.path or model.num_experts):
            allowed = "off for a model without experts"
            raise refused(self, "rollout.router_replay", "model.num_experts", allowed=allowed)
        _need_divisor("parallel.tp x cp x pp", parallel.members, "run.ranks", run.ranks)
        apart = self.replicas * parallel.cp
        reason = ": replicas and context-parallel ranks split the experts"
        _need_divisor("parallel.ep", parallel.ep, "run.ranks / (tp x pp)", apart, reason)
        if not model.path:  # a checkpoint's model is checked later
            width = "expert_ffn" if model.num_experts else "ffn"
            keys = ("heads", "query_groups", width, "layers", "num_experts")
            parallel.check_sizes({f"model.{key}": getattr(model, key) for key in keys})
        together = optimizer.microbatches_per_step // self.chunks
        if parallel.vpp > 1:
            per_call = "optimizer.microbatches_per_step / chunks_per_step"
            reason = ", because an interleaved schedule takes a multiple of the stages"
            _need_divisor("parallel.pp", parallel.pp, per_call, together, reason)
        reason = ", because every replica takes whole groups"
        replicas = "run.ranks / (tp x cp x pp)"
        _need_divisor(replicas, self.replicas, "rollout.prompts", rollout.prompts, reason)
        pieces = optimizer.steps_per_rollout * optimizer.microbatches_per_step
        per_rollout = "optimizer.steps_per_rollout x microbatches_per_step"
        samples = "a replica's number of samples of a rollout"
        _need_divisor(per_rollout, pieces, samples, self.samples_per_replica)

    @property
    def layout(self) -> RankLayout:
        """The `RankLayout` of the run: sizes of model parallelism, and number of replicas."""
        parallel = self.parallel
        return RankLayout(tp=parallel.tp, cp=parallel.cp, pp=parallel.pp, replicas=self.replicas)

    @property
    def replicas(self) -> int:
        """The number of replicas of the model: the data-parallel size."""
        return self.run.ranks // self.parallel.members

    @property
    def chunks(self) -> int:
        """The number of calls of `TrainStep.microbatch` in an optimizer step. Each call gets an
        equal number of the step's microbatches.
        """
        optimizer, stages = self.optimizer, self.parallel.pp
        if optimizer.chunks_per_step:
            return optimizer.chunks_per_step
        # With fewer microbatches per call than stages, stages would be idle.
        calls, remainder = divmod(optimizer.microbatches_per_step, stages)
        return 1 if remainder else calls

    @property
    def packs(self) -> bool:
        """True if microbatches are packs of sequences instead of padded rows."""
        return self.optimizer.max_tokens_per_microbatch > 0

    @property
    def samples_per_replica(self) -> int:
        """The number of sequences that a replica's ranks sample and train on per rollout."""
        return self.rollout.prompts * self.rollout.group_size // self.replicas

    @property
    def microbatch_size(self) -> int:
        """The number of sequences in one microbatch of a replica."""
        pieces = self.optimizer.steps_per_rollout * self.optimizer.microbatches_per_step
        return self.samples_per_replica // pieces

    @property
    def rank_batch_size(self) -> int:
        """The number of sequences on which one replica trains in an optimizer step."""
        return self.microbatch_size * self.optimizer.microbatches_per_step

    @property
    def global_batch_size(self) -> int:
        """The number of sequences on which all replicas train in an optimizer step."""
        return self.rank_batch_size * self.replicas

    @property
    def last_version(self) -> int:
        """The number of the last version of the weights in a run: its number of optimizer steps."""
        return self.run.rollouts * self.optimizer.steps_per_rollout

    @property
    def chunk_size(self) -> int:
        """The number of sequences that each of the `chunks` calls of `TrainStep.microbatch` gets on
        a replica.
        """
        return self.rank_batch_size // self.chunks


SECTIONS: dict[str, Any] = {
    field.name: field.default_factory for field in dataclasses.fields(Config)
}
"""The class of each section, by its name."""


@functools.cache
def declared(mark: str) -> Mapping[str, Mapping[str, Any]]:
    """Return by section and key what `setting` got as its argument `mark`, such as "flag". Settings
    declared without this argument are left out.

    Example: `declared("with_async")["run"]["rollouts"]` is 600.
    """
    return {
        section: {
            key: field[mark] for key, field in schema(kind)["properties"].items() if mark in field
        }
        for section, kind in SECTIONS.items()
    }


def load_config(
    path: Path | None = None, overrides: Sequence[str] = (), *, ranks: int | None = None
) -> Config:
    """Read the configuration in a TOML file, with `section.key=value` overrides applied in order.

    Other keys have the defaults of the run's mode. In a synchronous run, `ranks` is the default of
    `run.ranks` unless it is None.

    Raises:
        ConfigError: with a line for each wrong key.

    Example: `load_config(None, ["run.rollouts=300"])`.
    """
    reader = SettingsReader(Config, ConfigError, path).set(*overrides)
    run = reader.table.get("run")
    if isinstance(run, dict) and run.get("mode") == "async":
        return reader.build(declared("with_async"))
    return reader.build({"run": {"ranks": ranks}} if ranks is not None else None)


def as_toml(config: Config) -> str:
    """Return the configuration as TOML text, which `load_config` can read."""
    import tomli_w

    return tomli_w.dumps(dataclasses.asdict(config))
