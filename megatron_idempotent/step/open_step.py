"""One open step on this rank: what is added to it, and how it ends on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_idempotent.ranks.agreement import (
    SessionPoisoned,
    WindowAborted,
    describe,
    is_poisoned,
    poison,
)
from megatron_idempotent.window.open_contexts import close_contexts

from .backend import Backend, Update, result_of
from .messages import (
    Doing,
    LocalFailure,
    RankStatus,
    all_gather_status,
    begun_alike,
    failures,
    stop,
)
from .microbatches import calls, differing_replicas, list_shape, rows_of, spec, split
from .pieces import Piece, ready_pieces, valid_counts
from .records import Batch, Options, Receipt, StepLoss, StepResult
from .totals import Row, Totals, as_numbers


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
        lists: list[list[Piece]],
        bad: ValueError | None,
        group: Any,
        *,
        uneven: bool = False,
    ) -> list[RankStatus]:
        """Tell the group what this rank is about to run, and hear whether anybody cannot.

        If ranks may have an `uneven` number of microbatches, also what theirs look like.
        """
        say = self._say(
            doing,
            failure=None if bad is None else describe(bad),
            replica=self._backend.replica,
            begun=self._begun,
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
        elsewhere = any(each.doing == "abort" or each.step_id != self.step_id for each in said)
        if elsewhere or not begun_alike(said):
            self._fail("; ".join(found.values()), known=group is None)
            stop(found, "No rank has run this batch; abort() the step.", bad)
        stop(found, "No rank has run this batch; the step is as it was.", bad)
        self._agree_on_shift([each.shift for each in said])
        return said

    def _shift_for(self, lists: Sequence[Sequence[Piece]]) -> int | None:
        """Return the exponent of the least power of two not below what a replica's sum is over.

        Divided by that, gradients are no larger than those of a mean. It is chosen once in a step,
        with the first batch, because gradients of all batches are added up.
        """
        if self._shift is not None or not lists or not self._backend.narrow:
            return self._shift
        pieces = [piece for each in lists for piece in each]
        here = sum(piece.sequences for piece in pieces)
        sequences = max(
            -(-self.begun_with["global_batch_size"] // self._backend.replicas),
            self.begun_with["rank_batch_size"] or 0,
            here,
        )
        number = sequences
        if self._loss.kind == "token":  # about as many tokens in each as in those of this batch
            number *= -(-sum(piece.positions for piece in pieces) // max(here, 1))
        return int(max(number, 1) - 1).bit_length()

    def _agree_on_shift(self, shifts: Iterable[int | None]) -> None:
        """Take the largest: gradients of all ranks that hear of it are added up."""
        largest = max((shift for shift in shifts if shift is not None), default=None)
        if largest is not None and largest != self._shift:
            self._shift = largest
            self._backend.divide_losses(largest)

    def _say(self, doing: Doing, **more: Any) -> RankStatus:
        return RankStatus(doing=doing, step_id=self.step_id, updates=self._updates, **more)

    def _hear(self, say: RankStatus, group: Any = None) -> list[RankStatus]:
        try:
            return all_gather_status(say, self._deadline_s, group)
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

    def _run(self, lists: list[list[Piece]], said: list[RankStatus], release: bool) -> int:
        """Forward and backward; how many microbatches were this rank's own."""
        self.owes = bool(said) or release
        try:
            number = self._run_calls(lists, said, release)
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
        return number

    def _run_calls(self, lists: list[list[Piece]], said: list[RankStatus], release: bool) -> int:
        self._agree_on_shift([self._shift_for(lists)])
        plan = list(calls(lists, said, self._backend.device))
        number = 0
        for index, (pieces, ghosts) in enumerate(plan):
            reduce = release and index == len(plan) - 1
            rows = self._backend.run(pieces, self._loss, reduce=reduce, ghosts=ghosts)
            if not ghosts:
                self._rows += rows
                number += len(pieces)
        return number


