"""Forward and backward of microbatches on FSDP2, where ranks meet in every layer.

A rank that fails outside of the layers stays in them, with zeros, so that no other rank waits for
it; all ranks learn of it when the microbatches are through.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree

from megatron_idempotent.window.agreement import (
    WindowAborted,
    compare,
    control_group,
    describe,
    exchange,
    poison,
)

from .batch import ghost, spec
from .fsdp_state import Shards
from .records import Batch, StepLoss
from .totals import Row, row_of

Forward = Callable[[Any, Batch], torch.Tensor]

# Where the graphs of some tensors end, and gradients of zero for them.
Zeros = list[tuple[GradientEdge, torch.Tensor]]

_THROUGH = "through"


class Watch:
    """Tracks the model's forward; outside of microbatches, none may record gradients."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []
        self._running = False
        self._entered = self._left = 0
        # Not the output itself, which may be large, and done with before the loss is computed.
        self.zeros: Zeros = []

    def is_taken(self) -> bool:
        """Returns whether another step, which is open, watches the model."""
        hooks = self._model._forward_pre_hooks.values()
        return any(isinstance(getattr(hook, "__self__", None), Watch) for hook in hooks)

    def install(self) -> None:
        self._handles = [
            # Ahead of FSDP2's, which would leave traces of a forward that is refused.
            self._model.register_forward_pre_hook(self._enter, prepend=True),
            self._model.register_forward_hook(self._leave),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.stop()

    def start(self) -> None:
        self._running = True
        self._entered = self._left = 0

    def stop(self) -> None:
        self._running, self.zeros = False, []

    @property
    def began(self) -> bool:
        """True once the forward has entered the model."""
        return self._entered > 0

    @property
    def inside(self) -> bool:
        """True while the forward is inside of the model."""
        return self._entered != self._left

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self._running and torch.is_grad_enabled():
            raise RuntimeError(
                "an FSDPTrainStep is open for this model, and a forward was called that records "
                "gradients: its backward would add to the step's. Use step.microbatch(), or "
                "step.reading(), or finish() or abort() the step first"
            )
        self._entered += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._left += 1
        if self._running:
            self.zeros = zeros_for(output)


class Call:
    """The microbatches that all ranks run between two agreements, on this rank."""

    def __init__(self, shards: Shards, watch: Watch, forward: Forward, scaler: Any) -> None:
        self._shards = shards
        self._watch = watch
        self._forward = forward
        self._scaler = scaler
        self._error: Exception | None = None
        self._told: str | None = None
        self._place = _THROUGH
        self._number = 0

    @property
    def stopped(self) -> bool:
        """True if this rank has left the model in the middle and can run nothing more."""
        return self._place is not _THROUGH

    def run(self, microbatch: Batch, loss: StepLoss | None) -> Row | None:
        """One forward and backward, of zeros without a loss; the metrics, if there are any."""
        self._number += 1
        self._watch.start()
        try:
            backward, row = self._forward_and_loss(microbatch, loss)
            if not self.stopped:
                backward()
            return row
        except Exception as error:  # noqa: BLE001  told to all ranks, and raised on all
            self._stop(error, "backward")
            return None
        finally:
            self._watch.stop()

    def settle(self, deadline_s: float) -> None:
        """Raise on all ranks where any rank failed. A collective.

        Raises:
            WindowAborted: all ranks are through, or have stopped at the same place.
            SessionPoisoned: some rank has stopped where others may wait for it.
        """
        failures = exchange(self._told, deadline_s)
        if not failures:
            return
        places = compare(self._place, control_group(deadline_s))
        if self._error is not None:
            # The caller may hold the error for long; its frames hold activations.
            traceback.clear_frames(self._error.__traceback__)
        if len(set(places)) != 1:
            told = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
            raise poison(
                f"{told}; not all ranks have stopped at the same place, and others may wait there "
                "in a collective of FSDP2's"
            ) from self._error
        raise WindowAborted(
            failures, "No rank waits for another; abort() the step."
        ) from self._error

    def _forward_and_loss(
        self, microbatch: Batch, loss: StepLoss | None
    ) -> tuple[Callable[[], None], Row | None]:
        """The backward that is to follow, and the metrics."""
        try:
            output = self._forward(self._shards.model, microbatch)
        except Exception as error:  # noqa: BLE001  told to all ranks, and raised on all
            return functools.partial(_send, self._zeros_after(error, microbatch)), None
        if loss is None or self._error is not None:
            return functools.partial(_send, zeros_for(output)), None
        try:
            total, metrics = loss(output, microbatch)
            row = row_of(total, metrics)
            total = total.reshape(())
            scaled = total if self._scaler is None else self._scaler.scale(total)
            return scaled.backward, row
        except Exception as error:  # noqa: BLE001  told to all ranks, and raised on all
            self._carry(error, "loss")
            return functools.partial(_send, zeros_for(output)), None

    def _zeros_after(self, error: Exception, microbatch: Batch) -> Zeros:
        """Returns the zeros that can go backwards through the model after `forward` has failed."""
        if self._watch.inside:
            self._stop(error, "forward of the model")
            return []
        self._carry(error, "forward")
        if not self._watch.began:
            # What was to go into the model could not be made of the batch; of zeros it may be.
            try:
                zeros = ghost(spec(microbatch), self._shards.device)
                return zeros_for(self._forward(self._shards.model, zeros))
            except Exception as again:  # noqa: BLE001  told to all ranks, and raised on all
                self._stop(again, "forward")
        return self._watch.zeros

    def _carry(self, error: Exception, where: str) -> None:
        if self._error is None:
            self._error, self._told = error, f"{where}: {describe(error)}"

    def _stop(self, error: Exception, where: str) -> None:
        self._carry(error, where)
        frames = traceback.extract_tb(error.__traceback__)
        lines = ", ".join(f"{frame.filename}:{frame.lineno}" for frame in frames)
        self._place = f"microbatch {self._number}; {self._shards.place()}; {lines}"


def zeros_for(output: Any) -> Zeros:
    """Returns the zeros, and their edges, that go backwards through all layers of the output."""
    return [
        (get_gradient_edge(leaf), leaf.detach().new_zeros(()).expand(leaf.shape))
        for leaf in _pytree.tree_leaves(output)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]


def _send(zeros: Zeros) -> None:
    edges, gradients = zip(*zeros, strict=True)
    torch.autograd.backward(edges, gradients)
