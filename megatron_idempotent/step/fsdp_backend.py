"""A split step on FSDP2's `fully_shard`, torch's optimizers and learning rate schedulers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_idempotent.window.bounded import bounded

from .backend import Update
from .fsdp_run import Call, Forward, Watch
from .fsdp_state import ScalerSnapshot, SchedulerSnapshot, Shards, SyncSnapshot
from .non_finite import skipped_for
from .records import Batch, Options, StepLoss
from .snapshot import (
    GroupSnapshot,
    ModuleSnapshot,
    StateUndo,
    TorchSnapshot,
    lr_and_weight_decay,
)
from .totals import Row, Totals


class FSDPBackend:
    """This rank's model, optimizer and scheduler; see `Backend` for what the methods do."""

    def __init__(
        self,
        shards: Shards,
        optimizer: Any,
        scheduler: Any,
        forward: Forward,
        *,
        clip_grad: float | None,
        grad_scaler: Any,
        options: Options,
        undo: bool,
    ) -> None:
        self.shards = shards
        self._model = shards.model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._forward = forward
        self._clip_grad = clip_grad
        self._scaler = grad_scaler
        self._keeps_undo = undo
        self._watch = Watch(self._model)
        self._snapshot: list[Any] = []
        self._undo: StateUndo | None = None
        self._updating = False
        self._released = False
        self._deadline_s = options.deadline_s
        self._non_finite = options.non_finite

    @property
    def must_agree(self) -> dict[str, Any]:
        return {
            "clip_grad": self._clip_grad,
            "scheduler": type(self._scheduler).__name__,
            "grad_scaler": self.lowers_scale,
        }

    @property
    def replicas(self) -> int:
        return self.shards.replicas

    @property
    def lowers_scale(self) -> bool:
        return self._scaler is not None and bool(self._scaler.is_enabled())

    @property
    def narrow(self) -> bool:
        return False  # a GradScaler finds the scale at which sums are in range

    @property
    def replica(self) -> int:
        return self.shards.replica

    @property
    def speaks(self) -> bool:
        return self.shards.speaks

    @property
    def device(self) -> Any:
        return self.shards.device

    @property
    def torn(self) -> bool:
        return self._updating and self._undo is None

    def open(self) -> None:
        self.close()  # a step whose end was interrupted may still be here
        if self._watch.is_taken():
            raise RuntimeError("begin(): another FSDPTrainStep is open for this model")
        self.shards.drop()
        self._snapshot = [
            ModuleSnapshot([self._model]),
            TorchSnapshot(),
            GroupSnapshot(self._optimizer.param_groups),
            SyncSnapshot(self.shards),
        ]
        if self._scheduler is not None:
            self._snapshot.append(SchedulerSnapshot(self._scheduler))
        if self._scaler is not None:
            self._snapshot.append(ScalerSnapshot(self._scaler, self.device))
        self._released = False
        self._watch.install()
        self._model.set_is_last_backward(True)
        self._model.train()

    def accept(self, lists: Sequence[Sequence[Batch]]) -> None:
        """Microbatches of any shape are run."""

    def coupled(self) -> tuple[bool, Any]:
        return True, None  # every layer's parameters are gathered from all ranks

    def divide_losses(self, shift: int) -> None:
        """Nothing: gradients are not narrow."""

    def run(
        self, microbatches: Sequence[Batch], loss: StepLoss, *, reduce: bool, ghosts: bool
    ) -> list[Row]:
        self._released = self._released or reduce
        call = Call(self.shards, self._watch, self._forward, self._scaler)
        rows = []
        with ExitStack() as stack:
            # Half, so that a rank whose peer has left the model still meets it below.
            stack.enter_context(bounded(self.shards.process_groups(), self._deadline_s / 2))
            if ghosts:
                # What a microbatch that nobody has counted or drew from is not kept.
                stack.callback(TorchSnapshot().restore)
                stack.callback(ModuleSnapshot([self._model]).restore_buffers)
            if not self._model.training:  # an evaluation may have left it so
                self._model.train()
            for number, microbatch in enumerate(microbatches, start=1):
                last = reduce and number == len(microbatches)
                self._model.set_requires_gradient_sync(last)
                row = call.run(microbatch, None if ghosts else loss)
                if call.stopped:
                    break
                if row is not None:
                    rows.append(row)
        call.settle(self._deadline_s)
        return rows

    def check_ready(self) -> None:
        strangers = stranger_shapes(self.shards, self._optimizer)
        if strangers:
            raise RuntimeError(
                f"finish(): {len(strangers)} of the optimizer's parameters are not the model's any "
                f"more, such as one of shape {strangers[0]}, so it would not update the model: "
                "load weights in place (not with assign=True)"
            )

    def join(self, *, wait: bool = True) -> None:
        """FSDP2 starts nothing in a forward that it does not end there."""

    def check_gradients(self) -> None:
        """FSDP2 refuses no gradient; `update` looks at the norm, which is the same on all ranks."""

    def update(self, totals: Totals, local: float, increment: int, timeout_s: float) -> Update:
        with bounded(self.shards.process_groups(), timeout_s):
            if not self._released:
                self.shards.reduce()
            self.shards.multiply(1.0 / totals.normalizer)
            grad_norm, skipped = self._clipped()
        if skipped is not None:
            return Update(skipped=skipped, grad_norm=grad_norm)
        if self._keeps_undo:
            self._undo = StateUndo([], [self._optimizer])
        self._updating = True
        if self._scaler is None or not math.isfinite(grad_norm or 0.0):
            # The scaler has been updated for such gradients already, and would unscale them again.
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        if self._scheduler is not None:
            self._scheduler.step()
        return Update(skipped=None, grad_norm=grad_norm)

    def _clipped(self) -> tuple[float | None, str | None]:
        """Clip; return the norm before that, and why the update is to be skipped.

        There is no norm where gradients overflowed, for which the scale is lower now.

        Raises:
            RuntimeError: the norm is not finite, no lower scale would change that, and the step
                refuses it.
        """
        scale = None if self._scaler is None else self._scaler.get_scale()
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        # This reshards: an evaluation may have left whole copies, which the update makes old.
        parameters = [p for p in self.shards.parameters() if p.grad is not None]
        norm = total_norm([p.grad for p in parameters if p.grad is not None])
        grad_norm = float(norm)
        if not math.isfinite(grad_norm):
            if self._scaler is not None:
                self._scaler.update()
                now = self._scaler.get_scale()
                if now < scale:
                    return (
                        None,
                        f"gradients overflowed; the loss scale is {now:g} now, not {scale:g}",
                    )
            skipped = skipped_for(grad_norm, self._non_finite)
            if skipped is not None:
                return grad_norm, skipped
        if self._clip_grad is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self._clip_grad, norm)
        return grad_norm, None

    def rates(self) -> tuple[float, float] | None:
        return lr_and_weight_decay(self._optimizer)

    def skip(self) -> None:
        self.shards.drop()
        self.close()

    def close(self) -> None:
        for part in self._snapshot:
            if isinstance(part, SyncSnapshot):
                part.restore()
        self._snapshot, self._undo, self._updating = [], None, False
        self._watch.remove()

    def restore(self) -> None:
        if not self._snapshot:
            return  # another step is open for the model, and this one never was
        self.shards.drop()
        if self._undo is not None:
            self._undo.restore()
        for part in self._snapshot:
            part.restore()
        self.close()


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients on all ranks, a scalar. All ranks take part.

    Those on one device mesh are taken together, as `clip_grad_norm_` does with all.
    """
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        assert isinstance(gradient, DTensor)
        by_mesh.setdefault(gradient.device_mesh, []).append(gradient)
    norms = []
    for group in by_mesh.values():
        norm = torch.nn.utils.get_total_norm(group)
        assert isinstance(norm, DTensor)
        norms.append(norm.full_tensor())
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def stranger_shapes(shards: Shards, optimizer: Any) -> list[tuple[int, ...]]:
    """Shapes of the optimizer's parameters that the model does not have."""
    known = {id(parameter) for parameter in shards.parameters()}
    return [
        tuple(parameter.shape)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in known
    ]
