"""Computes log-probs of a batch without gradients, on the ranks of one replica.

Shapes: B sequences, T positions, V vocabulary; logits are this rank's columns of V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from .batch import Batch
from .loss import LogitsOf, decoder_logits

NamedTensors = Mapping[str, torch.Tensor]
"""Tensors that stand in for the parameters of a chunk, by name."""


class LogprobForward:
    """Computes log-probs of a batch: of all at once or, in a pipeline, in microbatches.

    Example: `LogprobForward(modules, of=of, microbatch_size=8)(batch)`.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        *,
        of: LogitsOf,
        microbatch_size: int,
    ) -> None:
        """
        Args:
            modules: this rank's chunks, without DDP.
            of: says how to read the chunks' logits.
            microbatch_size: the sequences that a pipeline's stages pass on at once.
        """
        from megatron.core import parallel_state

        self._modules = list(modules)
        self._logits = of
        self._microbatch_size = microbatch_size
        self._stages = int(parallel_state.get_pipeline_model_parallel_world_size())

    def __call__(self, batch: Batch, weights: Sequence[NamedTensors] | None = None) -> torch.Tensor:
        """Compute log-probs [B, T] of the targets, 0 where the loss mask is 0; B is above 0.

        Batch and result are on the host; every rank of the replica gets the whole result. `weights`
        replace the chunks' parameters if given. Collective over the ranks of a replica, or over all
        ranks if experts are spread over replicas.
        """
        forwards = [
            module if weights is None else _with(module, weights[place])
            for place, module in enumerate(self._modules)
        ]
        if self._stages == 1:
            batch = batch.on_device()
            return self._of(decoder_logits(forwards[0], batch.tokens_BT), batch).cpu()
        return self._piped(batch, dict(zip(map(id, self._modules), forwards, strict=True)))

    def _of(self, logits_BTV: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self._logits.logprobs(logits_BTV, batch.targets_BT, batch.loss_mask_BT > 0)

    def _piped(self, batch: Batch, forwards: Mapping[int, Callable[..., Any]]) -> torch.Tensor:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        # An interleaved schedule takes as many microbatches as stages, or a multiple of them.
        rows, size = len(batch), self._microbatch_size
        padded = batch.padded(-(-rows // (size * self._stages)) * size * self._stages)
        padded = padded.on_device()
        pieces = [
            padded.rows(torch.arange(start, start + size, device=padded.tokens_BT.device))
            for start in range(0, len(padded), size)
        ]

        def forward_step(waiting: Iterator[Batch], module: Any) -> tuple[Any, Any]:
            piece = next(waiting)
            logits = decoder_logits(forwards[id(module)], piece.tokens_BT)
            return logits, lambda output, **_: self._of(output, piece)

        iterators = [iter(pieces) for _ in self._modules]
        with ExitStack() as stack:
            _starting_nothing(stack, self._modules)
            parts = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self._modules,
                num_microbatches=len(pieces),
                seq_length=batch.tokens_BT.shape[1],
                micro_batch_size=size,
                forward_only=True,
                collect_non_loss_data=True,
            )
        found_BT = torch.empty_like(padded.old_logprobs_BT)
        if parts:
            found_BT = torch.cat(parts).to(found_BT.dtype).contiguous()
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(found_BT, parallel_state.get_pipeline_model_parallel_last_rank(), group)
        return found_BT[:rows].cpu()


def _starting_nothing(stack: ExitStack, modules: Sequence[torch.nn.Module]) -> None:
    """Keep a schedule, within the stack, from starting the gathers and reductions of training.

    It is a function of its own because one that uses both torch.distributed and the name `config`
    does not pickle by value.
    """
    from megatron_idempotent.window.accumulation import set_for

    for module in modules:
        for name in ("no_sync_func", "grad_sync_func", "param_sync_func"):
            set_for(stack, module.config, name, None)


def _with(module: torch.nn.Module, weights: NamedTensors) -> Callable[..., Any]:
    def call(*inputs: torch.Tensor) -> Any:
        return torch.func.functional_call(module, dict(weights), inputs)

    return call
