"""Holds a step that is open: its ranks tell each other what they have, and then run it together.

The messages go over the host, with a deadline, before any rank goes on: a rank that would go on
alone waits in a collective for ever, or trains on half of a step.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from megatron_idempotent.window.agreement import (
    SessionPoisoned,
    WindowAborted,
    control_group,
    describe,
    is_poisoned,
    poison,
)
from megatron_idempotent.window.open_contexts import close_contexts

from .loss import (
    Receipt,
    Reported,
    Row,
    StepCounts,
    StepLoss,
    StepResult,
    Totals,
    Update,
    as_numbers,
    check_type,
    divided_by,
    refuse_no_grad,
    returned_by,
)
from .microbatches import (
    ListShape,
    Piece,
    Share,
    calls,
    differing_replicas,
    distinct,
    fingerprint,
    list_shape,
    share_of,
    spec,
    told_leaf,
)
from .packs import PackedRows
from .snapshot import lr_and_weight_decay, set_learning_rate

if TYPE_CHECKING:
    from .lifecycle import Backend, Options
    from .microbatches import Batch


Doing = Literal["chunk", "last", "finish", "divide", "updated", "abort"]

# Bytes of each rank in the first gather; those of a rank with dozens of metrics' rows are more.
_ROOM = 4096
_LENGTH = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """Tells the other ranks how far this rank is in a step, and with what.

    Example: `RankStatus(doing="abort", step_id="3", updates=2)`.
    """

    doing: Doing
    step_id: str
    updates: int
    """The number of steps that this rank has finished; equal unless ranks left the last one."""
    failure: str | None = None
    """The error of this rank, if there was one."""
    partially_updated: bool = False
    """True if this rank has begun its update, and has no copy to go back to."""
    poisoned: bool = False
    """True if this rank has left collectives that others may be in."""
    begun: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The arguments that must be equal on all ranks that begin a step, by name."""
    replica: int = 0
    """Data-parallel rank; ranks of one replica are given the same batches."""
    lists: tuple[ListShape, ...] = ()
    """The microbatches of the batch, one entry per call."""
    specs: tuple[tuple[Any, tuple[int, int]], ...] = ()
    """Per entry of `lists` a microbatch's `spec` and shape, of which other ranks make dummies."""
    bins: int = 0
    """The number of packs that the batch becomes within the budget of tokens; 0 without one."""
    shift: int | None = None
    """The exponent of the power of two that losses are to be divided by; None without a batch."""
    counts: tuple[float, float] = (0.0, 0.0)
    """Valid sequences and tokens, on the reporting rank of each replica; else zeros."""
    groups: tuple[int, ...] = ()
    """Ids of groups with valid sequences, on the reporting rank of each replica; else none."""
    rows: tuple[Mapping[str, float], ...] = ()
    """Metrics of each microbatch, not normalised, on ranks that have the loss."""
    bad_parameter: str | None = None
    """A trained parameter of this rank that is NaN or infinite, if there is one."""
    rates: tuple[float, float] | None = None
    """Learning rate and weight decay; None on a rank that trains no parameter."""


class LocalFailure(Exception):
    """Says that this rank failed, and did all that others wait for; `error` is the failure."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def all_gather_status(say: RankStatus, deadline_s: float, group: Any = None) -> list[RankStatus]:
    """Return the status of all ranks of the group, by rank. A collective: one gather on the host.

    A second gather follows if any status is longer than a few kilobytes. `group` is a gloo group
    whose operations end after `deadline_s`, in seconds; None for that of all ranks.

    Raises:
        SessionPoisoned: a rank did not come in time, or says that it is poisoned.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [say]
    try:
        # As a dictionary: where this class arrived pickled by value, as in some Ray actors, plain
        # pickle does not find it under its name.
        plain = {field.name: getattr(say, field.name) for field in dataclasses.fields(say)}
        said = _gathered(pickle.dumps(plain), group or control_group(deadline_s))
        heard = [RankStatus(**pickle.loads(each)) for each in said]
    except RuntimeError as lost:
        own = "" if say.failure is None else f"; this rank failed itself: {say.failure}"
        raise poison(
            f"not all ranks came to {say.doing} of step {say.step_id!r} within {deadline_s:g} s "
            f"({lost}){own}"
        ) from lost
    except BaseException as error:
        # Peers go on, or are in a second gather and would take our next one for it.
        poison(f"a rank left the agreement on step {say.step_id!r} by {describe(error)}")
        raise
    left = [f"{rank}: {each.failure}" for rank, each in enumerate(heard) if each.poisoned]
    if left:
        raise poison(f"collectives were left on rank {'; on rank '.join(left)}")
    return heard


