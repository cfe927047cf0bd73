"""Defines and reads the configuration of a run: its sections, keys, defaults and limits.

The string under a field documents it. The table in docs/settings.md, the JSON schema and the errors
are all made from these classes. `python -m megatron_idempotent.rl.trainer.config docs/settings.md`
writes the table again.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megatron_idempotent.rl.weights.urls import place_of, refuse_secrets
from megatron_idempotent.settings import Field, SettingsReader, allowed, schema, settings

from . import ConfigError
from .layout import RankLayout


@settings(ConfigError, "run.")
class RunConfig:
    """Sets where a run takes place and how long it is.

    Example: `RunConfig(rollouts=3, out="runs/a")`.
    """

    rollouts: int = Field(default=150, ge=1)
    """Rollouts in the whole run; `optimizer.steps_per_rollout` optimizer steps follow each."""
    mode: Literal["sync", "async"] = "sync"
    """`sync` samples and trains in turn, `async` at the same time: see `[controller]`."""
    seed: int = Field(default=1, ge=0, le=2**31 - 1)
    """Seed of the initial weights, the order of the prompts and the sampled tokens."""
    ranks: int = Field(default=2, ge=1, le=64)
    """Processes that train, connected by gloo, or by NCCL on GPUs; under torchrun those that it has
    started. Each has a replica of the model, unless `[parallel]` has several of them share one."""
    device: Literal["cpu", "cuda", "checked"] = "cpu"
    """Device of ranks and engines: the CPU, this machine's GPUs, or with `checked` a CPU that
    refuses what a GPU would refuse, to try a change without a GPU."""
    out: str = ""
    """Output directory for logs, curves and checkpoints; empty for the next free
    `runs/train-NNN`."""
    checkpoint_every: int = Field(default=25, ge=0)
    """Rollouts between two checkpoints; the last rollout gets one too. 0 writes none, except when
    SIGTERM stops an asynchronous run."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Complete checkpoints that stay on disk; older ones are removed."""
    timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds that the whole run may take; after that all ranks are ended. An asynchronous run has
    the limits in `[controller]` instead."""


@settings(ConfigError, "parallel.")
class ParallelConfig:
    """Sets how ranks share a replica of the model. Example: `ParallelConfig(tp=2, pp=2)`."""

    tp: int = Field(default=1, ge=1, le=64)
    """Tensor-parallel ranks; they cut heads, feed-forward blocks and the vocabulary."""
    pp: int = Field(default=1, ge=1, le=64)
    """Pipeline stages; they cut the layers."""
    cp: int = Field(default=1, ge=1, le=64)
    """Context-parallel ranks; they cut the positions of each sequence."""
    vpp: int = Field(default=1, ge=1, le=64)
    """Model chunks on each pipeline stage; above 1 the schedule is interleaved."""
    ep: int = Field(default=1, ge=1, le=64)
    """Expert-parallel ranks; they cut the experts. They are ranks of several replicas, or the
    context-parallel ranks of one."""
    sequence_parallel: bool = False
    """True to have tensor-parallel ranks cut the positions too, outside of attention and
    feed-forward blocks."""

    def __post_init__(self) -> None:
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(
                f"parallel.vpp is {self.vpp} and parallel.pp is 1; allowed: 2 or more stages, "
                "between which chunks alternate, or vpp = 1"
            )
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "parallel.sequence_parallel is true and parallel.tp is 1; allowed: 2 or more "
                "ranks, which cut the positions, or false"
            )

    @property
    def is_whole(self) -> bool:
        """True if every rank has the whole model."""
        return self.tp == self.pp == self.ep == 1

    @property
    def members(self) -> int:
        """The number of ranks that share a replica."""
        return self.tp * self.cp * self.pp

    def rounded(self, positions: int) -> int:
        """Return the least length from `positions` on into which ranks can cut sequences evenly."""
        by = (self.tp if self.sequence_parallel else 1) * (2 * self.cp if self.cp > 1 else 1)
        return -(-positions // by) * by

    def misfit(self, sizes: Mapping[str, int]) -> str:
        """Say why ranks cannot cut a model so, or return "" if they can.

        `sizes` are named as in the user's configuration, in this order: heads, query groups, width
        of a feed-forward block or, in a model with experts, of an expert; layers; experts, 0 for
        none.
        Example: `config.parallel.misfit({"num_attention_heads": 4})`.
        """
        *cut, (name, experts) = sizes.items()
        ways = [("tp", self.tp)] * 3 + [("pp x vpp", self.pp * self.vpp)]
        for (key, ranks), (by, size) in zip(ways, cut, strict=True):
            if size % ranks:
                return f"parallel.{key} is {ranks} and {by} is {size}; allowed: a divisor of it"
        if self.ep > 1 and (not experts or experts % self.ep):
            return (
                f"parallel.ep is {self.ep} and {name} is {experts}; allowed: a divisor of it, or 1 "
                "for a model without experts"
            )
        if experts and self.tp > 1 and not self.sequence_parallel:
            return (
                f"parallel.sequence_parallel is false, parallel.tp is {self.tp} and {name} is "
                f"{experts}; allowed: true, which Megatron's experts need beside tensor parallelism"
            )
        return ""


@settings(ConfigError, "task.")
class TaskConfig:
    """Sets prompts and their verifier. Example: `TaskConfig(data="my_task.jsonl")`."""

    data: str = ""
    """JSONL file of prompts, with `prompt` (or `messages`), `answer` and `split` in each row, and
    fields for the verifier; empty for the shipped file."""
    reward: str = "megatron_idempotent.rl.trainer.task.reward:position_reward"
    """Verifier, as `package.module:function`; it is imported on every rank."""


@settings(ConfigError, "model.")
class ModelConfig:
    """Sets the decoder that is trained. Example: `ModelConfig(path="checkpoints/Qwen3-0.6B")`.

    Without a path the other keys give the shape of a Llama with random weights or, with experts, of
    a Qwen3-MoE.
    """

    path: str = ""
    """Folder of the Hugging Face checkpoint (Llama, Qwen2, Qwen3, Qwen3-MoE) to start from, with
    its tokenizer; empty for random weights."""
    layers: int = Field(default=2, ge=1, le=64)
    """Transformer layers."""
    hidden: int = Field(default=64, ge=8, le=8192)
    """Width of the residual stream."""
    ffn: int = Field(default=128, ge=8, le=32768)
    """Width of the SwiGLU block after gating, in a model without experts."""
    heads: int = Field(default=4, ge=1, le=128)
    """Query heads; they divide `hidden` into heads of an even width."""
    query_groups: int = Field(default=2, ge=1, le=128)
    """Key and value heads; they divide `heads`."""
    num_experts: int = Field(default=0, ge=0, le=1024)
    """Experts in each layer of a Qwen3-MoE; 0 for a Llama, which has none."""
    experts_per_token: int = Field(default=2, ge=1, le=1024)
    """Experts to which each token is sent, at most `num_experts`."""
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
    """Sets the samples of one rollout. Example: `RolloutConfig(prompts=32, group_size=8)`."""

    prompts: int = Field(default=64, ge=1)
    """Prompts per rollout, over all ranks."""
    group_size: int = Field(default=16, ge=2, le=1024)
    """Samples per prompt; they are a group, and an advantage compares a sample with its group."""
    temperature: float = Field(default=1.0, gt=0, le=10)
    """Sampling temperature; log-probs are those at this temperature."""
    max_response_tokens: int = Field(default=4, ge=1, le=131072)
    """The most tokens of a response, the end token included."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """Engine that samples: `transformers` runs a model in each rank's process; `vllm` is
    servers over HTTP for all ranks."""
    engine_url: str = ""
    """URLs of the vLLM servers, separated by commas, without passwords. Empty with
    `controller.cluster = "ray"` for `controller.engines` servers that actors start."""
    vllm_python: str = ""
    """Python, on the nodes, of an environment with vLLM and this package, for servers that actors
    start; empty for the actors' own."""
    vllm_arguments: str = ""
    """More arguments for those servers, as in `--dtype bfloat16 --max-model-len 4096`."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that one response may take; after that the run ends with an error."""
    router_replay: Literal["off", "measure", "replay"] = "off"
    """Use of the experts that the engine's routers took, for models with experts: `replay` trains
    on them, `measure` only logs the share for which the trainer would take others. A vLLM server
    needs `--enable-return-routed-experts`."""

    def __post_init__(self) -> None:
        refuse_secrets(
            "rollout.engine_url",
            self.engine_url,
            "config.toml would keep it, and vLLM reads none: give the URL without it; a proxy on "
            "this machine can add what one in front of the servers asks for",
        )
        if self.engine_url and self.engine == "transformers":
            raise ValueError(
                f"rollout.engine is {self.engine!r} and rollout.engine_url is {self.engine_url!r}; "
                "allowed: a URL for each server of vllm, none for transformers"
            )


