"""Adds batches to an open step on this rank, and ends the step on all ranks alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_idempotent.window.agreement import (
    SessionPoisoned,
    WindowAborted,
    describe,
    is_poisoned,
    poison,
)

from .loss import StepCounts, divided_by, returned_by
from .messages import Doing, RankStatus, failures, stop
from .microbatches import fingerprint, told_leaf
from .packed import PackedRows, packed_rows
from .records import Batch, check_id
from .results import Receipt, Reported, StepResult, Totals, Update, as_numbers, result_of
from .rounds import Rounds, told_divisor
from .share import Share, distinct, share_of


class OpenStep(Rounds):
    """Holds what this rank has run in a step that has begun and not ended."""

    def __init__(self, *as_rounds: Any) -> None:
        super().__init__(*as_rounds)
        self.receipts: dict[str, Receipt] = {}
        self._sent: dict[str, Mapping[str, Any]] = {}
        self.last = False
        # On the device until the end, so that counting never waits for it.
        self._counts: list[torch.Tensor] = []
        self._groups: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._batches = self._microbatches = 0
        self._updating = False
        # What is not finite in parameters, by global rank, as all ranks know it.
        self._bad_parameters: dict[int, str] = {}
        # Learning rate and weight decay of the step, on all ranks alike.
        self._rates = 0.0, 0.0
        # What this rank has done, and what all ranks have said of that.
        self._done: tuple[Totals, Update | str] | None = None
        self._votes: list[RankStatus] | None = None

    def add(
        self,
        batch: Batch | None,
        ready: Sequence[Any] | None,
        last: bool,
        microbatch_id: str | None,
    ) -> Receipt:
        """Run a batch, after the ranks that meet in the model have agreed on what each of them has.

        Raises what `SplitStep.microbatch` does.
        """
        coupled, group = self._backend.lockstep_group()
        share, packed = Share(), None
        sent: Mapping[str, Any] = {}
        bad: Exception | None = None
        try:
            if microbatch_id is not None:
                check_id(microbatch_id)
                sent = fingerprint(batch if ready is None else ready)
            packed = packed_rows(batch, ready, self.begun_with, self._options, self._backend)
            if packed is None:
                share = share_of(batch, ready, self.begun_with, self._options)
            else:
                share = packed.share(packed.bins)
            last = self._is_last(share.sequences) or last
            self._backend.accept(share.lists)
        except Exception as error:  # told to all ranks that wait for this one
            if not coupled:
                raise
            share, packed, bad = Share(), None, error
        said: list[RankStatus] = []
        release = False
        with self._failing(unless=WindowAborted):
            if last:
                # A peer in its first forward waits for this, and is not yet where ranks meet.
                self._backend.join(wait=False)
            doing: Doing = "last" if last else "chunk"
            if coupled and group is None and self.begun_with["max_tokens_per_microbatch"]:
                share = self._as_many_bins(doing, share, packed, bad)
            if coupled:
                said = self._meet(doing, share.lists, bad, group, uneven=group is None)
                release = last and group is None and all(say.doing == "last" for say in said)
            if last and (group is not None or not coupled):
                everybody = self._meet("last", share.lists, None, None)
                release = all(say.doing == "last" and say.lists for say in everybody)
        with self._failing():
            number, found = self._run(share.lists, said, release)
            self._counts += share.counts
            self._groups += share.groups
            self._batch_rows += share.sequences
            self._microbatches += number
            self.last = last
            receipt = self._receipt(microbatch_id, share, number, found)
            if microbatch_id is not None:  # else it cannot be sent again, and outputs may be large
                self.receipts[microbatch_id], self._sent[microbatch_id] = receipt, sent
            return receipt

    def repeated(self, microbatch_id: str, batch: Batch | None, ready: Any) -> Receipt:
        """Return the receipt of a batch that was sent before.

        Raises:
            ValueError: this batch is another one.
        """
        before, now = self._sent[microbatch_id], fingerprint(batch if ready is None else ready)
        for name in (*before, *now):
            there, here = told_leaf(before.get(name)), told_leaf(now.get(name))
            if there != here:
                raise ValueError(
                    f"microbatch() got microbatch_id={microbatch_id!r} again, and another batch: "
                    f"its {name} is {here}, and was {there}. Send the batch of the first time, or "
                    "take another id"
                )
        return self.receipts[microbatch_id]

    def _as_many_bins(
        self, doing: Doing, share: Share, packed: PackedRows | None, bad: Exception | None
    ) -> Share:
        """Agree on a number of packs, so that ranks need no dummies in a model that all share.

        Ranks with fewer packs make smaller ones, down to one sequence each. All ranks take part.
        """
        said = self._meet(doing, [], bad, None, bins=0 if packed is None else packed.bins)
        most = max(say.bins for say in said)
        return share if packed is None or most == packed.bins else packed.share(most)

    def _receipt(
        self, microbatch_id: str | None, share: Share, number: int, found: Sequence[Reported]
    ) -> Receipt:
        receipt = Receipt(
            microbatch_id=f"#{self._batches}" if microbatch_id is None else microbatch_id,
            rows=share.sequences,
            microbatches=number,
            outputs={
                name: tuple(each for one in found for each in one.outputs[name])
                for name in (found[0].outputs if found else ())
            },
            reported=tuple(each.row for each in found),
        )
        self._batches += 1
        return receipt

    def _is_last(self, rows: int) -> bool:
        whole = self.begun_with["rank_batch_size"]
        after = self._batch_rows + rows
        if whole is not None and after > whole:
            raise ValueError(
                f"microbatch() got {rows} rows, after {self._batch_rows} of rank_batch_size="
                f"{whole}: begin() with the true number, or without it"
            )
        return bool(rows) and after == whole

    def finish(self, increment: int | None, lr: float | None, divisor: Any) -> StepResult:
        """Agree that no rank failed, then update; in a step that has updated, return the result."""
        if not self.committed:
            with self._failing(unless=WindowAborted):
                totals, local = self._totals(increment, lr, divisor)
                reason = self._reason_to_skip(totals)
                if reason is None:
                    self._update(totals, local, increment, lr)
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
            replica=self._backend.replica,
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
        """The number of updates in all steps so far, this one's included."""
        done = self._done is not None and isinstance(self._done[1], Update)
        return self._updates + (done and self.committed)

    def tell_of_abort(self) -> None:
        """Have the peers stop too, unless they know already. All ranks take part."""
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

    def _totals(
        self, increment: int | None, lr: float | None, divisor: Any
    ) -> tuple[Totals, float]:
        """Gather what all ranks have run, once all of them are at the end of the step.

        Returns the totals, and this replica's valid tokens or, for other kinds, sequences.
        """
        error: Exception | None = None
        local = (0.0, 0.0)
        rows: tuple[dict[str, float], ...] = ()
        groups: tuple[int, ...] = ()
        bad_parameter: str | None = None
        try:
            self._backend.join()
            self._backend.check_gradients()
            # What was given as numbers is on the host, all else on the device.
            device = self._backend.device
            facts = torch.zeros(3, dtype=torch.float64, device=device)
            for each in self._counts:
                facts[:2] += each.to(device, non_blocking=True)
            if self._options.non_finite != "update":
                facts[2] = self._backend.size_of_parameters()
            sequences, tokens, size = facts.tolist()
            local = sequences, tokens
            if math.isnan(sequences + tokens):
                raise self._doubt()
            if not math.isfinite(size):
                bad_parameter = self._backend.bad_parameter()
            groups = distinct(self._groups)
            rows = as_numbers(self._rows)
        except Exception as caught:  # noqa: BLE001  told to all ranks, and raised on all
            error = caught
        coupled, group = self._backend.lockstep_group()
        reports, has_losses = self._backend.is_reporting_rank, self._backend.has_losses
        say = self._say(
            "finish",
            failure=None if error is None else describe(error),
            begun={
                **self._begun,
                "normalizers": repr(dict(sorted(self._loss.normalizers.items()))),
                "context_parallel": repr(returned_by(self._loss)),
                "finish(global_batch_size)": repr(increment),
                "finish(lr)": repr(lr),
                "finish(divisor)": told_divisor(divisor),
            },
            replica=self._backend.replica,
            shift=self._shift,
            counts=local if reports else (0.0, 0.0),
            groups=groups if reports else (),
            rows=rows if has_losses else (),
            rates=self._backend.rates(),
            bad_parameter=bad_parameter,
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
        self._bad_parameters = {
            rank: each.bad_parameter for rank, each in enumerate(said) if each.bad_parameter
        }
        told = [each.rates for each in (say, *said) if each.rates is not None]
        rates = told[0] if told else (0.0, 0.0)
        self._rates = rates if lr is None else (lr, rates[1])
        every_row = [
            (rank, each.replica, row) for rank, each in enumerate(said) for row in each.rows
        ]
        totals = Totals(
            self._loss,
            [each.counts for each in said],
            every_row,
            [each.groups for each in said],
        )
        totals.divisor = self._agreed(divisor, totals.counts) if callable(divisor) else divisor
        return totals, local[self._loss.kind == "token"]

    def _doubt(self) -> ValueError:
        """Make the error for masks or counts on a device, which no call has looked at."""
        first = next(i for i, each in enumerate(self._counts) if each.isnan().any())
        return ValueError(
            f"count {first} of {len(self._counts)} (one for each batch of rows, and for each ready "
            "microbatch or pack) was taken of masks with another value than 0 and 1, or is no "
            "number from 0 on: mend the batch. The call names row and value if the masks are on "
            "the host"
        )

    def _agreed(self, divisor: Callable[[StepCounts], float], counts: StepCounts) -> float:
        """Call the divisor's function, and raise on all ranks unless all got the same number.

        This takes another gather: a function may look at what only one rank has, and parameters
        would differ between replicas that divide by different numbers.
        """
        error: Exception | None = None
        found = 0.0
        try:
            found = divided_by(divisor, counts)
        except Exception as caught:  # noqa: BLE001  told to all ranks, and raised on all
            error = caught
        failure = None if error is None else describe(error)
        said = self._hear(self._say("divide", failure=failure, begun={"divisor": repr(found)}))
        bad = failures(said)
        if bad:
            self._fail("; ".join(bad.values()), known=True)
            stop(bad, _NOT_UPDATED, error)
        return found

    def _reason_to_skip(self, totals: Totals) -> str | None:
        """Return the reason to skip the update, the same on all ranks; None if there is none.

        Raises:
            WindowAborted: a loss or a parameter is not finite, and the step refuses that.
        """
        if totals.is_empty and self._options.nothing_valid == "skip":
            kind = "" if self._loss.kind == "none" else f" {self._loss.kind}"
            return f"no valid{kind or ' microbatch'} on any rank"
        if self._options.non_finite == "update":
            return None
        # No lower scale mends a parameter, and it explains a loss.
        bad = {} if self._backend.lowers_scale else totals.bad_losses()
        bad |= self._bad_parameters
        if bad and self._options.non_finite == "refuse":
            self._fail("; ".join(bad.values()), known=True)
            stop(bad, _NOT_UPDATED, None)
        told = "; ".join(f"rank {rank}: {text}" for rank, text in bad.items())
        return f"{told}, and non_finite='skip'" if bad else None

    def _update(
        self, totals: Totals, local: float, increment: int | None, lr: float | None
    ) -> None:
        error: BaseException | None = None
        update: Update | None = None
        self._updating = True
        try:
            if lr is not None:
                self._backend.set_lr(lr)
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
