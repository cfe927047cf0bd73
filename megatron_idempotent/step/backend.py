"""Defines `Backend`, which a split step calls for all that Megatron and FSDP2 do differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from megatron_idempotent.fp8.packing import TokenAlignment

from .loss import StepLoss
from .pieces import Piece
from .results import Reported, Totals, Update


class Backend(Protocol):
    """Runs a model, its optimizer and its scheduler on this rank; a step calls it in this order."""

    @property
    def replica(self) -> int:
        """The data-parallel rank of this process; ranks of one replica get the same batches."""

    @property
    def is_reporting_rank(self) -> bool:
        """True on the one rank of a replica that reports what is valid in its batches."""

    @property
    def has_losses(self) -> bool:
        """True on the reporting rank, and on ranks that compute the loss of other positions."""

    @property
    def device(self) -> Any:
        """The device of the parameters, on which dummy microbatches are made."""

    @property
    def must_agree(self) -> Mapping[str, Any]:
        """Settings by name; where they differ between ranks, the step fails on all of them."""

    @property
    def replicas(self) -> int:
        """The number of data-parallel ranks."""

    @property
    def lowers_scale(self) -> bool:
        """True if gradients that are not finite lower a loss scale, and the step is skipped."""

    @property
    def narrow(self) -> bool:
        """True if gradients of a loss that is summed over a whole step may overflow their type."""

    @property
    def alignment(self) -> TokenAlignment:
        """Multiples of tokens that packs are padded to. `ValueError` where they are not known."""

    @property
    def microbatch_multiple(self) -> int:
        """The number that the microbatches of a call are a multiple of; 1 if any number will do."""

    @property
    def attention(self) -> float:
        """Work that a token adds for each token of its sequence; its other work counts as 1."""

    @property
    def partially_updated(self) -> bool:
        """True if parameters may be half updated, and there is no copy to go back to."""

    def accept_loss(self, loss: StepLoss) -> None:
        """Raise `ValueError` if the loss lacks a weight for auxiliary losses that the model has."""

    def open(self) -> None:
        """Zero gradients, switch to training, and remember what `restore` puts back."""

    def accept(self, lists: Sequence[Sequence[Piece]]) -> None:
        """Raise `ValueError` if microbatches, a list for each call, cannot run; change nothing."""

    def lockstep_group(self) -> tuple[bool, Any]:
        """Return whether ranks meet inside of a microbatch, and the gloo group of those that do.

        The group is None if it has all ranks. The first call is a collective of all ranks.
        """

    def divide_losses(self, shift: int) -> None:
        """Have later losses of the step, and the gradients so far, divided by 2 ** shift.

        Called only where gradients are `narrow`. The update multiplies by 2 ** shift again.
        """

    def run(
        self, pieces: Sequence[Piece], loss: StepLoss, *, reduce: bool, ghosts: bool
    ) -> list[Reported]:
        """Run forward and backward, with the loss not normalised; return what it reported.

        There is an item per microbatch on ranks that have the loss. With `reduce`, reductions
        start as they would in the last microbatch of a one-shot step. With `ghosts` the
        microbatches are dummies, of which nothing may reach a gradient. Raises `LocalFailure` for a
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

    def size_of_parameters(self) -> Any:
        """Return a scalar of all trained parameters of this rank, finite unless one is not.

        It may be on the device. It costs one pass over them, and no wait.
        """

    def bad_parameter(self) -> str | None:
        """Name the first trained parameter that is NaN or infinite, and where; None without one.

        The host waits for the device, so it is called only if the size was not finite.
        """

    def check_gradients(self) -> None:
        """Raise here for a gradient that the reduction would refuse while peers wait in it."""

    def update(
        self, totals: Totals, local: float, increment: int | None, timeout_s: float
    ) -> Update:
        """Reduce and finalize once, divide, step the optimizer and the scheduler.

        `local` is this replica's part of the normalizer, where that counts tokens or sequences. All
        ranks take part; none waits longer than `timeout_s` in a collective whose backend has
        timeouts. Raises `RuntimeError` on all ranks if the norm is not finite and the step refuses
        that; then nothing is updated.
        """

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the update; `restore` puts back what it was."""

    def rates(self) -> tuple[float, float] | None:
        """Return learning rate and weight decay; None if this rank trains no parameter."""

    def skip(self) -> None:
        """Drop the gradients of a step that is not to update; parameters stay."""

    def close(self) -> None:
        """Forget what `restore` would put back, because the step has ended with a result."""

    def restore(self) -> None:
        """Drop the gradients, and put back what `open` found; do nothing if it was refused."""


def no_way_back(step_id: str, what: str) -> RuntimeError:
    """Makes the error for a call other than `finish` after all ranks have updated."""
    return RuntimeError(
        f"{what}(): all ranks have updated in step {step_id!r}; finish() it again for its result"
    )
