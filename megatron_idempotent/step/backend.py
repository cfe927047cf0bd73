"""Declares a step's options, and the methods by which it runs its model and optimizer."""

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
    """Holds the options that `TrainStep` and `FSDPTrainStep` share; the docstring of `TrainStep`
    explains each.

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
    """Reports that this rank failed with `error` where no collective makes other ranks wait."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class Backend(Protocol):
    """Protocol by which a step runs the model, optimizer and scheduler of this rank.
    A step calls the methods in the order in which they are defined here.
    """

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
        """The device of the parameters, on which dummy microbatches (zeros) are created."""

    @property
    def must_agree(self) -> Mapping[str, Any]:
        """Settings by name that must be equal on all ranks; if they differ, the step fails."""

    @property
    def narrow(self) -> bool:
        """True if gradients may overflow their dtype, as in fp16, when the loss is summed over a
        whole step and divided only at the step's end.
        """

    @property
    def alignment(self) -> TokenAlignment:
        """The multiples of tokens to which packs are padded.
        Raise `ValueError` if they are unknown.
        """

    @property
    def partially_updated(self) -> bool:
        """True if parameters may be half updated, and no copy of them can be restored."""

    def accept_loss(self, loss: StepLoss) -> None:
        """Raise `ValueError` if the model has auxiliary losses and the loss lacks the
        `auxiliary_weight` that they need.
        """

    def open(self) -> None:
        """Zero gradients, switch to training mode, and save the state that `restore` puts back.

        The optimizer's `step()` raises until `update` or the end of the step.
        """

    def writes(self) -> Writes:
        """Return counters of writes to trained parameters and gradients; do not wait for a
        device.

        They are equal to the counters of an earlier call if nothing was written in between.
        """

    def gradient_bits(self) -> Any:
        """Return a checksum of the gradients' bits, for a comparison with that of a later call.

        It may be a tensor on the device, and the host does not wait. None if the backend compares
        no gradients.
        """

    def accept(self, calls: Calls) -> None:
        """Raise `ValueError` if the model cannot run the microbatches of these schedule calls;
        change nothing.
        """

    def lockstep_group(self) -> tuple[bool, Any]:
        """Return whether other ranks join in the collectives of this rank's microbatches.
        Also return the gloo group of this rank and those ranks.

        The group is None if all ranks are in it. The first call is a collective of all ranks.
        """

    def divide_losses(self, shift: int) -> None:
        """Divide the gradients that the step has added up so far, and the losses of later
        microbatches, by 2 ** shift.

        Called only where gradients are `narrow`. The update multiplies by 2 ** shift again.
        """

    def run(
        self, microbatches: Sequence[Microbatch], loss: StepLoss, *, reduce: bool, dummies: bool
    ) -> list[LossResult]:
        """Run forward and backward for each microbatch, starting at the undivided sum of the loss.
        Return what the loss returned for each microbatch, on ranks that compute the loss.

        Ranks that compute the loss return one result per microbatch. With `reduce`, reductions
        start as they would in the last microbatch of a one-shot step. With `dummies` the
        microbatches must not change any gradient. Raises `LocalFailure` for a failure on this rank
        for which no other rank waits, and `WindowAborted` for a failure that all ranks know of.
        """

    def check_ready(self, increment: int | None) -> None:
        """Raise `RuntimeError` if the step cannot end in an update, such as without an optimizer.
        Start no collective.

        Raise `ValueError` if the scheduler needs a batch size to advance by, and `increment` is
        None.
        """

    def join(self, *, wait: bool = True) -> None:
        """Take part in the parameter gathers that the forwards of other ranks start.
        A rank calls it if it has run no forward since the last update.

        With `wait`, return when the gathers have ended.
        """

    def parameter_norm(self) -> Any:
        """Return a norm of this rank's trained parameters.
        It is finite only if all their elements are finite.

        It may be a tensor on the device. It costs one pass over the parameters, and no wait.
        """

    def outdated_main_parameters(self) -> Any:
        """Count this rank's main-parameter elements that do not round to the model's parameters.
        Main parameters are the optimizer's own copies.

        The count may be a tensor on the device. It costs one pass over both, and no wait.
        """

    def bad_parameter(self) -> str | None:
        """Name the first NaN or infinite element of a trained parameter; None if all are finite.

        The host waits for the device, so it is called only if the norm was not finite.
        """

    def check_gradients(self) -> None:
        """Raise on this rank if the reduction would refuse one of its gradients, such as a NaN. It
        is called before any rank enters the reduction.
        """

    def update(
        self, totals: StepTotals, local: float, increment: int | None, timeout_s: float
    ) -> Update:
        """Reduce and finalize gradients once, divide them by the normalizer in `totals`, step the
        optimizer and the scheduler.

        `local` is this replica's part of the normalizer, where that counts tokens or sequences. All
        ranks take part; none waits longer than `timeout_s` in a collective whose backend has
        timeouts. Raises `RuntimeError` on all ranks if the norm is not finite and the step refuses
        that; then nothing is updated.
        """

    def skip(self) -> None:
        """Drop the gradients of a step that makes no update; parameters keep their values."""

    def close(self) -> None:
        """Drop the copies that `restore` would put back.
        It is called when the step has ended with a result.
        """

    def restore(self) -> None:
        """Drop the gradients, and put back what `open` saved; do nothing if `open` raised."""
