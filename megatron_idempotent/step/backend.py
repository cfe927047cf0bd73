"""Declares what a step takes as options, and what it asks of the model and optimizer it runs on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from megatron_idempotent.fp8.packing import TokenAlignment
from megatron_idempotent.window.agreement import DEADLINE_S

from .loss import LossResult, NonFinite, NothingValid, StepLoss, StepTotals, Update
from .microbatches import Batch, Calls, Microbatch, Shape
from .snapshot import Writes

Forward = Callable[[Any, Batch], Any]
"""Computes the output of a model, or of a chunk of it, for a microbatch."""


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Options:
    """Holds the options that both steps share; the docstring of `TrainStep` explains each.

    Example: `Options(forward=gpt_forward, deadline_s=20.0)`.
    """

    forward: Forward
    shared: Collection[str] = ()
    shape: Callable[[Any], Shape] | None = None
    counts: Callable[[Any], Any] | None = None
    alignment: TokenAlignment | None = None
    non_finite: NonFinite = "refuse"
    nothing_valid: NothingValid = "skip"
    deadline_s: float = DEADLINE_S
    undo: bool = False


class LocalFailure(Exception):
    """Says that this rank failed with `error`, after it did all that others wait for."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class Backend(Protocol):
    """Runs a model, its optimizer and its scheduler on this rank; a step calls it in this order."""

    optimizer: Any
    """None if the step cannot finish."""
    replica: int
    """The data-parallel rank of this process; ranks of one replica get the same batches."""
    replicas: int
    """The number of data-parallel ranks."""
    is_reporting_rank: bool
    """True on the one rank of a replica that reports what is valid in its batches."""
    has_losses: bool
    """True on the reporting rank, and on ranks that compute the loss of other positions."""
    lowers_scale: bool
    """True if gradients that are not finite lower a loss scale, and the step is skipped."""
    microbatch_multiple: int
    """The number that the microbatches of a call are a multiple of; 1 if any number will do."""
    attention: float
    """Attention's cost for each token of its context, relative to a token's fixed cost of 1."""

    @property
    def device(self) -> Any:
        """The device of the parameters, on which dummy microbatches are made."""

    @property
    def must_agree(self) -> Mapping[str, Any]:
        """Settings by name; where they differ between ranks, the step fails on all of them."""

    @property
    def narrow(self) -> bool:
        """True if gradients of a loss that is summed over a whole step may overflow their type."""

    @property
    def alignment(self) -> TokenAlignment:
        """Multiples of tokens that packs are padded to. `ValueError` where they are not known."""

    @property
    def partially_updated(self) -> bool:
        """True if parameters may be half updated, and there is no copy to go back to."""

    def accept_loss(self, loss: StepLoss) -> None:
        """Raise `ValueError` if the loss lacks a weight for auxiliary losses that the model has."""

    def open(self) -> None:
        """Zero gradients, switch to training, and remember what `restore` puts back.

        Until `update` or the end of the step the optimizer refuses to step.
        """

    def writes(self) -> Writes:
        """Return counters that are equal to earlier ones if nothing was written; wait for nothing.

        Only trained parameters and their gradients count.
        """

    def gradient_bits(self) -> Any:
        """Return a sum of the gradients' bits, which shows later whether they are the same.

        It may be on the device, and nothing waits. None if gradients may not be written at all.
        """

    def accept(self, calls: Calls) -> None:
        """Raise `ValueError` if the microbatches of calls cannot run; change nothing."""

    def lockstep_group(self) -> tuple[bool, Any]:
        """Return whether ranks meet inside of a microbatch, and the gloo group of those that do.

        The group is None if it has all ranks. The first call is a collective of all ranks.
        """

    def divide_losses(self, shift: int) -> None:
        """Have later losses of the step, and the gradients so far, divided by 2 ** shift.

        Called only where gradients are `narrow`. The update multiplies by 2 ** shift again.
        """

    def run(
        self, microbatches: Sequence[Microbatch], loss: StepLoss, *, reduce: bool, dummies: bool
    ) -> list[LossResult]:
        """Run forward and backward, with the loss not normalised; return what it returned.

        There is an item per microbatch on ranks that have the loss. With `reduce`, reductions
        start as they would in the last microbatch of a one-shot step. With `dummies` nothing of
        the microbatches may reach a gradient. Raises `LocalFailure` for a
        failure on this rank after which it did all that other ranks wait for, and `WindowAborted`
        for one that all know.
        """

    def check_ready(self, increment: int | None) -> None:
        """Raise `RuntimeError` if gradients could not be finalized; start no collective.

        Raise `ValueError` if the scheduler needs a batch size to advance by, and `increment` is
        None.
        """

    def join(self, *, wait: bool = True) -> None:
        """Take part in gathers that peers start in a forward, if this rank has run none.

        With `wait`, return when the gathers have ended.
        """

    def parameter_norm(self) -> Any:
        """Return a norm of this rank's trained parameters, finite unless one of them is not.

        It may be on the device. It costs one pass over them, and no wait.
        """

    def outdated_main_parameters(self) -> Any:
        """Return the number of this rank's main elements that do not round to the model's.

        It may be on the device. It costs one pass over both, and no wait.
        """

    def bad_parameter(self) -> str | None:
        """Name the first trained parameter that is NaN or infinite, and where; None without one.

        The host waits for the device, so it is called only if the norm was not finite.
        """

    def check_gradients(self) -> None:
        """Raise for a gradient that the reduction would refuse, before any peer waits in it."""

    def update(
        self, totals: StepTotals, local: float, increment: int | None, timeout_s: float
    ) -> Update:
        """Reduce and finalize once, divide, step the optimizer and the scheduler.

        `local` is this replica's part of the normalizer, where that counts tokens or sequences. All
        ranks take part; none waits longer than `timeout_s` in a collective whose backend has
        timeouts. Raises `RuntimeError` on all ranks if the norm is not finite and the step refuses
        that; then nothing is updated.
        """

    def skip(self) -> None:
        """Drop the gradients of a step that is not to update; parameters stay."""

    def close(self) -> None:
        """Forget what `restore` would put back, because the step has ended with a result."""

    def restore(self) -> None:
        """Drop the gradients, and put back what `open` kept; do nothing if it was refused."""