@settings(ConfigError, "sync.")
class SyncConfig:
    """Sets how new weights get to the engines. Example: `SyncConfig(transport="shared_memory")`."""

    transport: Literal["shared_memory", "disk", "gloo", "nccl", "cuda_ipc", "bucket"] = (
        "shared_memory"
    )
    """Transport of weights from ranks to vLLM (`cuda_ipc` needs trainer and vLLM on one GPU).
    Engines of transformers in the controller take shared memory if there is room for two buckets,
    else files, as do engines on Ray."""
    directory: str = ""
    """Folder for weights that go through files, which servers must see too, or for `bucket` a URL
    without a password, such as `s3://weights/run`, which servers must be started with
    (`MEGATRON_IDEMPOTENT_BUCKET`); empty for `sync/` in the output directory."""
    address: str = ""
    """Address at which servers reach this machine, for `gloo` and `nccl`; empty for 127.0.0.1."""
    workers: int = Field(default=1, ge=1)
    """Workers of each vLLM server (its tensor-parallel size), for `gloo` and `nccl`."""
    bucket_mb: int = Field(default=256, ge=1)
    """Largest bucket of weights that is sent at once, in MiB; up to two are in memory."""
    senders: int = Field(default=0, ge=0)
    """Most ranks of an asynchronous run that send side by side: the first ones of pipeline stages
    and of expert-parallel ranks, each what it has. 0 for all of them, and 1 for rank 0."""
    deltas: bool = False
    """True to send only the elements whose bits have changed since the last publish, if all engines
    have it. Ranks keep a copy in host memory of the weights that they send."""

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