def _gathered(message: bytes, group: Any) -> list[bytes]:
    """Return each rank's message, whatever their lengths. A collective."""
    start = len(message).to_bytes(_LENGTH, "little") + message[: _ROOM - _LENGTH]
    everybody = _gathered_evenly(start, _ROOM, group)
    lengths = [int.from_bytes(each[:_LENGTH], "little") for each in everybody]
    longest = max(lengths)
    if longest > _ROOM - _LENGTH:
        everybody = _gathered_evenly(message, longest, group)
        return [each[:length] for each, length in zip(everybody, lengths, strict=True)]
    both = zip(everybody, lengths, strict=True)
    return [each[_LENGTH : _LENGTH + length] for each, length in both]


def _gathered_evenly(message: bytes, size: int, group: Any) -> list[bytes]:
    own = torch.frombuffer(bytearray(message.ljust(size, b"\0")), dtype=torch.uint8)
    shape = dist.get_world_size(group), size
    everybody = list(torch.empty(shape, dtype=torch.uint8, device="cpu"))
    dist.all_gather(everybody, own, group=group)
    return [each.numpy().tobytes() for each in everybody]


def failures(said: Sequence[RankStatus], group: Any = None) -> dict[int, str]:
    """Return what stops the step, by global rank: failures, aborts, ranks in another step.

    `group` is the group whose ranks said it, None for all ranks.
    """
    ids = {say.step_id for say in said}
    updates = {say.updates for say in said}
    found = {}
    ranks = list(range(len(said)) if group is None else dist.get_process_group_ranks(group))
    otherwise = begun_otherwise(said, ranks)
    for rank, say in zip(ranks, said, strict=True):
        if say.failure is not None:
            found[rank] = say.failure
        elif say.doing == "abort":
            found[rank] = "abort() was called"
        elif len(ids) > 1:
            found[rank] = f"is in step {say.step_id!r}"
        elif len(updates) > 1:
            found[rank] = (
                f"has made {say.updates} updates, others {sorted(updates - {say.updates})}: load a "
                "checkpoint on all ranks and make a new TrainStep"
            )
        elif rank in otherwise:
            found[rank] = otherwise[rank]
    return found


def begun_otherwise(said: Sequence[RankStatus], ranks: Sequence[int]) -> dict[int, str]:
    """Return the arguments that ranks began one step with and others did not, by global rank."""
    first: dict[str, tuple[int, str]] = {}
    told: dict[int, list[str]] = {}
    for rank, say in zip(ranks, said, strict=True):
        for name, value in say.begun.items():
            where, theirs = first.setdefault(name, (rank, value))
            if value != theirs:
                told.setdefault(rank, []).append(f"{name}={value} where rank {where} has {theirs}")
    return {rank: f"the step has {'; '.join(each)}" for rank, each in told.items()}


def stop(found: Mapping[int, str], consequence: str, cause: BaseException | None) -> None:
    """Raise `WindowAborted`, on all ranks alike, if there are failures."""
    if found:
        raise WindowAborted(found, consequence) from cause