class OpenStep(Turns):
    """A step that has begun and not ended."""

    def __init__(self, *as_turns: Any) -> None:
        super().__init__(*as_turns)
        self.receipts: dict[str, Receipt] = {}
        self.last = False
        # On the device until the end, so that counting never waits for it.
        self._counts: list[torch.Tensor] = []
        self._batch_rows = 0
        self._microbatches = 0
        self._updating = False
        # Learning rate and weight decay of the step, on all ranks alike.
        self._rates = 0.0, 0.0
        # What this rank has done, and what all ranks have said of that.
        self._done: tuple[Totals, Update | str] | None = None
        self._votes: list[RankStatus] | None = None

    def add(
        self, batch: Batch | None, ready: Sequence[Any] | None, last: bool, name: str
    ) -> Receipt:
        """Run a batch, after ranks that would wait for each other agree on what it is."""
        coupled, group = self._backend.lockstep_group()
        rows = 0
        lists: list[list[Piece]] = []
        counts: list[torch.Tensor] = []
        bad: ValueError | None = None
        try:
            rows, lists, counts = self._cut(batch, ready)
            last = self._is_last(rows) or last
            self._backend.accept(lists)
        except ValueError as error:
            if not coupled:
                raise
            rows, lists, counts, bad = 0, [], [], error
        said: list[RankStatus] = []
        release = False
        with self._failing(unless=WindowAborted):
            if last:
                # A peer in its first forward waits for this, and is not yet where ranks meet.
                self._backend.join(wait=False)
            if coupled:
                doing: Doing = "last" if last else "chunk"
                said = self._meet(doing, lists, bad, group, uneven=group is None)
                release = last and group is None and all(say.doing == "last" for say in said)
            if last and (group is not None or not coupled):
                everybody = self._meet("last", lists, None, None)
                release = all(say.doing == "last" and say.lists for say in everybody)
        with self._failing():
            number = self._run(lists, said, release)
            self._counts += counts
            self._batch_rows += rows
            self._microbatches += number
            self.last = last
            self.receipts[name] = Receipt(microbatch_id=name, rows=rows, microbatches=number)
        return self.receipts[name]

    def _cut(
        self, batch: Batch | None, ready: Sequence[Any] | None
    ) -> tuple[int, list[list[Piece]], list[torch.Tensor]]:
        """Sequences, the microbatches of each call, and what is valid in them."""
        if ready is not None:
            if batch is not None:
                raise ValueError(
                    "microbatch() got a batch and microbatches: pass rows to be cut, or a list of "
                    "microbatches that are run as they are"
                )
            pieces = ready_pieces(ready, self._options)
            sequences = sum(piece.sequences for piece in pieces)
            counts = [piece.counts for piece in pieces if piece.counts is not None]
            return sequences, [pieces] if pieces else [], counts
        rows = 0 if batch is None else rows_of(batch, self._options.shared)
        if batch is None or not rows:
            return 0, [], []
        size = self.begun_with["micro_batch_size"]
        if size is None:
            raise ValueError(
                f"microbatch() got {rows} rows, and begin() no micro_batch_size to cut them by: "
                "begin with one, or pass microbatches=[…]"
            )
        lists = split(batch, rows, size, self._options.shared)
        return rows, lists, [valid_counts(batch)]

    def _is_last(self, rows: int) -> bool:
        whole = self.begun_with["rank_batch_size"]
        after = self._batch_rows + rows
        if whole is not None and after > whole:
            raise ValueError(
                f"microbatch() got {rows} rows, after {self._batch_rows} of rank_batch_size="
                f"{whole}: begin() with the true number, or without it"
            )
        return bool(rows) and after == whole

    def finish(self) -> StepResult:
        """Agree that nothing failed, then update; after that, only tell what was done."""
        if not self.committed:
            with self._failing(unless=WindowAborted):
                totals, local = self._totals()
                reason = self._reason_to_skip(totals)
                if reason is None:
                    self._update(totals, local)
                else:
                    self._done, self._votes = (totals, reason), []
        assert self._done is not None
        totals, update = self._done
        if isinstance(update, str):
            self._backend.skip()
        return result_of(
            self.step_id,
            totals,
            update,
            self._rates,
            own_microbatches=self._microbatches,
        )

    @property
    def committed(self) -> bool:
        """True once all ranks have updated, so that there is no way back.

        It holds from the moment in which they said so; an exception right after changes nothing.
        """
        return self._votes is not None and not failures(self._votes)

    @property
    def partially_updated(self) -> bool:
        """True if an update was left half-way on any rank, without a copy to go back to."""
        if self._votes is None:
            return self._backend.partially_updated
        return not self.committed and any(vote.partially_updated for vote in self._votes)

    @property
    def updates(self) -> int:
        """Updates of all steps so far, this one's included."""
        done = self._done is not None and isinstance(self._done[1], Update)
        return self._updates + (done and self.committed)

    def tell_of_abort(self) -> None:
        """Have the peers stop too, unless they know."""
        if self.owes and not is_poisoned():
            self._fail("it was interrupted on its way into a batch")
            poison(f"a batch of step {self.step_id!r} was left before it was run")
        if self.known or self._votes is not None:
            return
        poisoned = is_poisoned()
        try:
            # In an update all of that is over, and the next gathers are those of its result.
            if not poisoned and not self._updating:
                self._backend.join()
            say = self._say("abort", failure=self.failure, poisoned=poisoned)
            said = self._hear(say)
            ours = "abort", self.failure
            if any(each.doing == "updated" for each in said) or (
                self._updating and any((each.doing, each.failure) != ours for each in said)
            ):
                raise poison(f"the update of step {self.step_id!r} was left on some ranks only")
        except SessionPoisoned:
            if self.failure is None:
                raise
        except RuntimeError as lost:  # of a gather that a peer has not joined
            poisoned_now = poison(f"step {self.step_id!r} was aborted by {describe(lost)}")
            if self.failure is None:
                raise poisoned_now from lost

    def _totals(self) -> tuple[Totals, float]:
        """Gathers what all ranks have run, once all of them are at the end of the step."""
        error: Exception | None = None
        local = (0.0, 0.0)
        rows: tuple[dict[str, float], ...] = ()
        try:
            self._backend.join()
            self._backend.check_gradients()
            if self._counts:
                # What was given as numbers is on the host, all else on the device.
                device = self._backend.device
                valid = torch.zeros(2, dtype=torch.float64, device=device)
                for each in self._counts:
                    valid += each.to(device, non_blocking=True)
                sequences, tokens = valid.tolist()
                local = sequences, tokens
            rows = as_numbers(self._rows)
        except Exception as caught:  # noqa: BLE001  told to all ranks, and raised on all
            error = caught
        coupled, group = self._backend.lockstep_group()
        reports = self._backend.is_reporting_rank
        say = self._say(
            "finish",
            failure=None if error is None else describe(error),
            begun={
                **self._begun,
                "normalizers": repr(dict(sorted(self._loss.normalizers.items()))),
            },
            replica=self._backend.replica,
            shift=self._shift,
            counts=local if reports else (0.0, 0.0),
            rows=rows if reports else (),
            rates=self._backend.rates(),
        )
        while True:
            self.owes = coupled and group is None
            said = self._hear(say)
            found = failures(said)
            if found:
                self.owes = False
                self._fail("; ".join(found.values()), known=True)
                stop(found, _NOT_UPDATED, error)
            self._agree_on_shift([each.shift for each in said])
            if all(each.doing == "finish" for each in said):
                self.owes = False
                break
            if coupled and group is None:
                # Others still have data, and meet this rank inside of the model.
                self._run([], said, release=False)
        told = [each.rates for each in (say, *said) if each.rates is not None]
        self._rates = told[0] if told else (0.0, 0.0)
        every_row = [
            (rank, each.replica, row) for rank, each in enumerate(said) for row in each.rows
        ]
        totals = Totals(self._loss, [each.counts for each in said], every_row)
        return totals, local[self._loss.kind == "token"]

    def _reason_to_skip(self, totals: Totals) -> str | None:
        """Decide, as all ranks do, whether there is nothing that could be reduced.

        Raises:
            WindowAborted: a loss is not finite, and that is to be refused.
        """
        if not totals.normalizer:
            return f"no valid {self._loss.kind} on any rank"
        if self._options.non_finite == "update" or self._backend.lowers_scale:
            return None
        bad = totals.bad_losses()
        if bad and self._options.non_finite == "refuse":
            self._fail("; ".join(bad.values()), known=True)
            stop(bad, _NOT_UPDATED, None)
        told = "; ".join(f"rank {rank}: {text}" for rank, text in bad.items())
        return f"{told}, and non_finite='skip'" if bad else None

    def _update(self, totals: Totals, local: float) -> None:
        error: BaseException | None = None
        update: Update | None = None
        increment = self.begun_with["global_batch_size"]
        self._updating = True
        try:
            # Half, so that a rank whose peer has failed still meets it below.
            update = self._backend.update(totals, local, increment, self._deadline_s / 2)
        except BaseException as caught:  # noqa: BLE001  told to all ranks, and raised on all
            error = caught
        failure = None if error is None else describe(error)
        vote = self._say(
            "updated", failure=failure, partially_updated=self._backend.partially_updated
        )
        if update is not None:
            self._done = totals, update
        self._votes = self._hear(vote)
        found = failures(self._votes)
        if found:
            self._fail("; ".join(found.values()), known=True)
            self._raise_failed_update(self._votes, found, error)

    def _raise_failed_update(
        self, said: list[RankStatus], found: dict[int, str], error: BaseException | None
    ) -> None:
        how = _TORN if self.partially_updated else "All ranks can go back: abort() the step."
        if len({say.failure for say in said}) > 1:
            # A rank left collectives that the others were in, or have started since.
            told = "; ".join(f"rank {rank}: {text}" for rank, text in found.items())
            poisoned = poison(f"a step was left in its update: {told}. {how}")
            if error is None or isinstance(error, Exception):
                raise poisoned from error
        if error is not None and not isinstance(error, Exception):
            raise error
        stop(found, how, error)


_NOT_UPDATED = "No rank has updated its parameters; abort() the step."

_TORN = (
    "The update had begun on some rank, which keeps no copy to go back to: abort() the step, load "
    "a checkpoint and make a new TrainStep, or make it with undo=True from the start."
)
