"""Trains the policy on real Megatron, with a `TrainStep` per optimizer step."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import megatron_idempotent
from megatron_idempotent.fp8.packing import token_alignment
from megatron_idempotent.rl.hf import Architecture, MegatronWeights, load_hf, save_hf
from megatron_idempotent.rl.trainer.task.prompts import PromptSet, read_prompts
from megatron_idempotent.rl.trainer.task.tokenizer import (
    TOKENIZER_FILE,
    TextTokenizer,
    make_tokenizer,
    sequence_positions,
)
from megatron_idempotent.rl.weights import WeightSource

from . import checkpoint_dir
from .batch import Batch, StepMetrics, chunks
from .config import Config, ConfigError, ModelConfig
from .forward_only import LogprobForward
from .loss import LogitsOf, PolicyLoss, corrected, forward
from .megatron_setup import MegatronModel, build_megatron_model, megatron_arguments
from .output import INITIAL, Job, data_path
from .replica import Replica, SpreadWeights


class MegatronPolicy:
    """Trains a decoder on all ranks, in any layout of them.

    Call its constructor and methods on all ranks of the default group, in the same order.
    Example: `metrics = policy.train(batch, index=0)`.
    """

    def __init__(self, config: Config, checkpoint: Path, *, positions: int) -> None:
        """Build the model and its optimizer, and load the weights.

        `checkpoint` is a Hugging Face one; `positions` is the length of training sequences.
        """
        from megatron.core import parallel_state

        self._config = config
        self._checkpoint = checkpoint
        self.architecture = Architecture.read(checkpoint)
        self.stock: MegatronModel = build_megatron_model(
            megatron_arguments(config, self.architecture, positions=positions),
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
        # Taken before any checkpoint of the run is loaded: a resumed one penalises the distance
        # from the same weights.
        self._initial = [
            {name: value.detach().clone() for name, value in module.named_parameters()}
            for module in self.stock.modules
        ]
        megatron_idempotent.wire_train_config(self.stock.chunks, self.stock.optimizer)
        self._step = megatron_idempotent.TrainStep(
            self.stock.chunks,
            self.stock.optimizer,
            self.stock.scheduler,
            forward=forward,
            # A verifier may keep one rank busy for as long as the run may take.
            deadline_s=config.run.timeout_s,
        )
        tp = config.parallel.tp > 1
        of = LogitsOf(
            temperature=config.rollout.temperature,
            tp_group=parallel_state.get_tensor_model_parallel_group() if tp else None,
            vocab_size=self.architecture.vocab_size if tp else None,
            cuts_positions=config.parallel.cp > 1,
        )
        self._loss = PolicyLoss(config.loss, of=of)
        self._logprobs = LogprobForward(
            self.stock.modules, of=of, microbatch_size=config.microbatch_size
        )
        self.replica = Replica(config.layout)

    @contextmanager
    def weights(self) -> Iterator[tuple[torch.nn.Module, ...]]:
        """Yield this rank's chunks to compute with or to export.

        Within the block their parameters are up to date, they are in eval mode, and no gradients
        are recorded.
        """
        with self._step.reading() as chunks:
            yield tuple(chunk.module for chunk in chunks)

    def source(self, *, shared: bool) -> WeightSource:
        """Return a source of the weights under Hugging Face names; read it within `weights()`.

        If `shared`, rank 0 alone gets tensors. Otherwise every rank gets all tensors, from the
        ranks of its replica or, if experts are spread over replicas, from all ranks.
        """
        if shared:
            return MegatronWeights(self.stock.chunks, self.architecture)
        group = None if self._config.parallel.ep > 1 else self.replica.group
        weights = MegatronWeights(self.stock.chunks, self.architecture, group=group)
        return weights if dist.get_world_size(group) == 1 else SpreadWeights(weights, group)

    def save_hf(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint, with its files' hashes in SHA256SUMS.

        It has the configuration and the tokenizer of the checkpoint that the run began from. It
        replaces an older one in `directory` once it is complete.
        """
        with self.weights():
            save_hf(self.source(shared=True), directory, like=self._checkpoint, replace=True)
        if dist.get_rank() == 0:
            checkpoint_dir.write_sums(directory)

    def train(self, batch: Batch, *, index: int) -> StepMetrics:
        """Take `steps_per_rollout` optimizer steps over the batch, using each sequence once.

        The rollout's `index` decides the order of the sequences. Every rank passes a batch of the
        same size. Returns measurements over all ranks. An error on any rank is raised on all of
        them, after the step in which it happened is undone.
        """
        optimizer = self._config.optimizer
        batch = dataclasses.replace(batch, reference_logprobs_BT=self._reference_logprobs(batch))
        if self._loss.needs_recomputed_logprobs:
            proximal_BT = self.logprobs(batch, "policy")
            batch, _ = corrected(batch, proximal_BT, self._config.loss)
        stream = chunks(
            batch, size=self._config.chunk_size, seed=self._config.run.seed, index=index
        )
        return training_metrics(
            [
                self._optimizer_step(itertools.islice(stream, self._config.chunks))
                for _ in range(optimizer.steps_per_rollout)
            ]
        )

    @property
    def open_step_id(self) -> str | None:
        """The id of the open step; None if no step is open."""
        return self._step.open_step_id

    def begin(self, step_id: str | None = None, *, rank_batch_size: int | None = None) -> str:
        """Open an optimizer step, and return its id; see `TrainStep.begin`.

        `rank_batch_size` is the number of sequences that this replica will give it, if it is known.
        """
        config = self._config
        return self._step.begin(
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
        """Run forward and backward of this replica's rows; see `TrainStep.microbatch`."""
        if self._config.packs:
            tensors = batch.on_device().sequences()
        else:
            if self._config.parallel.vpp > 1:
                # An interleaved schedule takes as many microbatches as stages, or a multiple.
                whole = self._config.microbatch_size * self._config.parallel.pp
                batch = batch.padded(-(-len(batch) // whole) * whole)
            tensors = batch.on_device().tensors()
        self._step.microbatch(step_id, tensors, microbatch_id=microbatch_id, last=last)

    def finish(self, step_id: str) -> megatron_idempotent.StepResult:
        """Reduce gradients and update the weights; see `TrainStep.finish`."""
        return self._step.finish(step_id)

    def abort(self, step_id: str | None = None) -> None:
        """Undo the open step; do nothing if none is open. See `TrainStep.abort`."""
        self._step.abort(step_id)

    def logprobs(self, batch: Batch, which: Literal["policy", "reference"]) -> torch.Tensor:
        """Compute log-probs [B, T] of this rank's rows, 0 where the loss mask is 0.

        "policy" computes with the weights as they are, "reference" with those that the run began
        with. It may be called while a step is open.
        """
        with self.weights():
            if not len(batch):  # attention refuses to be of nothing
                return torch.empty_like(batch.old_logprobs_BT)
            return self._logprobs(batch, self._initial if which == "reference" else None)

    def _optimizer_step(self, stream: Iterable[Batch]) -> megatron_idempotent.StepResult:
        # Known here, so that the last chunk's backward overlaps the reductions.
        step_id = self.begin(rank_batch_size=self._config.rank_batch_size)
        try:
            for chunk in stream:
                self.microbatch(step_id, chunk)
            return self.finish(step_id)
        except Exception:
            # All ranks come here: the others hear of a failure where they would wait for this one.
            self.abort(step_id)
            raise

    def _reference_logprobs(self, batch: Batch) -> torch.Tensor | None:
        """Return log-probs [B, T] under the reference of the KL penalty; None without a penalty."""
        if not self._config.loss.kl_coefficient:
            return None
        if self._config.loss.kl_reference == "old":
            return batch.old_logprobs_BT
        return self.logprobs(batch, "reference")


def training_metrics(results: Sequence[megatron_idempotent.StepResult]) -> StepMetrics:
    """Combine the results of a rollout's steps.

    `loss`, `kl` and `clip_fraction` are means over response tokens, `grad_norm` over updates.
    """
    tokens = sum(result.global_valid_tokens for result in results)
    updates = [result for result in results if result.updated]
    norms = [update.grad_norm for update in updates if update.grad_norm is not None]

    def mean(name: str) -> float:
        # The step's metrics are means over its own tokens.
        total = sum(result.metrics[name] * result.global_valid_tokens for result in results)
        return total / (tokens or 1.0)

    return StepMetrics(
        loss=mean("loss"),
        kl=mean("kl"),
        clip_fraction=mean("clip_fraction"),
        grad_norm=sum(norms) / (len(norms) or 1),
        learning_rate=results[-1].lr,
        response_tokens=int(tokens),
        positions=int(sum(result.metrics["positions"] for result in results)),
        optimizer_steps=len(updates),
    )


def ensure_checkpoint(
    directory: Path, model: ModelConfig, tokenizer: TextTokenizer, *, seed: int, positions: int
) -> Path:
    """Have rank 0 write a random checkpoint unless it is there; return its folder. Collective.

    The sizes and the seed alone decide its weights. The model has RMSNorm, rotary positions,
    SwiGLU, grouped queries and no biases; `positions` is the longest sequence. It is written under
    another name and renamed.
    """
    if dist.get_rank() == 0 and not directory.is_dir():
        unfinished = directory.with_name(directory.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        write_checkpoint(unfinished, model, tokenizer, seed=seed, positions=positions)
        checkpoint_dir.write_sums(unfinished)
        unfinished.rename(directory)
    dist.barrier()
    return directory


def write_checkpoint(
    directory: Path, model: ModelConfig, tokenizer: TextTokenizer, *, seed: int, positions: int
) -> None:
    """Write a checkpoint with random weights, in this process alone; see `ensure_checkpoint`.

    Torch's random state does not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        decoder = _random_decoder(model, tokenizer, positions)
    with torch.no_grad():
        # As Megatron begins: what adds to the residual stream is smaller in a deeper model.
        for name, parameter in decoder.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                parameter.mul_((2 * model.layers) ** -0.5)
    decoder.save_pretrained(directory)
    tokenizer.save(directory / TOKENIZER_FILE)


def _random_decoder(model: ModelConfig, tokenizer: TextTokenizer, positions: int) -> Any:
    """Make a Llama or, if the model has experts, a Qwen3-MoE."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": tokenizer.vocabulary_size,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.query_groups,
        "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(model.rotary_base)},
        "initializer_range": model.init_std,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.end_ids[0],
        "pad_token_id": tokenizer.pad_id,
    }
    if not model.num_experts:
        return LlamaForCausalLM(LlamaConfig(**sizes))
    experts: dict[str, Any] = {
        "head_dim": model.hidden // model.heads,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.expert_ffn,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.0,
    }
    # Named after it is made: transformers makes the embedding of padding zero, and a policy that
    # samples padding would have a gradient of 1 / epsilon there, through the norms of queries and
    # keys.
    pad_token_id = sizes.pop("pad_token_id")
    decoder = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    decoder.config.pad_token_id = pad_token_id
    return decoder


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """Holds what a rank needs to begin. Example: `start_policy(job).policy`."""

    policy: MegatronPolicy
    """The model and its optimizer."""
    prompts: PromptSet
    """All prompts of the task."""
    tokenizer: TextTokenizer
    """The tokenizer of the checkpoint, or of the task's words."""
    positions: int
    """Length T of the training sequences."""
    checkpoint: Path
    """Folder of the Hugging Face checkpoint that the weights are from."""


def training_positions(config: Config, prompts: PromptSet, tokenizer: TextTokenizer) -> int:
    """Return the length T of training sequences: the least that holds all and ranks can cut."""
    least = sequence_positions(
        prompts, tokenizer, max_response_tokens=config.rollout.max_response_tokens
    )
    return config.parallel.rounded(least)


def check_budget(config: Config, prompts: PromptSet, tokenizer: TextTokenizer) -> None:
    """Check that the longest possible sequence fits into a pack. Errors: `ConfigError`."""
    budget, parallel = config.optimizer.max_tokens_per_microbatch, config.parallel
    response = config.rollout.max_response_tokens
    longest = sequence_positions(prompts, tokenizer, max_response_tokens=response) + 1
    alignment = token_alignment(None, parallel.tp, parallel.cp, parallel.sequence_parallel)
    least = alignment.of_pack([longest])
    if config.packs and budget < least:
        padded = f", {least} as ranks cut them" if least != longest else ""
        raise ConfigError(
            f"optimizer.max_tokens_per_microbatch is {budget} and the longest prompt with "
            f"rollout.max_response_tokens has {longest} tokens{padded}; allowed: {least} or more, "
            "or 0 for rows"
        )


def start_policy(job: Job) -> Started:
    """Apply the patches, read the data, and build the model and its optimizer. Collective.

    Without `model.path`, rank 0 writes a random checkpoint first.
    """
    megatron_idempotent.apply()
    config = job.config
    prompts = read_prompts(data_path(config), words=not config.model.path)
    tokenizer = make_tokenizer(config, prompts)
    positions = training_positions(config, prompts, tokenizer)
    if config.model.path:
        checkpoint = Path(config.model.path)
    else:
        checkpoint = ensure_checkpoint(
            job.out / INITIAL,
            config.model,
            tokenizer,
            seed=config.run.seed,
            positions=positions + 1,
        )
    return Started(
        policy=MegatronPolicy(config, checkpoint, positions=positions),
        prompts=prompts,
        tokenizer=tokenizer,
        positions=positions,
        checkpoint=checkpoint,
    )
