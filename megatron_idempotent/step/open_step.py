"""One open step on this rank: what is added to it, and how it ends on all ranks alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron_idempotent.window.agreement import (
    SessionPoisoned,
    WindowAborted,
    describe,
    is_poisoned,
    poison,
)

from .backend import Backend, Update
from .batch import rows_of, spec, split, valid_counts
from .outcome import result_of
from .plan import calls, differing_replicas
from .records import Batch, Receipt, StepLoss, StepResult
from .talk import Carried, Doing, Say, failures, hear, stop
from .totals import Row, Totals, as_numbers


class OpenStep:
    """A step that has begun and not ended. `failure` is what stops it, `known` to all or not."""

    def __init__(
        self, backend: Backend, step_id: str, begun_with: Mapping[str, Any], deadline_s: float
    ) -> None:
        self.step_id = step_id
        self.begun_with = begun_with
        self.receipts: dict[str, Receipt] = {}
        self.failure: str | None = None
        self.known = False
        self.torn = False
        self.last = False
        self._backend = backend
        self._deadline_s = deadline_s
        self._loss: StepLoss = begun_with["loss"]
        self._rows: list[Row] = []
        # On the device until the end, so that counting never waits for it.
        self._counts: list[Any] = []
        self._batch_rows = 0
        self._microbatches = 0
        self._done: tuple[Totals, Update | None, int] | None = None

    def add(self, batch: Batch | None, last: bool, name: str) -> Receipt:
        """Run a batch, after ranks that would wait for each other agree on what it is."""
        coupled, group = self._backend.coupled(self._deadline_s)
        rows, lists, bad = 0, [], None
        try:
            rows = 0 if batch is None else rows_of(batch)
            last = self._is_last(rows) or last
            if batch is not None and rows:
                lists = split(batch, rows, self.begun_with["micro_batch_size"])
                self._backend.accept(lists)
        except ValueError as error:
            if not coupled:
                raise
            rows, lists, bad = 0, [], error
        said: list[Say] = []
        release = False
        with self._failing(unless=WindowAborted):
            if coupled:
                said = self._meet("last" if last else "chunk", lists, bad, group)
                release = last and group is None and all(say.doing == "last" for say in said)
            if last and (group is not None or not coupled):
                everybody = self._meet("last", lists, None, None)
                release = all(say.doing == "last" and say.lists for say in everybody)
        with self._failing():
            number = self._run(lists, said, release)
            if batch is not None and rows:
                self._counts.append(valid_counts(batch))
            self._batch_rows += rows
            self._microbatches += number
            self.last = last
            self.receipts[name] = Receipt(microbatch_id=name, rows=rows, microbatches=number)
        return self.receipts[name]

    def finish(self) -> StepResult:
        """Agree that nothing failed, then update; after that, only tell what was done."""
        if self._done is None:
            with self._failing(unless=WindowAborted):
                totals, local, microbatches = self._totals()
                update = None
                if totals.normalizer:
                    update = self._update(totals, local)
                else:
                    self._backend.skip()
                self._done = totals, update, microbatches
        totals, update, microbatches = self._done
        return result_of(
            self.step_id,
            self._loss.kind,
            totals,
            update,
            self._backend.rates(),
            microbatches=microbatches,
            own_microbatches=self._microbatches,
        )

    @property
    def committed(self) -> bool:
        """Whether all ranks have updated, so that there is no way back."""
        return self._done is not None

    def tell_of_abort(self) -> None:
        """Have the peers stop too, unless they know."""
        if self.known:
            return
        poisoned = is_poisoned()
        try:
            if not poisoned:
                self._backend.join()
            say = Say(doing="abort", step_id=self.step_id, failure=self.failure, poisoned=poisoned)
            self._hear(say)
        except SessionPoisoned:
            if self.failure is None:
                raise

    def _is_last(self, rows: int) -> bool:
        whole = self.begun_with["rank_batch_size"]
        after = self._batch_rows + rows
        if whole is not None and after > whole:
            raise ValueError(
                f"microbatch() got {rows} rows, after {self._batch_rows} of rank_batch_size="
                f"{whole}: begin() with the true number, or without it"
            )
        return bool(rows) and after == whole

    def _meet(
        self, doing: Doing, lists: list[list[Batch]], bad: ValueError | None, group: Any
    ) -> list[Say]:
        """Tell the group what this rank is about to run, and hear whether anybody cannot."""
        say = Say(
            doing=doing,
            step_id=self.step_id,
            failure=None if bad is None else describe(bad),
            replica=self._backend.replica,
            lists=tuple((len(each), *each[0]["input_ids"].shape[:2]) for each in lists),
            specs=tuple(spec(each[0]) for each in lists),
        )
        said = self._hear(say, group)
        found = failures(said)
        differing = differing_replicas(said)
        if differing and not found:
            found = {0: differing}
        if any(each.doing == "abort" or each.step_id != self.step_id for each in said):
            self._fail("; ".join(found.values()), known=group is None)
        stop(found, "No rank has run this batch; the step is as it was.", bad)
        return said

    def _hear(self, say: Say, group: Any = None) -> list[Say]:
        try:
            return hear(say, self._deadline_s, group)
        except BaseException:
            # Nobody listens any more, or all know.
            self.known = self.known or group is None
            raise

    @contextmanager
    def _failing(self, *, unless: type[BaseException] | tuple[()] = ()) -> Iterator[None]:
        """The step has failed where the block raises, whatever it is."""
        try:
            yield
        except unless:
            raise  # all who would wait for this rank have stopped as well
        except BaseException as error:
            self._fail(describe(error))
            raise

    def _fail(self, failure: str, *, known: bool = False) -> None:
        self.failure = self.failure or failure
        self.known = self.known or known

    def _run(self, lists: list[list[Batch]], said: list[Say], release: bool) -> int:
        """Forward and backward; how many microbatches were this rank's own."""
        try:
            return self._run_calls(lists, said, release)
        except Carried as carried:
            raise carried.error from None
        except (WindowAborted, SessionPoisoned):
            raise
        except BaseException as error:
            if said or release:
                # The others have begun, and wait for this rank.
                poisoned = poison(f"a batch was left by {describe(error)}")
                if isinstance(error, Exception):
                    raise poisoned from error
            raise

    def _run_calls(self, lists: list[list[Batch]], said: list[Say], release: bool) -> int:
        plan = list(calls(lists, said, self._backend.device))
        number = 0
        for index, (microbatches, ghosts) in enumerate(plan):
            reduce = release and index == len(plan) - 1
            rows = self._backend.run(microbatches, self._loss, reduce=reduce, ghosts=ghosts)
            if not ghosts:
                self._rows += rows
                number += len(microbatches)
        return number

    def _totals(self) -> tuple[Totals, float, int]:
        """What all ranks have run, once all of them have come to the end."""
        error: Exception | None = None
        local = (0.0, 0.0)
        rows: tuple[dict[str, float], ...] = ()
        try:
            self._backend.join()
            self._backend.check_gradients()
            if self._counts:
                sequences, tokens = sum(self._counts).tolist()
                local = sequences, tokens
            rows = as_numbers(self._rows)
        except Exception as caught:  # noqa: BLE001  told to all ranks, and raised on all
            error = caught
        coupled, group = self._backend.coupled(self._deadline_s)
        while True:
            speaks = self._backend.speaks
            say = Say(
                doing="finish",
                step_id=self.step_id,
                failure=None if error is None else describe(error),
                replica=self._backend.replica,
                counts=local if speaks else (0.0, 0.0),
                rows=rows if speaks else (),
            )
            said = self._hear(say)
            found = failures(said)
            if found:
                self._fail("; ".join(found.values()), known=True)
                stop(found, "No rank has updated its parameters; abort() the step.", error)
            if all(each.doing == "finish" for each in said):
                break
            if coupled and group is None:
                # Others still have data, and meet this rank inside of the model.
                self._run([], said, release=False)
        every_row = [row for each in said for row in each.rows]
        totals = Totals(self._loss, [each.counts for each in said], every_row)
        return totals, local[self._loss.kind == "token"], len(every_row)

    def _update(self, totals: Totals, local: float) -> Update:
        error: BaseException | None = None
        update: Update | None = None
        increment = self.begun_with["global_batch_size"]
        try:
            # Half, so that a rank whose peer has failed still meets it below.
            update = self._backend.update(totals, local, increment, self._deadline_s / 2)
        except BaseException as caught:  # noqa: BLE001  told to all ranks, and raised on all
            error = caught
        self.torn = self._backend.torn
        say = Say(
            doing="updated",
            step_id=self.step_id,
            failure=None if error is None else describe(error),
            torn=self.torn,
        )
        said = self._hear(say)
        found = failures(said)
        if found:
            self._fail("; ".join(found.values()), known=True)
            self.torn = any(each.torn for each in said)
            self._raise_failed_update(said, found, error)
        self.torn = False
        assert update is not None
        return update

    def _raise_failed_update(
        self, said: list[Say], found: dict[int, str], error: BaseException | None
    ) -> None:
        how = _TORN if self.torn else "All ranks can go back: abort() the step."
        if len({say.failure for say in said}) > 1:
            # A rank left collectives that the others were in, or have started since.
            told = "; ".join(f"rank {rank}: {text}" for rank, text in found.items())
            poisoned = poison(f"a step was left in its update: {told}. {how}")
            if error is None or isinstance(error, Exception):
                raise poisoned from error
        if error is not None and not isinstance(error, Exception):
            raise error
        stop(found, how, error)


_TORN = (
    "The update had begun on some rank, which keeps no copy to go back to: abort() the step, load "
    "a checkpoint and make a new TrainStep, or make it with undo=True from the start."
)
