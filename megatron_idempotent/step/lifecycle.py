"""Takes the calls of a split step: `begin`, `microbatch`, `finish` or `abort`, each once per id.

`SplitStep` has them, `OpenStep` runs them, and a `Backend` does what Megatron and FSDP2 do
differently.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar, cast, get_args

import torch.distributed as dist

from megatron_idempotent.fp8.packing import TokenAlignment
from megatron_idempotent.megatron.expert_replay import ReplayMode
from megatron_idempotent.window.agreement import (
    checked_deadline,
    control_group,
    refuse_if_poisoned,
)

from .loss import (
    Divisor,
    Receipt,
    Reported,
    StepLoss,
    StepResult,
    Totals,
    Update,
    check_begin,
    check_divisor,
    check_size,
    check_type,
    is_number,
    refuse_no_grad,
)
from .microbatches import SAMPLE_MASK, TOKEN_MASK, TOKENS, Batch, Piece
from .open_step import OpenStep
from .packs import capacity_of
from .snapshot import Writes

NonFinite = Literal["refuse", "skip", "update"]
"""The act of `finish` if a loss or the norm of the gradients is NaN or infinite: raise, drop the
gradients and go on, or update all the same."""

NothingValid = Literal["skip", "update"]
"""The act of `finish` if nothing is valid on any rank: leave all as it is, or let the optimizer
step with gradients that are divided by 1."""


Forward = Callable[[Any, Batch], Any]
"""Computes the output of a model, or of a chunk of it, for a microbatch."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Holds the options that `TrainStep` and `FSDPTrainStep` share, and checks them.

    `ValueError` says which is wrong: the deadline is no positive finite number, a choice is
    unknown, `shared` is no collection of names or names tokens or masks, `shape` or `counts` cannot
    be called, or `alignment` is no `TokenAlignment`.

    `TypeError` says the same of `forward` and of switches.

    Example: `Options(of="TrainStep", forward=print, deadline_s=20.0, non_finite="refuse")`.
    """

    of: str
    """The name of the class that is made."""
    forward: Forward
    deadline_s: float
    non_finite: NonFinite
    shared: Collection[str] = ()
    """Names in batches that all rows share."""
    shape: Callable[[Any], tuple[int, int]] | None = None
    """A function that returns rows and positions of a ready microbatch; None for `input_ids`'."""
    counts: Callable[[Any], Any] | None = None
    """A function that returns valid sequences and tokens of a ready microbatch; None to count."""
    nothing_valid: NothingValid = "skip"
    alignment: TokenAlignment | None = None
    """Multiples of tokens that packs are padded to; None for those of the model's config."""
    undo: bool = False
    order_stable: bool = False
    router_replay: ReplayMode = "off"

    def __post_init__(self) -> None:
        if not callable(self.forward):
            raise TypeError(
                f"{self.of}() takes a function of (model, microbatch) as forward, got "
                f"{self.forward!r}: leave it out for the usual one"
            )
        for name in ("undo", "order_stable"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{self.of}() takes True or False as {name}, got {value!r}")
        checked_deadline(self.deadline_s)
        if self.alignment is not None and not isinstance(self.alignment, TokenAlignment):
            raise ValueError(f"alignment takes a TokenAlignment, got {self.alignment!r}")
        for name in ("shape", "counts"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise ValueError(f"{name} takes a function of a ready microbatch, got {function!r}")
        for name, choices in (
            ("non_finite", get_args(NonFinite)),
            ("nothing_valid", get_args(NothingValid)),
            ("router_replay", get_args(ReplayMode)),
        ):
            value, known = getattr(self, name), ", ".join(map(repr, choices))
            if value not in choices:
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        names = not isinstance(self.shared, str) and isinstance(self.shared, Collection)
        if not names or not all(isinstance(name, str) for name in self.shared):
            raise ValueError(
                f"shared must be a collection of names in batches, got {self.shared!r}"
            )
        counted = {TOKENS, SAMPLE_MASK, TOKEN_MASK}.intersection(self.shared)
        if counted:
            raise ValueError(
                f"shared names {sorted(counted)}, by whose rows a step counts: leave them out"
            )


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
    """Work that a token adds for each token of its sequence; its other work counts as 1."""

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
        """Return a sum of the gradients' bits, by which those that were put back are known.

        It may be on the device, and nothing waits. None if gradients may not be written at all.
        """

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

    def outdated_main_parameters(self) -> Any:
        """Return the number of this rank's main elements that do not round to the model's.

        It may be on the device. It costs one pass over both, and no wait.
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

    def skip(self) -> None:
        """Drop the gradients of a step that is not to update; parameters stay."""

    def close(self) -> None:
        """Forget what `restore` would put back, because the step has ended with a result."""

    def restore(self) -> None:
        """Drop the gradients, and put back what `open` found; do nothing if it was refused."""


_REMEMBERED = 8

_Call = TypeVar("_Call", bound=Callable[..., Any])


def _by_one_thread(call: _Call) -> _Call:
    """Have a call refuse a thread that comes while another one is in any of the step's calls.

    Two threads would be in one gather of gloo's, which ends the process.
    """

    @functools.wraps(call)
    def alone(self: SplitStep, *args: Any, **kwargs: Any) -> Any:
        mine = threading.get_ident(), call.__name__
        try:
            # One operation, so that of two threads one is the first.
            thread, name = self._caller.setdefault("here", mine)
            if thread != mine[0]:
                raise RuntimeError(
                    f"{call.__name__}(): another thread is in {name}() of this step: make the "
                    "calls of a step from one thread, or one after the other"
                )
            return call(self, *args, **kwargs)
        finally:
            if self._caller.get("here", mine)[0] == mine[0]:
                self._caller.pop("here", None)

    return cast("_Call", alone)


class SplitStep:
    """Has the calls of a step, which `TrainStep` and `FSDPTrainStep` share.

    One process per rank calls it, one thread at a time. Every rank makes the same `begin` and
    `finish` or `abort` calls; ranks may get different numbers of batches, see `microbatch`.
    """

    def __init__(self, backend: Backend, options: Options) -> None:
        self._backend = backend
        self._options = options
        self._open: OpenStep | None = None
        # The steps that ended last: their results, or why there is none.
        self._ended: dict[str, StepResult | str] = {}
        self._begun = self._updates = 0
        self._partially_updated = False
        # The thread that is in a call now, and the call's name; empty between calls.
        self._caller: dict[str, tuple[int, str]] = {}

    @property
    def open_step_id(self) -> str | None:
        """The id of the step that is open; None between two steps."""
        return None if self._open is None else self._open.step_id

    @_by_one_thread
    def prepare(self) -> None:
        """Make the gloo groups in which ranks agree. All ranks call it, and wait for each other.

        The first `begin` does so by itself. Call this before, where ranks begin their first step at
        different times: when their data come, or in a schedule that a framework calls.

        Example:
            step.prepare()
        """
        self._make_groups()

    @_by_one_thread
    def begin(
        self,
        loss: StepLoss,
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        max_tokens_per_microbatch: int | None = None,
        rank_batch_size: int | None = None,
        divisor: Divisor | None = None,
        step_id: str | None = None,
    ) -> str:
        """Open a step: zero the gradients, and put the model into training mode.

        All ranks call it. The first call makes gloo groups, where ranks wait for each other; later
        ones wait for nobody.

        Args:
            loss: see `StepLoss`; the same on all ranks.
            global_batch_size: what the scheduler advances by, in sequences; the same on all ranks.
                None if it is given to `finish()`.
            micro_batch_size: rows of a microbatch; the last one of a batch may have fewer. Replicas
                may have different ones. None if all microbatches come ready.
            max_tokens_per_microbatch: the most tokens of a microbatch, padding included, instead of
                `micro_batch_size`. The rows of a batch become packs of about one size; its
                `lengths` or `attention_mask` say which tokens are real. The same on all ranks.
            rank_batch_size: rows that this rank will get in the step, if that is known: the batch
                that completes them counts as the last one, see `microbatch`.
            divisor: the number that gradients are divided by, instead of the count of the loss's
                kind; the same on all ranks. A function of `StepCounts` is called in `finish()`, on
                all ranks.
            step_id: a name of the caller's, the same on all ranks; None for the step's number.

        Returns:
            The step's id. A repeated call, with the id of the open step or of one that ended with a
            result, changes nothing and returns the id again.

        Raises:
            RuntimeError: a step is open, this id was aborted or is open with other arguments, or
                the parameters are half updated; or torch records no gradient.
            ValueError: a size that is not a positive integer, two that exclude each other, a budget
                below the smallest pack, or a loss that does not say its kind. Or the model has MoE,
                MTP or other auxiliary losses, and a loss of kind "group" or "none" has no
                `auxiliary_weight` for them.
            SessionPoisoned: a rank left collectives of an earlier step that others may wait in.

        Ranks that begin with different arguments are told so (`WindowAborted`) where they next
        agree on anything: in a batch that they run together or that is the last one, or in
        `finish()`.

        Example:
            step_id = step.begin(loss, global_batch_size=256, micro_batch_size=4)
        """
        begun_with = {
            "loss": loss,
            "global_batch_size": global_batch_size,
            "micro_batch_size": micro_batch_size,
            "max_tokens_per_microbatch": max_tokens_per_microbatch,
            "rank_batch_size": rank_batch_size,
            "divisor": divisor,
        }
        check_begin(begun_with, step_id)
        self._backend.accept_loss(loss)
        if max_tokens_per_microbatch is not None:
            alignment = self._options.alignment or self._backend.alignment
            try:
                capacity_of(max_tokens_per_microbatch, alignment)
            except ValueError as error:
                raise ValueError(f"begin() got {error}") from None
        if step_id is not None and self._is_repeated(step_id, begun_with):
            return step_id
        refuse_if_poisoned()
        if self._open is not None:
            raise RuntimeError(
                f"begin(): step {self._open.step_id!r} is open; finish() or abort() it first"
            )
        if self._partially_updated:
            raise RuntimeError(
                "begin(): an earlier step failed inside of the optimizer's update, so parameters "
                "may be half updated: load a checkpoint and make a new TrainStep"
            )
        step_id = f"step-{self._begun}" if step_id is None else step_id
        # Here, where all ranks come by: later one may be in a forward while another asks.
        self._make_groups()
        try:
            self._backend.open()
        except BaseException:
            self._backend.restore()
            raise
        self._begun += 1
        self._open = OpenStep(self._backend, step_id, begun_with, self._options, self._updates)
        return step_id

    @_by_one_thread
    def microbatch(
        self,
        step_id: str,
        batch: Batch | None = None,
        *,
        microbatches: Sequence[Any] | None = None,
        last: bool = False,
        microbatch_id: str | None = None,
    ) -> Receipt:
        """Run forward and backward of some rows of the step, or of microbatches that are ready.

        Nothing is updated. A batch is cut into microbatches of `micro_batch_size` rows, or packed
        into microbatches of `max_tokens_per_microbatch`; `microbatches` are run as they are, of any
        shape, in one call of the schedule.

        The ranks of one replica (tensor, context and pipeline parallel) are given the same batch.
        If replicas meet inside of the model (expert parallelism, FSDP2), all ranks make each call,
        those without data with None; elsewhere None does nothing.

        Args:
            batch: a mapping with `input_ids` [B, T], and `sample_mask` [B] and `token_mask` [B, T]
                if not all is valid. Tensors have B as their first dimension, lists and tuples B
                items; scalars, and names in the step's `shared`, are the same for all rows. B may
                be 0. A step with a budget of tokens also needs `lengths` [B] or `attention_mask`
                [B, T], or nested `input_ids`.
            microbatches: instead of a batch, a list of anything that `forward` and the loss take:
                mappings, TensorDicts, dataclasses, packs, nested tensors. Their shape is that of
                `input_ids`, or what the step's `shape` returns. Valid sequences and tokens are
                what the step's `counts` returns, else `counts` in a microbatch, else what the masks
                of rows or packs say. An interleaved pipeline takes multiples of its stages.
            last: True for this rank's last batch of the step. If all ranks say so, its backward
                overlaps the reductions, as the last microbatch of a one-shot step does. All ranks
                agree on it first, so a rank waits there for the slowest one.
            microbatch_id: a name of the caller's; the batch that is sent again under it is not run
                again, and another batch is refused.

        Returns:
            The receipt of the batch. On ranks that have the loss it holds the loss's `outputs` for
            each sequence, and sums (`Receipt.metrics()`) for callers that want them before
            `finish()`. For a batch that was sent again, the receipt of the first time.

        Raises:
            RuntimeError: no such step is open, it has failed, or has had its last batch; torch
                records no gradient; or another thread is in a call of the step.
            ValueError: not a batch, or one with a `Pack`; rows of unknown lengths, or one that is
                longer than the budget; a microbatch whose shape or counts are unknown, or whose
                masks or `cu_seqlens` do not fit; masks of other numbers than 0 and 1, tokens out of
                the vocabulary, or another batch than the one of this `microbatch_id`. The step is
                as it was.
            WindowAborted: a rank failed, and all that wait for it know. The step is as it was if
                the message says so; else it has failed.
            SessionPoisoned: a rank failed where others may wait for it, or did not come within the
                deadline.
            Exception: what the model or the loss raised, if nobody waits for this rank. The step
                has failed then, and stays open until `abort()`.
        """
        check_type("microbatch", "step_id", step_id, str)
        step = self._current(step_id, "microbatch")
        if isinstance(microbatch_id, str) and microbatch_id in step.receipts:
            return step.repeated(microbatch_id, batch, microbatches)
        self._refuse_failed(step, "microbatch")
        if step.last:
            raise RuntimeError(
                f"microbatch(): step {step_id!r} has had its last batch; finish() it"
            )
        return step.add(batch, microbatches, last, microbatch_id)

    @_by_one_thread
    def finish(
        self,
        step_id: str,
        *,
        global_batch_size: int | None = None,
        divisor: Divisor | None = None,
        lr: float | None = None,
    ) -> StepResult:
        """Reduce once, divide by what is valid on all ranks, update, advance the scheduler.

        All ranks take part, those without data too, and give the same arguments. A step in which
        nothing is valid is skipped, or updates, as the step's `nothing_valid` says.

        Args:
            global_batch_size: as in `begin()`, if it was not known there.
            divisor: as in `begin()`, if it was not known there.
            lr: the learning rate of this update, times each parameter group's `lr_mult`. It stays
                until a scheduler or a later step sets another.

        Returns:
            The step's result; called again with the id of one of the last steps, that step's.

        Raises:
            ValueError: an argument is of the wrong kind or differs from what `begin()` was given,
                or the batch size that the scheduler needs is missing. The step is as it was.
            RuntimeError: no such step is open, it has failed, gradients cannot be finalized, torch
                records none, or another thread is in a call of the step; the call has started no
                collective.
            WindowAborted: a rank failed or aborted, ranks began the step differently, gradients or
                parameters were written beside the step, or a loss, a parameter or the gradients'
                norm is not finite and the step refuses that. All ranks know; nothing was updated,
                and the step stays open until `abort()`.
            SessionPoisoned: a rank did not come within the deadline.
        """
        check_type("finish", "step_id", step_id, str)
        if isinstance(ended := self._ended.get(step_id), StepResult):
            return ended
        refuse_no_grad("finish")
        step = self._current(step_id, "finish")
        check_size("finish", "global_batch_size", global_batch_size)
        check_divisor("finish", divisor)
        if lr is not None and (not is_number(lr) or not (0 <= lr < math.inf)):
            raise ValueError(f"finish() takes a finite number from 0 on as lr, got {lr!r}")
        increment = _given(step, "global_batch_size", global_batch_size)
        divisor = _given(step, "divisor", divisor)
        if not step.committed:
            self._refuse_failed(step, "finish")
            self._backend.check_ready(increment)
        try:
            result = step.finish(increment, lr, divisor)
        finally:
            self._partially_updated = self._partially_updated or step.partially_updated
        self._backend.close()
        self._updates = step.updates
        self._end(step_id, result)
        return result

    @_by_one_thread
    def abort(self, step_id: str | None = None) -> None:
        """Drop the open step, as if it had never begun; without an open step nothing happens.

        All ranks call it, or `finish()`, which then raises. None waits if all ranks know already
        that the step failed.

        Raises:
            RuntimeError: another step is open than `step_id`, or all ranks have updated in it.
            SessionPoisoned: not all ranks came; what is on this rank is put back all the same.
        """
        step = self._open
        if step_id is not None:
            check_type("abort", "step_id", step_id, str)
            if isinstance(self._ended.get(step_id), StepResult):
                raise _no_way_back(step_id, "abort")
        if step is None:
            return
        if step_id is not None and step_id != step.step_id:
            raise RuntimeError(
                f"abort(): got step {step_id!r}, which is not open; step {step.step_id!r} is"
            )
        if step.committed:
            raise _no_way_back(step.step_id, "abort")
        try:
            step.tell_of_abort()
        finally:
            self._partially_updated = self._partially_updated or step.partially_updated
            self._backend.restore()
            self._end(step.step_id, "it was aborted")

    def _make_groups(self) -> None:
        if dist.is_initialized():
            control_group(self._options.deadline_s)
            self._backend.lockstep_group()

    def _is_repeated(self, step_id: str, begun_with: dict[str, Any]) -> bool:
        if self._open is not None and self._open.step_id == step_id:
            # A loss that was sent again is another object, of which only the type can be compared.
            differing = {
                name: (self._open.begun_with[name], value)
                for name, value in begun_with.items()
                if name != "loss" and value != self._open.begun_with[name]
            }
            if differing:
                raise RuntimeError(
                    f"begin(): step {step_id!r} is open, and this call differs from the one that "
                    f"opened it (there, here): {differing}. Repeat it with equal arguments, or "
                    "finish() or abort() the step first"
                )
            return True
        ended = self._ended.get(step_id)
        if isinstance(ended, str):
            raise RuntimeError(f"begin(): step {step_id!r} has ended, {ended}; take another id")
        return ended is not None

    def _current(self, step_id: str, what: str) -> OpenStep:
        if self._open is not None and self._open.step_id == step_id:
            return self._open
        if step_id in self._ended:
            ended = self._ended[step_id]
            how = ended if isinstance(ended, str) else "it was finished"
            raise RuntimeError(f"{what}(): step {step_id!r} is not open, {how}; begin() a new one")
        open_one = "no step is" if self._open is None else f"step {self._open.step_id!r} is"
        raise RuntimeError(f"{what}(): step {step_id!r} is not open, {open_one}; begin() it first")

    def _refuse_failed(self, step: OpenStep, what: str) -> None:
        if step.committed:
            raise _no_way_back(step.step_id, what)
        if step.failure is not None or step.owes:
            how = step.failure or "it was interrupted"
            raise RuntimeError(f"{what}(): step {step.step_id!r} has failed: {how}; abort() it")
        refuse_if_poisoned()

    def _end(self, step_id: str, how: StepResult | str) -> None:
        self._open = None
        self._ended[step_id] = how
        while len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]


def _given(step: OpenStep, name: str, value: Any) -> Any:
    """Return the argument that `begin()` or `finish()` was given; both may be, if equal."""
    begun = step.begun_with[name]
    if value is None or begun is None:
        return begun if value is None else value
    if value != begun:
        raise ValueError(
            f"finish() got {name}={value!r}, and begin() {begun!r}: give it once, or the same"
        )
    return value


def _no_way_back(step_id: str, what: str) -> RuntimeError:
    """Make the error for a call other than `finish` after all ranks have updated."""
    return RuntimeError(
        f"{what}(): all ranks have updated in step {step_id!r}; finish() it again for its result"
    )


def skipped_for(grad_norm: float, rule: NonFinite) -> str | None:
    """Return the reason to skip the update; None if it is to be made.

    All ranks decide the same, because the norm is that of all ranks.

    Raises:
        RuntimeError: the norm is not finite, and the rule is "refuse".
    """
    if math.isfinite(grad_norm) or rule == "update":
        return None
    found = f"the norm of the gradients is {grad_norm}"
    if rule == "skip":
        return f"{found}, and non_finite='skip'"
    raise RuntimeError(
        f"{found}, and the update would spread that to all parameters; no rank has begun it. "
        "non_finite='skip' drops such steps"
    )
