"""Declares a step's options, and the methods by which it runs its model and optimizer."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

from megatron_idempotent.fp8.packing import TokenAlignment
from megatron_idempotent.megatron.optimizers import parts
from megatron_idempotent.patching.settings import looks
from megatron_idempotent.window.agreement import DEADLINE_S

from .loss import LossResult, NonFinite, NothingValid, StepLoss, StepTotals, Update
from .microbatches import Batch, Calls, Microbatch, Shape
from .snapshot import OpenUpdate, Restore, Writes

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
    """Is raised if this rank failed with `error` and no other rank waits for it in a collective."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class Backend(ABC):
    """Base class of backends, which run the model, optimizer and scheduler of this rank for a step.

    A step calls the methods in the order in which they are defined here; methods whose
    names begin with an underscore are called by the backend itself. A method that does nothing here
    is overridden by backends whose models need it.
    """

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
    microbatch_multiple: int = 1
    """The number that the microbatches of a call are a multiple of; 1 if any number will do."""
    attention: float = 0.0
    """Attention's cost for each token of its context, relative to a token's fixed cost of 1; 0 if
    nothing is known of the model."""

    _own_update: OpenUpdate
    """The update that the step makes itself."""

    def __init__(self, options: Options, optimizer: Any, scheduler: Any) -> None:
        self.options = options
        self.optimizer = optimizer
        """None if the step cannot finish."""
        self._scheduler = scheduler
        self._snapshot: list[Restore] = []
        self.modules: list[Any] = []
        """All modules of the model, listed when a step begins."""
        self._is_reducing = False
        """True once reductions have begun in the step."""
        self._reads_ids = looks()
        """True if the host reads token ids from a device, for which it has to wait. An unknown id
        on a device aborts the process."""

    @property
    @abstractmethod
    def device(self) -> Any:
        """The device of the parameters, on which dummy microbatches (zeros) are created."""

    @property
    def must_agree(self) -> dict[str, Any]:
        """Settings by name that must be equal on all ranks; if they differ, the step fails."""
        return {"scheduler": type(self._scheduler).__name__}

    @property
    def narrow(self) -> bool:
        """True if gradients may overflow their dtype, as in fp16. They are those of a sum of
        losses, which is divided only at the end of the step.
        """
        return False

    @property
    @abstractmethod
    def alignment(self) -> TokenAlignment:
        """The multiples of tokens to which packs, and the sequences in them, are padded: those of
        the option `alignment` or, without it, those that the model needs. Raise `ValueError` if
        they are unknown.
        """

    @property
    def partially_updated(self) -> bool:
        """True if parameters may be half updated, and no copy of them can be restored."""
        return self._own_update.is_torn

    def accept_loss(self, loss: StepLoss) -> None:  # noqa: B027  most losses and models need none
        """Raise `ValueError` if the model has auxiliary losses and the loss lacks the
        `auxiliary_weight` that they need.
        """

    def open(self) -> None:
        """Zero gradients, switch to training mode, and save the state that `restore` puts back.

        The optimizer's `step()` raises until `update` or the end of the step.

        Raises:
            RuntimeError: another step is open for the model.
        """
        self.close()  # the end of the last step may have been interrupted
        self._refuse_other_step()
        self._snapshot = self._keep()
        self._own_update.open(parts(self.optimizer))
        self._is_reducing = False
        self._start()

    @abstractmethod
    def _refuse_other_step(self) -> None:
        """Raise `RuntimeError` if another step is open for the model."""

    @abstractmethod
    def _keep(self) -> list[Restore]:
        """Copy what a step changes apart from gradients, parameters and the optimizer's state.
        Return functions that put the copies back.
        """

    @abstractmethod
    def _start(self) -> None:
        """Put the model into training mode with gradients of zero, and make its training by other
        code raise an error until the step ends.
        """

    @abstractmethod
    def writes(self) -> Writes:
        """Return counters of writes to trained parameters and gradients; do not wait for a
        device.

        They are equal to the counters of an earlier call if nothing was written in between.
        """

    def gradient_bits(self) -> Any:
        """Return a checksum of the gradients' bits; if a later call returns another, gradients were
        written in between.

        It may be a tensor on the device, and the host does not wait. None if the backend compares
        no gradients.
        """
        return None

    @abstractmethod
    def accept(self, calls: Calls) -> None:
        """Raise `ValueError` if the model cannot run the microbatches of these schedule calls;
        change nothing.
        """

    @abstractmethod
    def lockstep_group(self) -> tuple[bool, Any]:
        """Return whether other ranks take part in collectives within the forward and backward of
        this rank's microbatches, and the gloo group of this rank and those ranks.

        The group is None if all ranks are in it. The first call is a collective of all ranks.
        """

    def divide_losses(self, shift: int) -> None:  # noqa: B027  called only on a `narrow` one
        """Divide the gradients that the step has added up so far, and the losses of later
        microbatches, by 2 ** shift.

        Called only where gradients are `narrow`. The update multiplies by 2 ** shift again.
        """

    @abstractmethod
    def run(
        self, microbatches: Sequence[Microbatch], loss: StepLoss, *, reduce: bool, dummies: bool
    ) -> list[LossResult]:
        """Run forward and backward of each microbatch. A backward starts at the microbatch's loss,
        a sum that is not divided by a count. Return one `LossResult` per microbatch on ranks that
        compute the loss, [] on others.

        With `reduce`, reductions start as they would in the last microbatch of a one-shot step.
        With `dummies` the microbatches must not change any gradient. Raises `LocalFailure` for a
        failure of this rank for which no other rank waits, and `WindowAborted` for a failure that
        all ranks know of.
        """

    @abstractmethod
    def check_ready(self, increment: int | None) -> None:
        """Raise `RuntimeError` if the step cannot end in an update, for example because there is no
        optimizer. Start no collective.

        Raise `ValueError` if the scheduler needs a batch size to advance by, and `increment` is
        None.
        """

    def join(self, *, wait: bool = True) -> None:  # noqa: B027  as the docstring says
        """Take part in the parameter gathers that the forwards of other ranks start.
        A rank calls it if it has run no forward since the last update.

        With `wait`, return when the gathers have ended. Nothing is done where each forward ends
        the gathers that it starts.
        """

    @abstractmethod
    def parameter_norm(self) -> Any:
        """Return a norm of this rank's trained parameters.
        It is finite only if all their elements are finite.

        It may be a tensor on the device. It costs one pass over the parameters, and no wait.
        """

    def outdated_main_parameters(self) -> Any:
        """Count this rank's main-parameter elements that do not round to the model's parameters.
        Main parameters are the optimizer's own copies.

        The count may be a tensor on the device. It costs one pass over both, and no wait. It is 0
        where the optimizer updates the model's own parameters.
        """
        return 0

    @abstractmethod
    def bad_parameter(self) -> str | None:
        """Name the first NaN or infinite element of a trained parameter; None if all are finite.

        The host waits for the device, so it is called only if the norm was not finite.
        """

    def check_gradients(self) -> None:  # noqa: B027  not all reductions refuse gradients
        """Raise on this rank if the reduction would raise for one of its gradients, for example for
        a NaN. Each rank calls this before any rank enters the reduction.
        """

    @abstractmethod
    def update(self, totals: StepTotals, increment: int | None, timeout_s: float) -> Update:
        """Reduce and finalize gradients once, divide them by the normalizer in `totals`, step the
        optimizer and the scheduler.

        All ranks take part; none waits longer than `timeout_s` in a collective whose backend has
        timeouts. Raises `RuntimeError` on all ranks if the norm is not finite and the step refuses
        that; then nothing is updated.
        """

    def skip(self) -> None:
        """Drop the gradients of a step that makes no update; parameters keep their values."""
        self._drop_gradients()
        self.close()

    def close(self) -> None:
        """Drop the copies that `restore` would put back, and let other code train the model.

        It is called at each end of a step: with a result, and by `skip` and `restore`. `open` calls
        it first, in case the last step's end was interrupted.
        """
        self._snapshot = []
        self._own_update.reset()

    def restore(self) -> None:
        """Drop the gradients, and put back what `open` saved; do nothing if `open` saved nothing,
        because another step is open for the model.
        """
        if not self._snapshot:
            return
        self._drop_failed()
        if self._own_update.undo is not None:
            self._own_update.undo()
        for restore in self._snapshot:
            restore()
        self.close()

    @abstractmethod
    def _drop_gradients(self) -> None:
        """Drop the gradients that the step has added up, and leave no reduction in flight."""

    def _drop_failed(self) -> None:
        """Drop the gradients of a step that has failed, perhaps inside of a collective."""
        self._drop_gradients()
