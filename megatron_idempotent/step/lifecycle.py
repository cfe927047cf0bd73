"""Takes the calls of a split step: `begin`, `microbatch`, `finish` or `abort`, each once per id.

`SplitStep` has them, `OpenStep` runs them, and a `Backend` does what Megatron and FSDP2 do
differently.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist

from megatron_idempotent.window.agreement import checked_deadline, control_group, refuse_if_poisoned

from .backend import Backend, Options
from .loss import (
    ARGUMENTS,
    Divisor,
    StepLoss,
    check_arguments,
    check_begin,
    refuse_no_grad,
)
from .microbatches import Batch, in_batch
from .open_step import OpenStep
from .packs import capacity_of
from .results import BatchResult, StepResult

_REMEMBERED_STEPS = 8

_Call = TypeVar("_Call", bound=Callable[..., Any])


def _by_one_thread(call: _Call) -> _Call:
    """Decorate a method of a step: it raises `RuntimeError` while another thread is in any such
    method of the same step.

    Two threads in one gather of gloo end the process.
    """

    @functools.wraps(call)
    def guarded_call(self: SplitStep, *args: Any, **kwargs: Any) -> Any:
        caller = threading.get_ident(), call.__name__
        try:
            # One operation, so that of two threads one is the first.
            thread, name = self._caller.setdefault("thread", caller)
            if thread != caller[0]:
                raise RuntimeError(
                    f"{call.__name__}(): another thread is in {name}() of this step: make the "
                    "calls of a step from one thread, or one after the other"
                )
            return call(self, *args, **kwargs)
        finally:
            if self._caller.get("thread", caller)[0] == caller[0]:
                self._caller.pop("thread", None)

    return cast("_Call", guarded_call)


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class SplitStep(Options):
    """Base class of `TrainStep` and `FSDPTrainStep`: an optimizer step in several calls, which are
    `begin`, `microbatch` for each batch, and `finish` or `abort`.

    One process per rank calls it, one thread at a time. Every rank makes the same `begin` and
    `finish` or `abort` calls; ranks may get different numbers of batches, see `microbatch`.
    """

    def __post_init__(self) -> None:
        options = {name: value for name, value in vars(self).items() if name in ARGUMENTS}
        check_arguments(type(self).__name__, **options)
        checked_deadline(self.deadline_s)
        self._backend = self._make_backend()
        self._open: OpenStep | None = None
        # The steps that ended last: their results, or why there is none.
        self._ended: dict[str, StepResult | str] = {}
        self._steps_begun = self._updates = 0
        self._partially_updated = False
        # The thread that is in a call now, and the call's name; empty between calls.
        self._caller: dict[str, tuple[int, str]] = {}

    def _make_backend(self) -> Backend:
        """Check the model, the optimizer and the scheduler, and make a backend for them."""
        raise NotImplementedError

    @property
    def open_step_id(self) -> str | None:
        """The id of the step that is open; None between two steps."""
        return None if self._open is None else self._open.step_id

    @_by_one_thread
    def prepare(self) -> None:
        """Create the gloo process groups over which ranks exchange their status.
        All ranks call it, and wait for each other.

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
        calls do not wait.

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
            with in_batch("begin() got "):
                capacity_of(max_tokens_per_microbatch, self._backend.alignment)
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
        step_id = f"step-{self._steps_begun}" if step_id is None else step_id
        # Create groups now, while all ranks are here; later one may be in a forward pass.
        self._make_groups()
        try:
            self._backend.open()
        except BaseException:
            self._backend.restore()
            raise
        self._steps_begun += 1
        self._open = OpenStep(self._backend, step_id, begun_with, self._updates)
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
    ) -> BatchResult:
        """Run forward and backward of a batch, which has some of the step's rows, or of
        microbatches that the caller has made.

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
            The result of the batch. On ranks that have the loss it holds the loss's `outputs` for
            each sequence, and sums (`BatchResult.metrics()`) for callers that want them before
            `finish()`. For a batch that was sent again, the result of the first time.

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
        check_arguments("microbatch", step_id=step_id)
        step = self._open_step(step_id, "microbatch")
        if isinstance(microbatch_id, str) and microbatch_id in step.named_batches:
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
        """End the step: reduce gradients once, divide them by the number of valid tokens, sequences
        or groups on all ranks (or by `divisor`), update parameters, advance the scheduler.

        All ranks take part, those without data too, and give the same arguments. A step in which
        nothing is valid is skipped, or updates, as the step's `nothing_valid` says.

        Args:
            global_batch_size: as in `begin()`, if it was not known there.
            divisor: as in `begin()`, if it was not known there.
            lr: the learning rate of this update, times each parameter group's `lr_mult`. It stays
                until a scheduler or a later step sets another. With `--decoupled-lr`, MuP or
                another group of its own rate, all ranks raise: set the groups' `lr` instead.

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
        check_arguments("finish", step_id=step_id)
        if isinstance(ended := self._ended.get(step_id), StepResult):
            return ended
        refuse_no_grad("finish")
        step = self._open_step(step_id, "finish")
        check_arguments("finish", global_batch_size=global_batch_size, divisor=divisor, lr=lr)
        increment = _argument_of_step(step, "global_batch_size", global_batch_size)
        divisor = _argument_of_step(step, "divisor", divisor)
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
        """Drop the open step and its gradients, as if it had never begun; without an open step
        nothing happens.

        All ranks call it, or `finish()`, which then raises. None waits if all ranks know already
        that the step failed.

        Raises:
            RuntimeError: another step is open than `step_id`, or all ranks have updated in it.
            SessionPoisoned: not all ranks came in time; this rank's state is restored all the same.
        """
        step = self._open
        if step_id is not None:
            check_arguments("abort", step_id=step_id)
            if isinstance(self._ended.get(step_id), StepResult):
                raise _already_updated(step_id, "abort")
        if step is None:
            return
        if step_id is not None and step_id != step.step_id:
            raise RuntimeError(
                f"abort(): got step {step_id!r}, which is not open; step {step.step_id!r} is"
            )
        if step.committed:
            raise _already_updated(step.step_id, "abort")
        try:
            step.announce_abort()
        finally:
            self._partially_updated = self._partially_updated or step.partially_updated
            self._backend.restore()
            self._end(step.step_id, "it was aborted")

    def _make_groups(self) -> None:
        if dist.is_initialized():
            control_group(self.deadline_s)
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

    def _open_step(self, step_id: str, call: str) -> OpenStep:
        if self._open is not None and self._open.step_id == step_id:
            return self._open
        if step_id in self._ended:
            ended = self._ended[step_id]
            end = ended if isinstance(ended, str) else "it was finished"
            raise RuntimeError(f"{call}(): step {step_id!r} is not open, {end}; begin() a new one")
        open_step_text = "no step is" if self._open is None else f"step {self._open.step_id!r} is"
        raise RuntimeError(
            f"{call}(): step {step_id!r} is not open, {open_step_text}; begin() it first"
        )

    def _refuse_failed(self, step: OpenStep, call: str) -> None:
        if step.committed:
            raise _already_updated(step.step_id, call)
        if step.failure is not None or step.peers_wait:
            failure = step.failure or "it was interrupted"
            raise RuntimeError(f"{call}(): step {step.step_id!r} has failed: {failure}; abort() it")
        refuse_if_poisoned()

    def _end(self, step_id: str, end: StepResult | str) -> None:
        self._open = None
        self._ended[step_id] = end
        while len(self._ended) > _REMEMBERED_STEPS:
            del self._ended[next(iter(self._ended))]


def _argument_of_step(step: OpenStep, name: str, value: Any) -> Any:
    """Return the value of the argument `name`, which `begin()` or `finish()` takes; `value` is what
    `finish()` was given. Raise `ValueError` if both were given one, and the two differ.
    """
    begin_value = step.begun_with[name]
    if value is None or begin_value is None:
        return begin_value if value is None else value
    if value != begin_value:
        raise ValueError(
            f"finish() got {name}={value!r}, and begin() {begin_value!r}: give it once, or the same"
        )
    return value


def _already_updated(step_id: str, call: str) -> RuntimeError:
    """Return the error for a call other than `finish` after all ranks have updated in the step."""
    return RuntimeError(
        f"{call}(): all ranks have updated in step {step_id!r}; finish() it again for its result"
    )
