"""Trains the policy with Megatron, with a `TrainStep` per optimizer step."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

# Imported by name: if a function refers to `torch.distributed` and to a name `config`, cloudpickle
# tries to pickle the module `torch.distributed.config`, and fails.
from torch.distributed import all_reduce, broadcast, get_rank

import megatron_idempotent
from megatron_idempotent import step
from megatron_idempotent.fp8.packing import token_alignment
from megatron_idempotent.megatron.expert_replay import ExpertReplay
from megatron_idempotent.rl.hf import Architecture, MegatronWeights, load_hf, save_hf
from megatron_idempotent.rl.metrics.names import GRAD_NORM, LOSS, POSITIONS, RESPONSE_TOKENS
from megatron_idempotent.rl.trainer.task.prompts import PromptSet, read_prompts
from megatron_idempotent.rl.trainer.task.tokenizer import (
    TextTokenizer,
    longest_sequence,
    make_tokenizer,
)
from megatron_idempotent.rl.weights import WeightSource

from . import ConfigError, megatron_setup
from .batch import Batch, chunks
from .config import Config
from .layout import Replica
from .loss import LogitsOf, PolicyLoss, with_logprobs
from .output import Job, data_path, write_sums

_Weights = Mapping[str, torch.Tensor]


class MegatronPolicy:
    """Trains a decoder with Megatron on all ranks, in any layout of ranks.

    The constructor and all methods are collectives of the default group.

    Example: `metrics = policy.train(batch, index=0)`.
    """

    def __init__(self, config: Config, checkpoint: Path, *, positions: int) -> None:
        """Build the Megatron model and its optimizer, and load the weights from `checkpoint`.

        `checkpoint` is a Hugging Face checkpoint; `positions` is the length of training sequences.
        """
        from megatron.core import parallel_state

        self.config, self.checkpoint, self.positions = config, checkpoint, positions
        self.architecture = Architecture.read(checkpoint)
        self.stock: megatron_setup.MegatronModel = megatron_setup.build_megatron_model(
            megatron_setup.megatron_arguments(config, self.architecture, positions=positions),
            self.architecture,
            positions=positions,
            packs=config.packs,
        )
        load_hf(
            checkpoint,
            self.stock.chunks,
            optimizer=self.stock.optimizer,
            deadline_s=config.run.timeout_s,
        )
        # Copied before a checkpoint of the run is loaded, so that a resumed run has the same
        # reference for the KL penalty.
        self._initial: list[_Weights | None] = [
            {name: value.detach().clone() for name, value in module.named_parameters()}
            for module in self.stock.modules
        ]
        megatron_idempotent.wire_train_config(self.stock.chunks, self.stock.optimizer)
        #: Finishes and aborts the step of `begin`.
        self.step = megatron_idempotent.TrainStep(
            self.stock.chunks,
            self.stock.optimizer,
            self.stock.scheduler,
            forward=_forward,
            router_replay=config.rollout.router_replay,
            # A slow verifier may delay one rank for any time within the run's limit.
            deadline_s=config.run.timeout_s,
        )
        tp = config.parallel.tp > 1
        self._logits = LogitsOf(
            temperature=config.rollout.temperature,
            tp_group=parallel_state.get_tensor_model_parallel_group() if tp else None,
            vocab_size=self.architecture.vocab_size if tp else None,
            cuts_positions=config.parallel.cp > 1,
        )
        self._loss = PolicyLoss(config.loss, of=self._logits)
        self._replay: ExpertReplay | None = None
        if self.step.replay is not None:  # a separate one, whose counts are ignored
            self._replay = ExpertReplay(self.stock.modules, mode=self.step.replay.mode)
        self.replica = Replica(config.layout)

    @contextmanager
    def weights(self) -> Iterator[tuple[torch.nn.Module, ...]]:
        """Yield this rank's model chunks without DDP, to compute with or to export.

        Within the block their parameters are up to date, they are in eval mode, and gradients are
        off.
        """
        with self.step.reading() as chunks:
            yield tuple(chunk.module for chunk in chunks)

    def source(
        self, group: Any = None, *, deltas: bool = False, senders: int | None = 1
    ) -> WeightSource:
        """Return a `WeightSource` of the policy's weights under Hugging Face names. Iterate the
        source within a `weights()` block.

        The group's ranks together have the entire model; None is all ranks. For `deltas` and
        `senders` see `MegatronWeights`.
        """
        return MegatronWeights(
            self.stock.chunks, self.architecture, group=group, deltas=deltas, senders=senders
        )

    def save_hf(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint, with hashes of its files in SHA256SUMS.

        It has the configuration and the tokenizer of the run's initial checkpoint, and replaces an
        older one in `directory` once it is complete.
        """
        with self.weights():
            save_hf(self.source(), directory, like=self.checkpoint, replace=True)
        if get_rank() == 0:
            write_sums(directory)

    def train(self, batch: Batch, *, index: int) -> dict[str, float]:
        """Take `steps_per_rollout` optimizer steps on the batch, which use each sequence once;
        return the rollout's metrics.

        The rollout's `index` determines the order of the sequences. Every rank must pass a batch of
        the same size. Returns metrics over all ranks. An error on any rank is raised on all ranks,
        after its step is undone.
        """
        optimizer, loss = self.config.optimizer, self.config.loss
        logprobs = {model: self.logprobs(batch, model) for model in loss.logprob_models}
        batch, _ = with_logprobs(batch, logprobs, loss)
        stream = chunks(batch, size=self.config.chunk_size, seed=self.config.run.seed, index=index)
        results = [
            self._optimizer_step(itertools.islice(stream, self.config.chunks))
            for _ in range(optimizer.steps_per_rollout)
        ]
        return training_metrics(results) | {
            f"train/{name}": value for name, value in self.routing_metrics().items()
        }

    def routing_metrics(self) -> dict[str, float]:
        """Return the metric `other_experts`, over all ranks: the fraction of (token, layer) pairs
        for which trainer and engine selected different experts since the last call; {} without
        router replay.

        `other_experts` is a fraction of tokens and layers of all ranks. It compares the trainer's
        own selection, even if the engine's is replayed. Empty without router replay. A collective.
        """
        if self.step.replay is None:
            return {}
        counts = self.step.replay.take_counts().cuda()
        all_reduce(counts)
        differing, tokens = counts.tolist()
        return {"other_experts": differing / (tokens or 1.0)}

    def begin(self, step_id: str | None = None, *, rank_batch_size: int | None = None) -> str:
        """Open an optimizer step, and return its id; see `TrainStep.begin`.

        `rank_batch_size` is the number of sequences of this replica in the step, if known.
        """
        config = self.config
        return self.step.begin(
            self._loss,
            global_batch_size=config.global_batch_size,
            micro_batch_size=None if config.packs else config.microbatch_size,
            max_tokens_per_microbatch=config.optimizer.max_tokens_per_microbatch or None,
            rank_batch_size=rank_batch_size,
            step_id=step_id,
        )

    def microbatch(
        self, step_id: str, batch: Batch, *, microbatch_id: str | None = None, last: bool = False
    ) -> None:
        """Run forward and backward on this replica's rows; see `TrainStep.microbatch`."""
        if self.config.packs:
            tensors = batch.on_device().sequences()
        else:
            if self.config.parallel.vpp > 1:
                multiple = self.config.microbatch_size * self.config.parallel.pp
                batch = _filled(batch, multiple)
            tensors = batch.on_device().tensors()
        self.step.microbatch(step_id, tensors, microbatch_id=microbatch_id, last=last)

    def logprobs(self, batch: Batch, which: Literal["policy", "reference"]) -> torch.Tensor:
        """Return log-probs [B, T] of the targets in this rank's rows; 0 where the loss mask is 0.

        "policy" uses the current weights, "reference" the initial ones. May be called while a step
        is open.
        """
        weights = self._initial if which == "reference" else [None] * len(self._initial)
        with self.weights() as modules:
            if not len(batch):  # attention rejects an empty batch
                return torch.empty_like(batch.old_logprobs_BT)
            return self._forward_only(batch, dict(zip(modules, weights, strict=True)))

    def _forward_only(self, batch: Batch, weights: Mapping[Any, _Weights | None]) -> torch.Tensor:
        """Return log-probs [B, T] of the targets, without gradients; in a pipeline they are
        computed in microbatches, otherwise at once.

        `weights` replace the parameters of each module, by name; None for its own. Every rank of
        the replica gets the complete result. A collective of the replica's ranks, or of all ranks
        if experts are spread over replicas.
        """
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        rows, modules, stages = len(batch), list(weights), self.config.parallel.pp
        size = self.config.microbatch_size if stages > 1 else rows
        padded = _filled(batch, size * stages).on_device()
        starts = range(0, len(padded), size)
        pieces = [padded.rows(slice(start, start + size)) for start in starts]

        def forward_step(waiting: Iterator[Batch], module: Any) -> tuple[Any, Any]:
            piece = next(waiting)
            logits = self._decoded(module, weights[module], piece)
            return logits, lambda output, **_: self._logits.logprobs(
                output, piece.targets_BT, piece.loss_mask_BT > 0
            )

        iterators = [iter(pieces) for _ in modules]
        with ExitStack() as stack:
            _starting_nothing(stack, modules)
            parts = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=modules,
                num_microbatches=len(pieces),
                seq_length=batch.tokens_BT.shape[1],
                micro_batch_size=size,
                forward_only=True,
                collect_non_loss_data=True,
            )
        logprobs_BT = torch.empty_like(padded.old_logprobs_BT)
        if parts:
            logprobs_BT = torch.cat(parts).to(logprobs_BT.dtype).contiguous()
        if stages > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            broadcast(logprobs_BT, parallel_state.get_pipeline_model_parallel_last_rank(), group)
        return logprobs_BT[:rows].cpu()

    def _decoded(self, module: Any, weights: _Weights | None, batch: Batch) -> torch.Tensor:
        """Run a model chunk on a batch; return the chunk's output, on the last stage the logits.
        `weights` replace the chunk's parameters. With None, the chunk uses its own parameters and,
        with router replay, the experts that the engine selected.

        The reference model is the chunk with the initial weights, and selects its own experts.
        """
        inputs = step.gpt_inputs(module, {"input_ids": batch.tokens_BT})
        logits_BTV: torch.Tensor
        if weights is not None:
            logits_BTV = torch.func.functional_call(module, dict(weights), (), inputs)
        elif self._replay is None:
            logits_BTV = module(**inputs)
        else:
            assert batch.routed_experts is not None
            routes, run = batch.routed_experts[:, :-1], functools.partial(module, **inputs)
            logits_BTV = self._replay.run(module, step.own_positions(routes), run)
        return logits_BTV

    def _optimizer_step(self, stream: Iterable[Batch]) -> megatron_idempotent.StepResult:
        # With the batch size, so that the last chunk's backward overlaps the reductions.
        step_id = self.begin(rank_batch_size=self.config.rank_batch_size)
        try:
            for chunk in stream:
                self.microbatch(step_id, chunk)
            return self.step.finish(step_id)
        except Exception:
            # All ranks come here: a failure on one raises on the others, too.
            self.step.abort(step_id)
            raise


