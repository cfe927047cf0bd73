"""Runs the part of an open step in which other ranks may wait for this one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_idempotent.window.agreement import (
    SessionPoisoned,
    WindowAborted,
    describe,
    is_poisoned,
    poison,
)
from megatron_idempotent.window.left_open import close_contexts

from .backend import Backend
from .batch import spec
from .plan import calls, differing_replicas
from .records import TOKENS, Batch, Options, StepLoss
from .talk import Carried, Doing, Say, begun_alike, failures, hear, stop
from .totals import Row


class Turns:
    """Agreements and calls of one step. `failure` is what stops it, `known` to all or not yet."""

    def __init__(
        self,
        backend: Backend,
        step_id: str,
        begun_with: Mapping[str, Any],
        options: Options,
        updates: int,
    ) -> None:
        self.step_id = step_id
        self.begun_with = begun_with
        self.failure: str | None = None
        self.known = False
        self.owes = False
        """True if peers may be in a batch that this rank has agreed to run with them.

        It is set before the agreement, because an interrupt may come right after it.
        """
        self._backend = backend
        self._options = options
        self._deadline_s = options.deadline_s
        self._updates = updates
        self._loss: StepLoss = begun_with["loss"]
        self._rows: list[Row] = []
        # What ranks have to have in common. The normalizers of metrics are told in `finish` alone,
        # which tells of metrics anyway.
        alike = {
            "kind": self._loss.kind,
            "global_batch_size": begun_with["global_batch_size"],
            "non_finite": options.non_finite,
            **backend.must_agree,
        }
        self._begun = {name: repr(value) for name, value in alike.items()}
        self._shift: int | None = None

    def _meet(
        self,
        doing: Doing,
        lists: list[list[Batch]],
        bad: ValueError | None,
        group: Any,
        *,
        uneven: bool = False,
    ) -> list[Say]:
        """Tell the group what this rank is about to run, and hear whether anybody cannot.

        If ranks may have an `uneven` number of microbatches, also what theirs look like.
        """
        say = self._say(
            doing,
            failure=None if bad is None else describe(bad),
            replica=self._backend.replica,
            begun=self._begun,
            shift=self._shift_for(lists),
            lists=tuple((len(each), *each[0][TOKENS].shape[:2]) for each in lists),
            specs=tuple(spec(each[0]) for each in lists) if uneven else (),
        )
        self.owes = True
        said = self._hear(say, group)
        found = failures(said, group)
        differing = differing_replicas(said)
        if differing and not found:
            found = {0: differing}
        self.owes = not found
        elsewhere = any(each.doing == "abort" or each.step_id != self.step_id for each in said)
        if elsewhere or not begun_alike(said):
            self._fail("; ".join(found.values()), known=group is None)
            stop(found, "No rank has run this batch; abort() the step.", bad)
        stop(found, "No rank has run this batch; the step is as it was.", bad)
        self._agree_on_shift([each.shift for each in said])
        return said

    def _shift_for(self, lists: Sequence[Sequence[Batch]]) -> int | None:
        """Return the exponent of the least power of two not below what a replica's sum is over.

        Divided by that, gradients are no larger than those of a mean. It is chosen once in a step,
        with the first batch, because gradients of all batches are added up.
        """
        if self._shift is not None or not lists or not self._backend.narrow:
            return self._shift
        tokens_BT = lists[0][0][TOKENS]
        rows = max(
            -(-self.begun_with["global_batch_size"] // self._backend.replicas),
            self.begun_with["rank_batch_size"] or 0,
            sum(len(each[TOKENS]) for microbatches in lists for each in microbatches),
        )
        number = rows * tokens_BT.shape[1] if self._loss.kind == "token" else rows
        return int(number - 1).bit_length()

    def _agree_on_shift(self, shifts: Iterable[int | None]) -> None:
        """Take the largest: gradients of all ranks that hear of it are added up."""
        largest = max((shift for shift in shifts if shift is not None), default=None)
        if largest is not None and largest != self._shift:
            self._shift = largest
            self._backend.divide_losses(largest)

    def _say(self, doing: Doing, **more: Any) -> Say:
        return Say(doing=doing, step_id=self.step_id, updates=self._updates, **more)

    def _hear(self, say: Say, group: Any = None) -> list[Say]:
        try:
            return hear(say, self._deadline_s, group)
        except BaseException:
            # Nobody listens any more, or all know; unless it had not begun.
            self.known = self.known or (group is None and is_poisoned())
            raise

    @contextmanager
    def _failing(self, *, unless: type[BaseException] | tuple[()] = ()) -> Iterator[None]:
        """The step has failed where the block raises, whatever it is."""
        try:
            yield
        except unless:
            raise  # all who would wait for this rank have stopped as well
        except BaseException as error:
            close_contexts(error)
            self._fail(describe(error))
            raise

    def _fail(self, failure: str, *, known: bool = False) -> None:
        self.failure = self.failure or failure
        self.known = self.known or known

    def _run(self, lists: list[list[Batch]], said: list[Say], release: bool) -> int:
        """Forward and backward; how many microbatches were this rank's own."""
        self.owes = bool(said) or release
        try:
            number = self._run_calls(lists, said, release)
        except Carried as carried:
            self.owes = False
            raise carried.error from None
        except (WindowAborted, SessionPoisoned):
            self.owes = False
            raise
        except BaseException as error:
            if self.owes:
                # The others have begun, and wait for this rank.
                poisoned = poison(f"a batch was left by {describe(error)}")
                if isinstance(error, Exception):
                    raise poisoned from error
            raise
        self.owes = False
        return number

    def _run_calls(self, lists: list[list[Batch]], said: list[Say], release: bool) -> int:
        self._agree_on_shift([self._shift_for(lists)])
        plan = list(calls(lists, said, self._backend.device))
        number = 0
        for index, (microbatches, ghosts) in enumerate(plan):
            reduce = release and index == len(plan) - 1
            rows = self._backend.run(microbatches, self._loss, reduce=reduce, ghosts=ghosts)
            if not ghosts:
                self._rows += rows
                number += len(microbatches)
        return number
