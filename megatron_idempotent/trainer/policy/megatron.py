"""The policy on stock Megatron: one call of `megatron.training.training.train()` per rollout.

This is the program that upstream does not expect: `train()` assumes that it is called once per
process. `megatron_idempotent.apply()` is what makes the second call work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_idempotent.trainer.config import Config
from megatron_idempotent.trainer.parts import StepMetrics
from megatron_idempotent.trainer.policy.arguments import megatron_arguments
from megatron_idempotent.trainer.policy.batch import Batch, microbatches
from megatron_idempotent.trainer.policy.forward import (
    decoder_logits,
    make_forward_step,
    token_logprobs,
)
from megatron_idempotent.trainer.policy.loss import LossParts
from megatron_idempotent.trainer.policy.stock import Stock, build_stock


class MegatronPolicy:
    """A decoder, its optimizer and its schedule, on all data-parallel ranks.

    Building it and `train` are collective: every rank of the default group takes part.
    Example: `metrics = policy.train(batch, index=0)`.
    """

    def __init__(self, config: Config, *, positions: int, vocabulary_size: int) -> None:
        self._config = config
        arguments = megatron_arguments(config, positions=positions, vocabulary_size=vocabulary_size)
        self.stock: Stock = build_stock(
            arguments, positions=positions, vocabulary_size=vocabulary_size
        )
        # Taken before any checkpoint is loaded: the seed alone decides what the initial policy is,
        # so a resumed run penalises the distance from the same one.
        self._initial = {
            name: value.detach().clone() for name, value in self.stock.module.named_parameters()
        }
        self._grad_norms: list[float] = []
        self.stock.optimizer.step = _recording(self.stock.optimizer.step, self._grad_norms)
        self._parts: list[LossParts] = []
        self._forward_step = make_forward_step(
            config.loss, temperature=config.rollout.temperature, record=self._record
        )

    @contextmanager
    def weights(self) -> Iterator[torch.nn.Module]:
        """The decoder, to sample from or to export, with all of its parameters up to date.

        With `--overlap-param-gather` the shards of other ranks arrive late, in forward pre-hooks.
        Where hooks are in place the shards are gathered here, and the hooks put aside for the
        block: collective, but a no-op after a `train()` that returned.
        """
        hooked = [chunk for chunk in self.stock.chunks if chunk.remove_forward_pre_hook_handles]
        for chunk in hooked:
            chunk.disable_forward_pre_hook(param_sync=True)
        try:
            yield self.stock.module
        finally:
            for chunk in hooked:
                chunk.enable_forward_pre_hook()

    def train(self, batch: Batch, *, index: int) -> StepMetrics:
        """`steps_per_rollout` optimizer steps over the batch, each sequence used once.

        `index` is the rollout's: it orders the microbatches. Every rank passes a batch of the same
        size. Returns what happened on all ranks.
        """
        from megatron.training import training

        steps = self._config.optimizer.steps_per_rollout
        self._grad_norms.clear()
        self._parts.clear()
        self.stock.args.train_iters += steps
        # Looked up on the module at every call: that is where patches land.
        training.train(
            forward_step_func=self._forward_step,
            model=self.stock.chunks,
            optimizer=self.stock.optimizer,
            opt_param_scheduler=self.stock.scheduler,
            train_data_iterator=self._microbatches(batch, index),
            valid_data_iterator=None,
            process_non_loss_data_func=None,
            config=self.stock.config,
            checkpointing_context={},
            non_loss_data_func=None,
        )
        return self._metrics()

    def _microbatches(self, batch: Batch, index: int) -> Iterator[Batch]:
        batch = dataclasses.replace(batch, reference_logprobs_BT=self._reference_logprobs(batch))
        return microbatches(
            batch, size=self._config.microbatch_size, seed=self._config.run.seed, index=index
        )

    def _reference_logprobs(self, batch: Batch) -> torch.Tensor | None:
        """Log-probs [B, T] under the policy that the KL penalty ties to, if there is a penalty."""
        if not self._config.loss.kl_coefficient:
            return None
        if self._config.loss.kl_reference == "old":
            return batch.old_logprobs_BT
        temperature = self._config.rollout.temperature
        with torch.no_grad(), self.weights() as module:

            def at_initial_weights(*inputs: torch.Tensor) -> Any:
                return torch.func.functional_call(module, self._initial, inputs)

            logits_BTV = decoder_logits(at_initial_weights, batch.tokens_BT)
            return token_logprobs(logits_BTV, batch.targets_BT, temperature=temperature)

    def _record(self, parts: LossParts) -> None:
        detached = {
            field.name: getattr(parts, field.name).detach() for field in dataclasses.fields(parts)
        }
        self._parts.append(LossParts(**detached))

    def _metrics(self) -> StepMetrics:
        """Sums over microbatches and ranks; all ranks must enter: the all-reduce would hang."""
        columns = [[p.loss, p.kl, p.clipped, p.tokens] for p in self._parts]
        sums = torch.tensor([[float(value) for value in row] for row in columns]).double().sum(0)
        dist.all_reduce(sums)
        loss, kl, clipped, tokens = sums.tolist()
        return StepMetrics(
            loss=loss / max(tokens, 1.0),
            kl=kl / max(tokens, 1.0),
            clip_fraction=clipped / max(tokens, 1.0),
            grad_norm=sum(self._grad_norms) / max(len(self._grad_norms), 1),
            learning_rate=float(self.stock.optimizer.param_groups[0]["lr"]),
            response_tokens=int(tokens),
            optimizer_steps=len(self._grad_norms),
        )


def _recording(step: Callable[[], Any], grad_norms: list[float]) -> Callable[[], Any]:
    """The optimizer's step, with its gradient norm noted: `train()` logs it and returns it not."""

    def recorded_step() -> Any:
        successful, grad_norm, zeros = step()
        if successful and grad_norm is not None:
            grad_norms.append(float(grad_norm))
        return successful, grad_norm, zeros

    return recorded_step
