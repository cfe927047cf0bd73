"""`TrainStep`: a split step on Megatron."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_idempotent.window.agreement import DEADLINE_S

from .lifecycle import SplitStep
from .megatron_backend import MegatronBackend
from .megatron_needs import check_patches
from .megatron_run import Forward
from .records import TOKENS, Batch, NonFinite, checked_options
from .snapshot import evaluating


def gpt_forward(model: Any, microbatch: Batch) -> torch.Tensor:
    """Calls a `GPTModel` with `input_ids` [B, T], `position_ids` and `attention_mask`.

    Returns logits [B, T, V] on the last pipeline stage, hidden states on the others. Positions
    are 0..T-1 if the batch has none.
    """
    tokens_BT = microbatch[TOKENS]
    positions_BT = microbatch.get("position_ids")
    if positions_BT is None:
        positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        positions_BT = positions_BT.expand_as(tokens_BT)
    output: torch.Tensor = model(tokens_BT, positions_BT, microbatch.get("attention_mask"))
    return output


class TrainStep(SplitStep):
    """One optimizer step of Megatron's, in any number of pieces, safe to stop anywhere.

    The gradient is that of one schedule call with all microbatches in the same order, bit for bit:
    of a loss that is summed, divided by what is valid on all ranks. It is reduced and finalized
    once. MoE, MTP and other auxiliary losses, which are means over a microbatch, count by its
    positions (its rows, if the loss is of sequences) against the same divisor, as they do under
    `calculate_per_token_loss`; with that set or not, gradients are the same but for rounding.

    Log-probs, evaluation and export while a step is open belong into `reading()`.

    Args:
        model_chunks: this rank's chunks, wrapped in Megatron's `DistributedDataParallel`, and wired
            (`wire_train_config`).
        optimizer: what `get_megatron_optimizer` returned for them.
        scheduler: its `step(increment=global_batch_size)` follows each update; may be None.
        forward: makes the output of a chunk from (chunk, microbatch); for what needs more than
            `gpt_forward` passes, such as images.
        shared: names in batches that are the same for all rows, whatever they hold: each microbatch
            is given them whole.
        non_finite: what `finish()` does where a loss or the norm of the gradients is NaN or
            infinite. "refuse" raises `WindowAborted` on all ranks, before anything is updated;
            "skip" drops the gradients, and the result says why; "update" updates all the same, as
            Megatron does, and looks at nothing. An overflow under a loss scale is skipped in any
            case. The norm is looked at where the optimizer computes it, see docs/train-step.md.
        deadline_s: how long a rank waits for the others where ranks agree, and for their
            parameters, in seconds.
        undo: copy parameters and optimizer state to the host before each update, so that one that
            fails half-way can be aborted too. Without it a step that fails inside of the inner
            optimizer ends in an error that asks for a checkpoint.

    Raises:
        ValueError: chunks or an optimizer that are not Megatron's.
        RuntimeError: patches are not applied that a step on these chunks stands on; they are named,
            with what is lost without each.

    Example:
        step = TrainStep(chunks, optimizer, scheduler)
        step_id = step.begin(loss, global_batch_size=256, micro_batch_size=4)
        for batch in stream:
            step.microbatch(step_id, batch)
        result = step.finish(step_id)
    """

    def __init__(
        self,
        model_chunks: Any,
        optimizer: Any = None,
        scheduler: Any = None,
        *,
        forward: Forward = gpt_forward,
        shared: Collection[str] = (),
        non_finite: NonFinite = "refuse",
        deadline_s: float = DEADLINE_S,
        undo: bool = False,
    ) -> None:
        options = checked_options(deadline_s, non_finite, shared)
        backend = MegatronBackend(
            model_chunks, optimizer, scheduler, forward, options=options, undo=undo
        )
        check_patches(backend.chunks)
        super().__init__(backend, options)
        self._chunks = backend.chunks

    @contextmanager
    def reading(self) -> Iterator[list[Any]]:
        """The chunks for log-probs, evaluation or export, whether or not a step is open.

        Inside, parameters are those of the last update on all ranks, also under
        overlap_param_gather; modules are in eval mode and no gradient is recorded. Afterwards
        modes, buffers and random states are what they were. The data-parallel ranks take part where
        parameters are still to be gathered; the gather is that of the next forward, so that ranks
        may also enter it through `microbatch` or `finish`.

        Example:
            with step.reading() as chunks:
                weights = {n: p.clone() for n, p in chunks[0].module.named_parameters()}
        """
        self._backend.join()
        with evaluating(self._chunks):
            yield self._chunks