@settings(ConfigError, "loss.")
class LossConfig:
    """Sets the objective. Example: `LossConfig(clip_low=0.2, clip_high=0.28)`."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio to the old policy is clipped below at 1 - `clip_low`."""
    clip_high: float = Field(default=0.2, ge=0, le=10)
    """The ratio to the old policy is clipped above at 1 + `clip_high`."""
    # From random weights, exploration is all there is: the distance from the initial policy, which
    # is nearly uniform, is what keeps it alive.
    kl_coefficient: float = Field(default=0.01, ge=0, le=100)
    """Coefficient of the KL penalty (k3 estimator); 0 computes no reference log-probs."""
    kl_reference: Literal["initial", "old"] = "initial"
    """Policy from which the penalty measures the distance: that of the `initial` weights, or of the
    weights that sampled (`old`)."""
    normalize_std: bool = True
    """True to divide each group's advantages by the standard deviation of its rewards."""
    # From random weights, the clipped ratio to the weights that sampled learns more than recomputed
    # log-probs with truncated weights, of which the ratio is always 1 and nothing is clipped.
    old_logprobs: Literal["behaviour", "recomputed"] = "behaviour"
    """Old log-probs in the ratio: `behaviour` takes the engine's, as it sampled; `recomputed`
    computes them with the weights from which training starts."""
    correction: Literal["none", "truncate", "mask"] = "none"
    """Use of the importance ratio of recomputed log-probs to the engine's: `none` ignores it;
    `truncate` weighs each token by it, up to `correction_high`; `mask` weighs each token by it, and
    rejects tokens outside both bounds."""
    correction_low: float = Field(default=0.5, ge=0, le=1)
    """Smallest importance ratio that `mask` keeps."""
    correction_high: float = Field(default=2.0, ge=1, le=1e6)
    """Largest weight with `truncate`, and largest importance ratio that `mask` keeps."""
    correction_level: Literal["token", "sequence"] = "token"
    """Importance ratio of a token: its own, or the geometric mean over its sequence."""

    def __post_init__(self) -> None:
        if self.correction != "none" and self.old_logprobs != "recomputed":
            raise ValueError(
                f"loss.correction is {self.correction!r} and loss.old_logprobs is "
                f"{self.old_logprobs!r}; allowed: old_logprobs recomputed, or correction none, "
                "since the ratio is that of recomputed log-probs to the engine's"
            )