def _forward(module: Any, microbatch: Mapping[str, Any]) -> torch.Tensor:
    """Return the model's output for a microbatch, without a check of the token ids.

    `TrainStep` is given this function because its default forward checks the range of all token ids
    before each call, which is unnecessary for ids that the tokenizer made.
    """
    return step.gpt_forward(module, microbatch)


def _filled(batch: Batch, multiple: int) -> Batch:
    """Append rows of zeros to a batch, up to a multiple of `multiple` rows; return the new batch.

    In an interleaved schedule the number of microbatches must be a multiple of the stages.
    """
    return batch.padded(-(-len(batch) // multiple) * multiple)


def _starting_nothing(stack: ExitStack, modules: Sequence[torch.nn.Module]) -> None:
    """Keep Megatron's schedule from starting DDP's parameter gathers and gradient reductions, until
    `stack` is closed.

    This is a separate function, because a function that refers to both torch.distributed and the
    name `config` cannot be pickled by value.
    """
    from megatron_idempotent.window.accumulation import set_for

    for module in modules:
        for name in ("no_sync_func", "grad_sync_func", "param_sync_func"):
            set_for(stack, module.config, name, None)


def training_metrics(results: Sequence[megatron_idempotent.StepResult]) -> dict[str, float]:
    """Return the metrics of a rollout, by name, from the results of its optimizer steps.

    `loss`, `kl` and `clip_fraction` are means over response tokens, `grad_norm` over updates.
    """
    tokens = sum(result.global_valid_tokens for result in results)
    updates = [result for result in results if result.updated]
    norms = [update.grad_norm for update in updates if update.grad_norm is not None]

    def mean(name: str) -> float:
        # The step's metrics are means over its own tokens.
        total = sum(result.metrics[name] * result.global_valid_tokens for result in results)
        return total / (tokens or 1.0)

    return {
        RESPONSE_TOKENS: float(int(tokens)),
        POSITIONS: float(int(sum(result.metrics["positions"] for result in results))),
        LOSS: mean("loss"),
        "train/kl": mean("kl"),
        "train/clip_fraction": mean("clip_fraction"),
        GRAD_NORM: sum(norms) / (len(norms) or 1),
        "train/learning_rate": results[-1].lr,
        "train/optimizer_steps": float(len(updates)),
    }


def training_positions(config: Config, prompts: PromptSet, tokenizer: TextTokenizer) -> int:
    """Return the length T of training rows: the tokens of the longest possible sequence but its
    last, which is only a target, rounded up so that the ranks can split a row evenly.
    """
    return config.parallel.rounded(longest_sequence(config, prompts, tokenizer) - 1)


def check_budget(config: Config, prompts: PromptSet, tokenizer: TextTokenizer) -> None:
    """Raise `ConfigError` if sequences are packed and the longest possible one exceeds a pack.

    Raises:
        ConfigError: it does not fit.
    """
    budget, parallel = config.optimizer.max_tokens_per_microbatch, config.parallel
    longest = longest_sequence(config, prompts, tokenizer)
    alignment = token_alignment(None, parallel.tp, parallel.cp, parallel.sequence_parallel)
    least = alignment.of_pack([longest])
    if config.packs and budget < least:
        padded = f", {least} as ranks cut them" if least != longest else ""
        raise ConfigError(
            f"optimizer.max_tokens_per_microbatch is {budget} and the longest prompt with "
            f"rollout.max_response_tokens has {longest} tokens{padded}; allowed: {least} or more, "
            "or 0 for rows"
        )


def start_policy(job: Job) -> tuple[MegatronPolicy, PromptSet, TextTokenizer]:
    """Apply the patches, read the data, and build model and optimizer; return the policy, the
    prompts and the tokenizer. A collective.

    Without `model.path`, rank 0 writes a random checkpoint first. The tokenizer is the
    checkpoint's, or has a token per word of the task.
    """
    megatron_idempotent.apply()
    config = job.config
    prompts = read_prompts(data_path(config), words=not config.model.path)
    tokenizer = make_tokenizer(config, prompts)
    positions = training_positions(config, prompts, tokenizer)
    if not config.model.path:
        sizes, seed, longest = config.model, config.run.seed, positions + 1
        megatron_setup.ensure_checkpoint(
            job.checkpoint, sizes, tokenizer, seed=seed, positions=longest
        )
    return MegatronPolicy(config, job.checkpoint, positions=positions), prompts, tokenizer
