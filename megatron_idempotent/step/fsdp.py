"""`FSDPTrainStep`: a split step on FSDP2."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron_idempotent.window.agreement import DEADLINE_S

from .fsdp_backend import FSDPBackend, stranger_shapes
from .fsdp_internals import check_internals
from .fsdp_run import Forward
from .fsdp_state import AccumulatedSnapshot, Shards
from .lifecycle import SplitStep
from .records import TOKENS, Batch, NonFinite, checked_options
from .snapshot import evaluating


def tokens_forward(model: Any, microbatch: Batch) -> torch.Tensor:
    """Calls a model with `input_ids` [B, T]; returns its output."""
    output: torch.Tensor = model(microbatch[TOKENS])
    return output


class FSDPTrainStep(SplitStep):
    """`TrainStep` on a model that `torch.distributed.fsdp.fully_shard` shards; needs no Megatron.

    The gradient is that of a loop with all microbatches in the same order, which reduces in the
    last one's backward, bit for bit: of a loss that is summed, divided by what is valid on all
    ranks, whatever FSDP2 divides by. It is reduced once. Until then gradients are accumulated
    unsharded, as with `set_requires_gradient_sync(False)`: that takes the memory of a whole model's
    gradients on each rank, in the reduce dtype where it is another one.

    Ranks meet in every layer, where its parameters are gathered, so all of them take part in each
    `microbatch()`; those with fewer rows than others send zeros through the model. A failure
    in the loss, or in `forward` before or after the model, stops the step on all ranks. So does one
    in the model if all ranks have it at the same place; else the others may wait in a collective,
    and the session is poisoned.

    Args:
        model: the root that `fully_shard` was applied to, on a 1-D or 2-D mesh, with or without
            tensor parallelism; all of its parameters that need gradients are sharded.
        optimizer: a torch optimizer of its parameters, made after `fully_shard`.
        scheduler: its `step()` follows each update, and its `state_dict()` is what `abort()` goes
            back to; may be None.
        forward: makes the output, a tensor, from (model, microbatch).
        shared: names in batches that are the same for all rows, see `TrainStep`.
        non_finite: what `finish()` does where a loss or the norm of the gradients is NaN or
            infinite, and no scaler lowers its scale for it, see `TrainStep`.
        clip_grad: largest norm of the gradient; None to leave it as it is.
        grad_scaler: a `torch.amp.GradScaler` for half precision: a step whose gradients overflow
            is skipped, and its scale is lowered.
        deadline_s: how long a rank waits for the others where ranks agree, in seconds.
        undo: copy parameters and optimizer state to the host before each update, so that one that
            fails half-way can be aborted too.

    Raises:
        ValueError: a model that is not sharded, or not all of it; an optimizer of other parameters;
            a scheduler that cannot be put back.
        RuntimeError: a torch whose FSDP2 lacks what a step relies on; the error names it.

    Example:
        step = FSDPTrainStep(model, optimizer, scheduler)
        step_id = step.begin(loss, global_batch_size=256, micro_batch_size=4)
        for batch in stream:
            step.microbatch(step_id, batch)
        result = step.finish(step_id)
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        scheduler: Any = None,
        *,
        forward: Forward = tokens_forward,
        shared: Collection[str] = (),
        non_finite: NonFinite = "refuse",
        clip_grad: float | None = 1.0,
        grad_scaler: Any = None,
        deadline_s: float = DEADLINE_S,
        undo: bool = False,
    ) -> None:
        self._shards = _checked(model, optimizer)
        if clip_grad is not None and not clip_grad > 0:
            raise ValueError(f"clip_grad must be positive or None, got {clip_grad!r}")
        _check_scheduler(scheduler)
        options = checked_options(deadline_s, non_finite, shared)
        backend = FSDPBackend(
            self._shards,
            optimizer,
            scheduler,
            forward,
            clip_grad=clip_grad,
            grad_scaler=grad_scaler,
            options=options,
            undo=undo,
        )
        super().__init__(backend, options)

    @contextmanager
    def reading(self) -> Iterator[list[Any]]:
        """The model for log-probs, evaluation or export, whether or not a step is open.

        In a list, as `TrainStep` gives its chunks. Inside, parameters are DTensors, and those of
        the last update; modules are in eval mode and no gradient is recorded. Afterwards modes,
        buffers, random states and accumulated gradients are what they were. All ranks take part in
        a forward and in `full_tensor()`.

        Example:
            with step.reading() as [model]:
                weights = {n: p.full_tensor() for n, p in model.named_parameters()}
        """
        model = self._shards.model
        accumulated = AccumulatedSnapshot(self._shards)
        self._shards.reshard()
        try:
            with evaluating([model]):
                yield [model]
        finally:
            # Forwards leave modules unsharded, which an update would make stale.
            self._shards.settle()
            accumulated.restore()


def _check_scheduler(scheduler: Any) -> None:
    needed = ("step", "state_dict", "load_state_dict")
    lacking = [name for name in needed if not callable(getattr(scheduler, name, None))]
    if scheduler is not None and lacking:
        raise ValueError(
            f"FSDPTrainStep() got a {type(scheduler).__name__} as scheduler, without "
            f"{'(), '.join(lacking)}(): abort() could not put it back. Pass one of "
            "torch.optim.lr_scheduler, or add them"
        )


def _checked(model: Any, optimizer: Any) -> Shards:
    check_internals()
    if not isinstance(model, FSDPModule):
        raise ValueError(
            f"FSDPTrainStep() got a {type(model).__name__} that is not fully sharded: apply "
            "torch.distributed.fsdp.fully_shard to its layers, and then to the model itself"
        )
    shards = Shards(model)
    if shards.is_part:
        raise ValueError(
            f"FSDPTrainStep() got a {type(model).__name__} that has run as a part of a larger "
            "sharded model: pass that model"
        )
    shards.settle()  # a forward may have left parameters whole
    plain = [
        name
        for name, parameter in shards.model.named_parameters()
        if parameter.requires_grad and not isinstance(parameter, DTensor)
    ]
    if plain:
        raise ValueError(
            f"FSDPTrainStep() got a model with {len(plain)} parameters that are not sharded, whose "
            f"gradients nothing reduces, such as {plain[0]!r}: leave them out of ignored_params, "
            "or freeze them"
        )
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(
            f"FSDPTrainStep() got a {type(optimizer).__name__} as optimizer: pass a "
            "torch.optim.Optimizer of the sharded parameters"
        )
    strangers = stranger_shapes(shards, optimizer)
    if strangers:
        raise ValueError(
            f"FSDPTrainStep() got an optimizer of which {len(strangers)} parameters are not the "
            f"model's, such as one of shape {strangers[0]}: make it after fully_shard, which "
            "replaces parameters"
        )
    return shards