@settings(ConfigError, "optimizer.")
class OptimizerConfig:
    """Sets Adam, and cuts a rollout into optimizer steps. Example: `OptimizerConfig(lr=3e-4)`."""

    lr: float = Field(default=1e-3, gt=0, le=1)
    """Learning rate, constant after the warm-up."""
    warmup_steps: int = Field(default=20, ge=0)
    """Optimizer steps over which the learning rate rises from zero."""
    steps_per_rollout: int = Field(default=4, ge=1, le=1024)
    """Optimizer steps per rollout; each sample is used in exactly one of them."""
    microbatches_per_step: int = Field(default=2, ge=1, le=1024)
    """Microbatches per optimizer step on each rank; gradients are reduced in the last one."""
    chunks_per_step: int = Field(default=0, ge=0, le=1024)
    """Calls in which a step's microbatches are handed over, a divisor of
    `microbatches_per_step`; 0 for one microbatch a call or, in a pipeline, as many a call as it has
    stages. Weights do not depend on it, unless `max_tokens_per_microbatch` has each call's
    sequences packed."""
    max_tokens_per_microbatch: int = Field(default=0, ge=0)
    """The most tokens of a microbatch that is a pack of sequences without padding; 0 for
    `microbatches_per_step` microbatches of padded rows."""
    beta1: float = Field(default=0.9, ge=0, le=0.9999)
    """Adam's decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, le=0.99999)
    """Adam's decay of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Decoupled weight decay."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Norm to which larger gradients are scaled down; 0 never clips."""

    def __post_init__(self) -> None:
        if self.chunks_per_step and self.microbatches_per_step % self.chunks_per_step:
            raise ValueError(
                f"optimizer.chunks_per_step is {self.chunks_per_step}; allowed: a divisor of "
                f"optimizer.microbatches_per_step, which is {self.microbatches_per_step}"
            )


@settings(ConfigError, "controller.")
class ControllerConfig:
    """Sets an asynchronous run, `run.mode = "async"`. Example: `ControllerConfig(engines=2)`.

    A rollout is then an outer step: `rollout.prompts` groups train in
    `optimizer.steps_per_rollout` optimizer steps, and engines get the new weights.
    """

    sampler: str = "windowed"
    """Sampler, which decides which groups start and train: `windowed`, `strict`, `first_ready`,
    `in_order`, or a path `package.module:Class`."""
    max_staleness: int = Field(default=2, ge=0)
    """The most optimizer steps between the weights that sampled a group and those that it trains;
    for `windowed` and `in_order`."""
    order: Literal["freshest", "oldest"] = "oldest"
    """Groups that `windowed` trains first: those of the newest weights, or those that were complete
    first."""
    gated: bool = True
    """True to start only groups that can train within the window. False starts as many as capacity
    allows, and throws more of them away. For `windowed` and `strict`."""
    abort_stale: bool = False
    """True to end groups that become too old while they are being generated; for `windowed` and
    `strict`."""
    capacity: int = Field(default=0, ge=0)
    """The most groups that may be generating or complete at once; 0 for what the sampler needs."""
    concurrency: int = Field(default=0, ge=0)
    """The most groups that may be generating at once; 0 for as many as the capacity."""
    groups_per_call: int = Field(default=0, ge=0)
    """The most groups that are handed to the ranks in one call; 0 for half of an optimizer
    step's."""
    min_groups_per_call: int = Field(default=1, ge=1)
    """The fewest groups that are handed to the ranks in one call, unless a step lacks fewer."""
    drop_tied: bool = False
    """True to leave out groups whose rewards are all equal; others are sampled in their place."""
    cluster: Literal["embedded", "ray"] = "embedded"
    """Place of the ranks: started by this process (`embedded`), or on a Ray cluster."""
    ray_address: str = ""
    """Address of the Ray cluster, as `ray.init` takes it; empty for that in RAY_ADDRESS or, without
    one, a new cluster on this machine."""
    cpus_per_rank: int = Field(default=1, ge=1)
    """CPUs that Ray reserves for each rank, with `cluster = "ray"`."""
    gpus_per_rank: int = Field(default=0, ge=0)
    """GPUs that Ray reserves for each rank, with `cluster = "ray"`: none, or with
    `run.device = "cuda"` one or more."""
    engines: int = Field(default=1, ge=1, le=4096)
    """Number of engines, unless they are servers of `rollout.engine_url`: of transformers in the
    controller's process or, with `cluster = "ray"`, actors that are spread over the nodes."""
    cpus_per_engine: int = Field(default=1, ge=1)
    """CPUs that Ray reserves for each engine, with `cluster = "ray"`."""
    gpus_per_engine: int = Field(default=0, ge=0)
    """GPUs that Ray reserves for each engine, with `cluster = "ray"`; a vLLM server has as many
    tensor-parallel workers."""
    plane: Literal["memory", "transfer_queue"] = "memory"
    """Place in which complete groups wait: the controller's memory, or TransferQueue."""
    step_attempts: int = Field(default=3, ge=1)
    """Attempts at an optimizer step with the same groups, before the run ends."""
    group_attempts: int = Field(default=3, ge=1)
    """Attempts at a group, before it is dropped and reported."""
    restarts: int = Field(default=3, ge=0)
    """Restarts of lost ranks without a step in between, before the run ends."""
    group_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that one attempt at a group may take, all its samples included."""
    call_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that one call on the ranks may take, such as a microbatch or a checkpoint; after that
    they count as lost."""
    stall_s: float = Field(default=1200.0, gt=0)
    """Seconds without any progress, after which the run ends with an error that says where it
    stands."""
    drain_s: float = Field(default=60.0, gt=0)
    """Seconds that the open step has to finish after SIGTERM; after that it is undone."""
    loggers: str = ""
    """More loggers, separated by commas: `wandb`, or `package.module:callable`. Synchronous runs
    have them too."""
    timeline: bool = True
    """True to record what each pump does, as a trace for Perfetto."""

    def __post_init__(self) -> None:
        for of in ("rank", "engine"):
            asked = getattr(self, f"cpus_per_{of}"), getattr(self, f"gpus_per_{of}")
            if self.cluster != "ray" and asked != (1, 0):
                raise ValueError(
                    f"controller.cpus_per_{of} is {asked[0]}, gpus_per_{of} is {asked[1]} and "
                    f"controller.cluster is {self.cluster!r}; allowed: controller.cluster = 'ray', "
                    f"which reserves them for each {of}, or 1 and 0"
                )