class OpenStep:
    """Holds what this rank has run in a step that has begun and not ended."""

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
        """The error that stops the step; None if nothing does."""
        self.known = False
        """True if all ranks know of the failure."""
        self.owes = False
        """True if peers may be in a batch that this rank has agreed to run with them.

        It is set before the agreement, because an interrupt may come right after it.
        """
        self.last = False
        """True once this rank has had its last batch."""
        self.receipts: dict[str, Receipt] = {}
        self._sent: dict[str, Mapping[str, Any]] = {}
        self._backend = backend
        self._options = options
        self._deadline_s = options.deadline_s
        self._updates = updates
        self._loss: StepLoss = begun_with["loss"]
        self._has_budget = begun_with["max_tokens_per_microbatch"] is not None
        # What ranks have to have in common. The normalizers of metrics are told in `finish` alone,
        # which tells of metrics anyway.
        alike = {
            "kind": self._loss.kind,
            "global_batch_size": begun_with["global_batch_size"],
            "divisor": _told_divisor(begun_with["divisor"]),
            "non_finite": options.non_finite,
            "nothing_valid": options.nothing_valid,
            "max_tokens_per_microbatch": begun_with["max_tokens_per_microbatch"],
            **backend.must_agree,
        }
        self._begun = {name: repr(value) for name, value in alike.items()}
        self._shift: int | None = None
        # This rank's, so far. Counts are on the device until the end, so that none waits for it.
        self._rows: list[Row] = []
        self._counts: list[torch.Tensor] = []
        self._groups: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._sequences = self._batches = self._microbatches = 0
        self._updating = False
        # What is not finite in parameters, by global rank, as all ranks know it.
        self._bad_parameters: dict[int, str] = {}
        # Learning rate and weight decay of the step, on all ranks alike.
        self._rates = 0.0, 0.0
        # Counters of writes, and the first sign that somebody else has written.
        self._writes, self._bits = backend.writes(), backend.gradient_bits()
        self._disturbed: str | None = None
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
        self._note_writes()
        coupled, group = self._backend.lockstep_group()
        share, packed = Share(), None
        sent: Mapping[str, Any] = {}
        bad: Exception | None = None
        try:
            refuse_no_grad("microbatch")
            check_type("microbatch", "last", last, bool)
            if microbatch_id is not None:
                check_type("microbatch", "microbatch_id", microbatch_id, str)
                sent = fingerprint(batch if ready is None else ready)
            if self._has_budget and batch is not None and ready is None:
                packed = PackedRows.of_step(batch, self.begun_with, self._options, self._backend)
                share = packed.share(packed.bins)
            else:
                share = share_of(batch, ready, self.begun_with, self._options)
            whole, after = self.begun_with["rank_batch_size"], self._sequences + share.sequences
            if whole is not None and after > whole:
                raise ValueError(
                    f"microbatch() got {share.sequences} rows, after {self._sequences} of "
                    f"rank_batch_size={whole}: begin() with the true number, or without it"
                )
            last = last or (share.sequences > 0 and after == whole)
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
            if coupled and group is None and self._has_budget:
                # As many packs on all ranks, so that none needs dummies in a model that all share:
                # ranks with fewer make smaller ones, down to one sequence each.
                mine = 0 if packed is None else packed.bins
                most = max(say.bins for say in self._meet(doing, [], bad, None, bins=mine))
                if packed is not None and most > mine:
                    share = packed.share(most)
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
            self._sequences += share.sequences
            self._microbatches += number
            self._writes, self._bits = self._backend.writes(), self._backend.gradient_bits()
            self.last = last
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

    def _note_writes(self) -> None:
        """Note the first sign of writes into gradients or parameters that the step has not made."""
        now = self._backend.writes()
        gradients, parameters = now.since(self._writes)
        if self._disturbed is None and parameters:
            self._disturbed = (
                f"{parameters} of {len(now.parameters)} trained parameters were written while the "
                "step was open, so that its gradients are of two models"
            )
        elif self._disturbed is None and gradients:
            bits = self._backend.gradient_bits()
            if bits is not None and int(bits) == int(self._bits):
                return  # such as after an offload that keeps them
            self._disturbed = (
                "gradients were written between two calls of the step, by zero_grad_buffer() or "
                "by a backward or a reduction of your own, so that they are no sum over its "
                "microbatches"
            )

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
            update = Update(skipped=update, grad_norm=None)
        lr, weight_decay = self._rates
        return StepResult(
            step_id=self.step_id,
            updated=update.skipped is None,
            skipped=update.skipped,
            grad_norm=update.grad_norm,
            global_valid_sequences=totals.counts.sequences,
            global_valid_tokens=totals.counts.tokens,
            microbatches=totals.counts.microbatches,
            auxiliary_loss_scale=1.0 / max(self._microbatches, 1),
            lr=lr,
            weight_decay=weight_decay,
            metrics=totals.metrics(),
            rows=totals.rows(lr=lr, wd=weight_decay),
            reported_by=dist.get_rank() if dist.is_initialized() else 0,
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
            self._note_writes()
            self._backend.join()
            self._backend.check_gradients()
            # What was given as numbers is on the host, all else on the device.
            device = self._backend.device
            facts = torch.zeros(4, dtype=torch.float64, device=device)
            for each in self._counts:
                facts[:2] += each.to(device, non_blocking=True)
            if self._options.non_finite != "update":
                facts[2] = self._backend.size_of_parameters()
            facts[3] = self._backend.outdated_main_parameters()
            sequences, tokens, size, outdated = facts.tolist()
            local = sequences, tokens
            if math.isnan(sequences + tokens):
                # Masks or counts on a device, which no call has looked at.
                first = next(i for i, each in enumerate(self._counts) if each.isnan().any())
                raise ValueError(
                    f"count {first} of {len(self._counts)} (one for each batch of rows, and for "
                    "each ready microbatch or pack) was taken of masks with another value than 0 "
                    "and 1, or is no number from 0 on: mend the batch. The call names row and "
                    "value if the masks are on the host"
                )
            if outdated:
                raise RuntimeError(
                    f"{outdated:g} elements of the optimizer's main parameters do not round to the "
                    "model's: weights were written into the model, and not into the optimizer, and "
                    "the update would undo that. abort() the step, call "
                    "ensure_main_params_synced(optimizer) on all ranks, and begin again"
                )
            if not math.isfinite(size):
                bad_parameter = self._backend.bad_parameter()
            elif self._disturbed is not None:
                raise RuntimeError(
                    f"{self._disturbed}. abort() the step on all ranks, and begin again; what "
                    "writes belongs before begin() or after finish()"
                )
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
                "finish(divisor)": _told_divisor(divisor),
            },
            replica=self._backend.replica,
            shift=self._shift,
            counts=local if reports else (0.0, 0.0),
            groups=groups if reports else (),
            rows=rows if has_losses else (),
            rates=lr_and_weight_decay(self._backend.optimizer),
            bad_parameter=bad_parameter,
        )
        everybody_meets = coupled and group is None
        while True:
            self.owes = everybody_meets
            said = self._settled(say, error)
            self._agree_on_shift([each.shift for each in said])
            if all(each.doing == "finish" for each in said):
                self.owes = False
                break
            if everybody_meets:  # others still have data, and meet this rank inside of the model
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
        self._settled(self._say("divide", failure=failure, begun={"divisor": repr(found)}), error)
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
        if self._options.non_finite == "refuse":
            self._stop_if(bad, None)
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
                set_learning_rate(self._backend.optimizer, lr)
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
        if not found:
            return
        self._fail("; ".join(found.values()), known=True)
        how = _TORN if self.partially_updated else "All ranks can go back: abort() the step."
        if len({say.failure for say in self._votes}) > 1:
            # A rank left collectives that the others were in, or have started since.
            told = "; ".join(f"rank {rank}: {text}" for rank, text in found.items())
            poisoned = poison(f"a step was left in its update: {told}. {how}")
            if error is None or isinstance(error, Exception):
                raise poisoned from error
        if error is not None and not isinstance(error, Exception):
            raise error
        stop(found, how, error)

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
        elsewhere = any(each.doing == "abort" or each.step_id != self.step_id for each in said)
        if elsewhere or begun_otherwise(said, range(len(said))):
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
            here if known else self._sequences + here,
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

    def _settled(self, say: RankStatus, error: Exception | None) -> list[RankStatus]:
        """Return what all ranks say at the end of the step; raise if any of them has failed."""
        said = self._hear(say)
        self._stop_if(failures(said), error)
        return said

    def _stop_if(self, found: Mapping[int, str], error: Exception | None) -> None:
        """Stop the step before its update, if there are failures, which all ranks know."""
        if found:
            self.owes = False
            self._fail("; ".join(found.values()), known=True)
            stop(found, "No rank has updated its parameters; abort() the step.", error)

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
        number = 0
        found: list[Reported] = []
        try:
            self._agree_on_shift([self._shift_for(lists)])
            plan = list(calls(lists, said, self._backend.device))
            for index, (pieces, ghosts) in enumerate(plan):
                reduce = release and index == len(plan) - 1
                here = self._backend.run(pieces, self._loss, reduce=reduce, ghosts=ghosts)
                if not ghosts:
                    found += here
                    number += len(pieces)
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
        self._rows += [each.row for each in found]
        self.owes = False
        return number, found


def _told_divisor(divisor: Any) -> str:
    """Describe a divisor for a comparison between ranks, which cannot compare functions."""
    return "a function" if callable(divisor) else repr(divisor)


_TORN = (
    "The update had begun on some rank, which keeps no copy to go back to: abort() the step, load "
    "a checkpoint and make a new TrainStep, or make it with undo=True from the start."
)
