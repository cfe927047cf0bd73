"""The protocol of a training engine on which a step can be split."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from megatron_idempotent.fp8.packing import TokenAlignment

from .loss import StepLoss
from .outputs import Reported
from .pieces import Piece
from .totals import Totals


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """Tells what an optimizer step did.

    Example: `Update(skipped=None, grad_norm=1.5)`.
    """

    skipped: str | None
    """Why no parameter was updated; None where they were."""
    grad_norm: float | None


class Backend(Protocol):
    """A model, its optimizer and its schedule on this rank. Methods are called in this order."""

    @property
    def replica(self) -> int:
        """Data-parallel rank; ranks of one replica are given the same batches."""

    @property
    def is_reporting_rank(self) -> bool:
        """True on the one rank of a replica that counts for it."""

    @property
    def has_losses(self) -> bool:
        """True on that rank, and on the others whose losses are of other positions."""

    @property
    def device(self) -> Any:
        """The device for microbatches that this rank makes up because it has none."""

    @property
    def must_agree(self) -> Mapping[str, Any]:
        """Settings that are the same on all ranks in a step that is right, by name."""

    @property
    def replicas(self) -> int:
        """Data-parallel ranks."""

    @property
    def lowers_scale(self) -> bool:
        """True if gradients that are not finite lower a loss scale, and the step is skipped."""

    @property
    def narrow(self) -> bool:
        """True if gradients of sums over a whole step may leave the range of their type."""

    @property
    def alignment(self) -> TokenAlignment:
        """Multiples of tokens that packs are padded to. `ValueError` where none are known."""

    @property
    def microbatch_multiple(self) -> int:
        """The number of microbatches in a call is a multiple of it."""

    @property
    def attention(self) -> float:
        """Work of a token for each token of its sequence, where a token costs 1 besides."""

    @property
    def partially_updated(self) -> bool:
        """True if parameters may be half updated, without a copy to go back to."""

    def accept_loss(self, loss: StepLoss) -> None:
        """Raise `ValueError` where the model has losses that this one does not weigh."""

    def open(self) -> None:
        """Zero gradients, switch to training, and remember what `restore` puts back."""

    def accept(self, lists: Sequence[Sequence[Piece]]) -> None:
        """Raise `ValueError` where microbatches cannot be run so; nothing has happened yet."""

    def lockstep_group(self) -> tuple[bool, Any]:
        """Returns whether ranks meet inside of a microbatch, and the gloo group of those that do.

        The group is None if it has all ranks. The first call is a collective of all ranks.
        """

    def divide_losses(self, shift: int) -> None:
        """Divide losses by 2 ** shift until the update, and the gradients that are there already.

        Only where gradients are `narrow`. The update multiplies with it.
        """

    def run(
        self, pieces: Sequence[Piece], loss: StepLoss, *, reduce: bool, ghosts: bool
    ) -> list[Reported]:
        """Forward and backward, with the loss not normalised; what it returned for each microbatch.

        With `reduce`, reductions start as they would in the last microbatch of a one-shot step.
        Nothing of `ghosts` may reach a gradient. Raises `LocalFailure` for a failure on this rank
        after which it did all that other ranks wait for, and `WindowAborted` for one that all know.
        """

    def check_ready(self, increment: int | None) -> None:
        """Raise `RuntimeError` where gradients could not be finalized; starts no collective.

        Raise `ValueError` where the scheduler needs a batch size to advance by, and got none.
        """

    def join(self, *, wait: bool = True) -> None:
        """Take part in what peers start in a forward, if this rank had none; wait for its end."""

    def check_gradients(self) -> None:
        """Raise where a gradient would be refused in the reduction."""

    def update(
        self, totals: Totals, local: float, increment: int | None, timeout_s: float
    ) -> Update:
        """Reduce and finalize once, divide, step the optimizer and the scheduler.

        `local` is this replica's part of the normalizer, if that is counted. All ranks take part;
        none waits longer than `timeout_s` in a collective, where that can be had. Raises
        `RuntimeError` on all ranks where the norm is not finite and that is to be refused; nothing
        is updated then.
        """

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the update; `restore` puts back what it was."""

    def rates(self) -> tuple[float, float] | None:
        """Learning rate and weight decay as they are now; None where nothing is trained here."""

    def skip(self) -> None:
        """Drop the gradients of a step that has nothing valid; parameters stay."""

    def close(self) -> None:
        """The step has ended with a result: forget what `restore` would put back."""

    def restore(self) -> None:
        """Drop the gradients, and put back what `open` found; nothing where that was refused."""


def no_way_back(step_id: str, what: str) -> RuntimeError:
    """Makes the error of a call that comes after all ranks have updated; `finish` alone may."""
    return RuntimeError(
        f"{what}(): all ranks have updated in step {step_id!r}; finish() it again for its result"
    )