@settings(ConfigError, "evaluation.")
class EvaluationConfig:
    """Sets evaluations on held-out prompts. Example: `EvaluationConfig(every=10)`."""

    every: int = Field(default=10, ge=0)
    """Rollouts between two evaluations; 0 evaluates at the start and at the end only."""
    prompts: int = Field(default=256, ge=1)
    """Held-out prompts per evaluation, the first ones in the file, with one sample each."""


@settings(ConfigError)
class Config:
    """Holds all sections of a configuration. Example: `Config(run=RunConfig(rollouts=3))`.

    Its defaults are those of a synchronous run. `load_config` gives an asynchronous run the
    defaults in `ASYNC`.
    Errors: `ConfigError`, with a line for each key that is wrong.
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
        asked, device = self.controller.gpus_per_rank, self.run.device
        if self.controller.cluster == "ray" and bool(asked) != (device == "cuda"):
            raise ValueError(
                f"controller.gpus_per_rank is {asked} and run.device is {device!r}; allowed: one "
                "or more with run.device = 'cuda', none with another, because Ray shows ranks the "
                "GPUs that they ask for"
            )
        rollout, cluster = self.rollout, self.controller.cluster
        if rollout.engine == "vllm" and not rollout.engine_url and cluster != "ray":
            raise ValueError(
                "rollout.engine is 'vllm' and rollout.engine_url is ''; allowed: a URL for each "
                "server, or controller.cluster = 'ray', whose actors start servers"
            )
        if self.rollout.router_replay != "off" and not (self.model.path or self.model.num_experts):
            raise ValueError(
                f"rollout.router_replay is {self.rollout.router_replay!r} and model.num_experts is "
                "0; allowed: off for a model without experts"
            )
        # Ranks, model and microbatches can be divided; no checkpoint's model is known yet.
        parallel, model, ranks = self.parallel, self.model, self.run.ranks
        if ranks % parallel.members:
            raise ValueError(
                f"parallel.tp x cp x pp is {parallel.members} and run.ranks is {ranks}; "
                "allowed: a divisor of run.ranks"
            )
        apart = self.replicas * parallel.cp
        if apart % parallel.ep:
            raise ValueError(
                f"parallel.ep is {parallel.ep} and run.ranks / (tp x pp) is {apart}; allowed: a "
                "divisor of it, because experts are cut over replicas and context-parallel ranks"
            )
        if not model.path:
            width = "expert_ffn" if model.num_experts else "ffn"
            keys = ("heads", "query_groups", width, "layers", "num_experts")
            wrong = parallel.misfit({f"model.{key}": getattr(model, key) for key in keys})
            if wrong:
                raise ValueError(wrong)
        together = self.optimizer.microbatches_per_step // self.chunks
        if parallel.vpp > 1 and together % parallel.pp:
            raise ValueError(
                f"optimizer.microbatches_per_step / chunks_per_step is {together} and parallel.pp "
                f"is {parallel.pp}; allowed: a multiple of it, which an interleaved schedule takes"
            )
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
        """The layout: which ranks share a replica of the model."""
        parallel = self.parallel
        return RankLayout(tp=parallel.tp, cp=parallel.cp, pp=parallel.pp, replicas=self.replicas)

    @property
    def replicas(self) -> int:
        """The number of replicas of the model, which is the data-parallel size."""
        return self.run.ranks // self.parallel.members

    @property
    def chunks(self) -> int:
        """The number of calls in which an optimizer step's microbatches are handed over."""
        optimizer, stages = self.optimizer, self.parallel.pp
        if optimizer.chunks_per_step:
            return optimizer.chunks_per_step
        # Fewer microbatches than stages would leave stages idle.
        whole, rest = divmod(optimizer.microbatches_per_step, stages)
        return 1 if rest else whole

    @property
    def packs(self) -> bool:
        """True if microbatches are packs of sequences, and not padded rows."""
        return self.optimizer.max_tokens_per_microbatch > 0

    @property
    def samples_per_replica(self) -> int:
        """The sequences that a replica trains on per rollout; its ranks sample them together."""
        return self.rollout.prompts * self.rollout.group_size // self.replicas

    @property
    def microbatch_size(self) -> int:
        """The sequences in one microbatch of a replica."""
        pieces = self.optimizer.steps_per_rollout * self.optimizer.microbatches_per_step
        return self.samples_per_replica // pieces

    @property
    def rank_batch_size(self) -> int:
        """The sequences that a replica, with each of its ranks, trains on in an optimizer step."""
        return self.microbatch_size * self.optimizer.microbatches_per_step

    @property
    def global_batch_size(self) -> int:
        """The sequences of all replicas in one optimizer step."""
        return self.rank_batch_size * self.replicas

    @property
    def last_version(self) -> int:
        """The version that a run ends with, which is its number of optimizer steps."""
        return self.run.rollouts * self.optimizer.steps_per_rollout

    @property
    def chunk_size(self) -> int:
        """The sequences that a replica hands over in one call, in whole microbatches."""
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
"""The defaults of an asynchronous run that differ from those of `Config`, by section and key."""


