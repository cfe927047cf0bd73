"""Runs the calls that ranks make together in an open step, after they agree on what each has."""

from __future__ import annotations

import math
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
from megatron_idempotent.window.open_contexts import close_contexts

from .backend import Backend
from .loss import StepLoss
from .messages import (
    Doing,
    LocalFailure,
    RankStatus,
    all_gather_status,
    begun_alike,
    failures,
    stop,
)
from .microbatches import calls, differing_replicas, list_shape, spec
from .pieces import Piece
from .records import Options
from .results import Reported, Row


class Rounds:
    """Agrees with the other ranks of a step, and runs the calls that they make together.

    `failure` is what stops the step, None if nothing does; `known` is True if all ranks know of it.
    """

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
        # Sequences of this rank so far.
        self._batch_rows = 0
        # What ranks have to have in common. The normalizers of metrics are told in `finish` alone,
        # which tells of metrics anyway.
        alike = {
            "kind": self._loss.kind,
            "global_batch_size": begun_with["global_batch_size"],
            "divisor": told_divisor(begun_with["divisor"]),
            "non_finite": options.non_finite,
            "nothing_valid": options.nothing_valid,
            "max_tokens_per_microbatch": begun_with["max_tokens_per_microbatch"],
            **backend.must_agree,
        }
        self._begun = {name: repr(value) for name, value in alike.items()}
        # Ids of different tenants may be equal, and ranks tell each other which step they are in.
        self._told_id = step_id if options.tenant is None else f"{options.tenant}: {step_id}"
        self._shift: int | None = None

    def _meet(
        self,
        doing: Doing,
        lists: Sequence[Sequence[Piece]],
        bad: Exception | None,
        group: Any,
        *,
        uneven: bool = False,
        bins: int = 0,
    ) -> list[RankStatus]:
        """Tell the group what this rank is about to run, and raise if any rank cannot run its part.

        If ranks may have an `uneven` number of microbatches, also tell what this rank's look like.
        """
        say = self._say(
            doing,
            failure=None if bad is None else describe(bad),
            replica=self._backend.replica,
            begun=self._begun,
            bins=bins,
            shift=self._shift_for(lists),
            lists=tuple(map(list_shape, lists)),
            specs=tuple((spec(each[0].batch), each[0].shape) for each in lists) if uneven else (),
        )
        self.owes = True
        said = self._hear(say, group)
        found = failures(said, group)
        differing = differing_replicas(said)
        if differing and not found:
            found = {0: differing}
        self.owes = not found
        elsewhere = any(each.doing == "abort" or each.step_id != self._told_id for each in said)
        if elsewhere or not begun_alike(said):
            self._fail("; ".join(found.values()), known=group is None)
            stop(found, "No rank has run this batch; abort() the step.", bad)
        stop(found, "No rank has run this batch; the step is as it was.", bad)
        self._agree_on_shift([each.shift for each in said])
        return said

    def _shift_for(self, lists: Sequence[Sequence[Piece]]) -> int | None:
        """Return the exponent of the least power of two not below the terms of a replica's sum.

        Divided by that, gradients are no larger than those of a mean. It is chosen once in a step,
        with the first batch, because gradients of all batches are added up; it grows with the
        batches only if `begin` was not told how large the step will be.
        """
        known = self.begun_with["global_batch_size"] or 0
        if not lists or not self._backend.narrow or (known and self._shift is not None):
            return self._shift
        pieces = [piece for each in lists for piece in each]
        here = sum(piece.sequences for piece in pieces)
        sequences = max(
            -(-known // self._backend.replicas),
            self.begun_with["rank_batch_size"] or 0,
            here if known else self._batch_rows + here,
        )
        number = sequences
        if self._loss.kind == "none":  # divided already, but for what begin() was told
            divisor = self.begun_with["divisor"]
            if not callable(divisor):
                number = math.ceil((divisor or 1) / self._backend.replicas)
        if self._loss.kind == "token":  # about as many tokens in each as in those of this batch
            number *= -(-sum(piece.positions for piece in pieces) // max(here, 1))
        return max(int(max(number, 1) - 1).bit_length(), self._shift or 0)

    def _agree_on_shift(self, shifts: Iterable[int | None]) -> None:
        """Take the largest exponent of all ranks in the agreement, whose gradients add up."""
        largest = max((shift for shift in shifts if shift is not None), default=None)
        if largest is not None and largest != self._shift:
            self._shift = largest
            self._backend.divide_losses(largest)

    def _say(self, doing: Doing, **more: Any) -> RankStatus:
        return RankStatus(doing=doing, step_id=self._told_id, updates=self._updates, **more)

    def _hear(self, say: RankStatus, group: Any = None) -> list[RankStatus]:
        try:
            return all_gather_status(say, self._deadline_s, group)
        except BaseException:
            # Nobody listens any more, or all know; unless it had not begun.
            self.known = self.known or (group is None and is_poisoned())
            raise

    @contextmanager
    def _failing(self, *, unless: type[BaseException] | tuple[()] = ()) -> Iterator[None]:
        """Note that the step has failed if the block raises anything but `unless`."""
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

    def _run(
        self, lists: Sequence[Sequence[Piece]], said: list[RankStatus], release: bool
    ) -> tuple[int, list[Reported]]:
        """Run forward and backward; return the number of this rank's own microbatches and reports.

        Reports, one per microbatch, are empty if this rank does not have the loss.
        """
        self.owes = bool(said) or release
        try:
            done = self._run_calls(lists, said, release)
        except LocalFailure as carried:
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
        return done

    def _run_calls(
        self, lists: Sequence[Sequence[Piece]], said: list[RankStatus], release: bool
    ) -> tuple[int, list[Reported]]:
        self._agree_on_shift([self._shift_for(lists)])
        plan = list(calls(lists, said, self._backend.device))
        number = 0
        found: list[Reported] = []
        for index, (pieces, ghosts) in enumerate(plan):
            reduce = release and index == len(plan) - 1
            here = self._backend.run(pieces, self._loss, reduce=reduce, ghosts=ghosts)
            if not ghosts:
                found += here
                number += len(pieces)
        self._rows += [each.row for each in found]
        return number, found


def told_divisor(divisor: Any) -> str:
    """Describe a divisor for a comparison between ranks, which cannot compare functions."""
    return "a function" if callable(divisor) else repr(divisor)