def load_config(
    path: Path | None = None, overrides: Sequence[str] = (), *, ranks: int | None = None
) -> Config:
    """Read the configuration in a TOML file, with `section.key=value` overrides applied in order.

    Keys that neither gives have the defaults of `Config` or, in an asynchronous run, of `ASYNC`. In
    a synchronous one `ranks`, unless it is None, is the default of `run.ranks`.
    Errors: `ConfigError`, with a line for each key that is wrong.
    Example: `load_config(None, ["run.rollouts=300"])`.
    """
    given = SettingsReader(Config, ConfigError, path).set(*overrides)
    run = given.table.get("run")
    if isinstance(run, dict) and run.get("mode") == "async":
        return given.build(ASYNC)
    return given.build({"run": {"ranks": ranks}} if ranks is not None else None)


def as_toml(config: Config) -> str:
    """Return the configuration as TOML, from which `load_config` makes an equal one."""
    import tomli_w

    return tomli_w.dumps(dataclasses.asdict(config))


BEGIN = "<!-- settings: python -m megatron_idempotent.rl.trainer.config docs/settings.md -->"
END = "<!-- end of settings -->"


def settings_table() -> str:
    """Return a Markdown table per section, with the defaults of both modes."""
    lines = []
    for name, section in SECTIONS.items():
        lines += [
            f"### `[{name}]`",
            "",
            "| key | default | allowed | meaning |",
            "|---|---|---|---|",
        ]
        for key, field in schema(Config)["$defs"][section.__name__]["properties"].items():
            shown = default(name, key, field["default"])
            meaning = " ".join(field["description"].split())
            lines.append(f"| `{key}` | {shown} | {allowed(field)} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def default(section: str, key: str, value: object) -> str:
    """Return how a default is written: the one of both modes, or of each."""
    shown = _shown(value)
    if key in ASYNC.get(section, {}):
        shown += f"; with `--async` {_shown(ASYNC[section][key])}"
    return shown


def _shown(value: object) -> str:
    if value == "":
        return "empty"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def with_current_table(page: str) -> str:
    """Return the page with the current table between its two markers.

    Errors: `ValueError` for a page without them.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks the markers {BEGIN!r} and {END!r}; put them back")
    return f"{before}{BEGIN}\n\n{settings_table()}\n{END}{after}"


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        text = page.read_text(encoding="utf-8")
        page.write_text(with_current_table(text), encoding="utf-8")
