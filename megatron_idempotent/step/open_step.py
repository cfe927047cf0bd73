"""Holds a step that is open: its ranks exchange what each has to run, and then run it together.

The messages go over the host, with a deadline, before any rank goes on. A rank that went on alone
would wait in a collective for ever, or train on half of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_idempotent.window.agreement import (
    SessionPoisoned,
    WindowAborted,
    describe,
    is_poisoned,
    poison,
)
from megatron_idempotent.window.open_contexts import close_contexts

from .backend import Backend, LocalFailure
from .dummies import describe_leaf, fingerprint, template
from .loss import (
    LossResult,
    Metrics,
    StepCounts,
    StepLoss,
    StepTotals,
    Update,
    as_numbers,
    call_divisor,
    check_arguments,
    context_scope,
    counts_groups,
    refuse_no_grad,
)
from .microbatches import (
    Batch,
    Calls,
    Groups,
    PreparedBatch,
    call_shape,
    cut_rows,
    distinct_groups,
    in_batch,
)
from .packs import Budget, PackedRows
from .ready import take_ready
from .results import BatchResult, StepResult
from .snapshot import lr_and_weight_decay, refuse_other_learning_rates, set_learning_rate
from .status import (
    Phase,
    RankStatus,
    all_gather_status,
    calls_in_lockstep,
    differing_replicas,
)


def failures_of(statuses: Sequence[RankStatus], group: Any = None) -> dict[int, str]:
    """Return global rank → the reason, for each rank because of which the step stops: a failure, an
    abort, another step or number of updates than others, or other arguments than the first rank.

    `group` is the group of the ranks that sent `statuses`, None for all ranks.
    """
    ids = {status.step_id for status in statuses}
    updates = {status.updates for status in statuses}
    failures = {}
    ranks = _ranks_of(statuses, group)
    differences = differing_arguments(statuses, ranks)
    for rank, status in zip(ranks, statuses, strict=True):
        if status.failure is not None:
            failures[rank] = status.failure
        elif status.phase == "abort":
            failures[rank] = "abort() was called"
        elif len(ids) > 1:
            failures[rank] = f"is in step {status.step_id!r}"
        elif len(updates) > 1:
            failures[rank] = (
                f"has made {status.updates} updates, others {sorted(updates - {status.updates})}: "
                "load a checkpoint on all ranks and make a new TrainStep"
            )
        elif rank in differences:
            failures[rank] = differences[rank]
    return failures


def _ranks_of(statuses: Sequence[RankStatus], group: Any) -> Sequence[int]:
    """Return the global ranks that sent `statuses`: those of `group`, None for all ranks."""
    return range(len(statuses)) if group is None else dist.get_process_group_ranks(group)


def differing_arguments(statuses: Sequence[RankStatus], ranks: Sequence[int]) -> dict[int, str]:
    """Compare the arguments with which ranks began the step. Return global rank → a sentence with
    both values, for each rank whose value of an argument differs from the value of the first rank;
    empty if all agree.
    """
    first_of: dict[str, tuple[int, str]] = {}
    differences: dict[int, str] = {}
    for rank, status in zip(ranks, statuses, strict=True):
        for name, value in status.arguments.items():
            first_rank, first = first_of.setdefault(name, (rank, value))
            if value != first:
                sentence = f"{differences[rank]};" if rank in differences else "the step has"
                differences[rank] = f"{sentence} {name}={value} where rank {first_rank} has {first}"
    return differences


class OpenStep:
    """Holds this rank's state of a step between `begin()` and its end, and runs the step's calls on
    a `Backend`.
    """

    def __init__(
        self, backend: Backend, step_id: str, begun_with: Mapping[str, Any], updates: int
    ) -> None:
        self.step_id = step_id
        self.begun_with = begun_with
        self.failure: str | None = None
        """The error that stops the step; None if nothing does."""
        self.all_know = False
        """True if all ranks know of the failure."""
        self.peers_wait = False
        """True if peers may be in a batch that this rank has agreed to run with them.

        It is set before the agreement, because an interrupt may come right after it.
        """
        self.last = False
        """True once this rank has had its last batch."""
        self.named_batches: dict[str, tuple[Mapping[str, Any], BatchResult]] = {}
        """The fingerprint and the result of each batch to which the caller gave an id, by id."""
        self._backend = backend
        self._options = options = backend.options
        self._updates = updates
        self._loss: StepLoss = begun_with["loss"]
        self._max_tokens: int | None = begun_with["max_tokens_per_microbatch"]
        # What ranks have to have in common. Normalizers of metrics are compared in `finish` alone,
        # which gathers metrics anyway.
        arguments = {
            "kind": self._loss.kind,
            "global_batch_size": begun_with["global_batch_size"],
            "divisor": _comparable(begun_with["divisor"]),
            "non_finite": options.non_finite,
            "nothing_valid": options.nothing_valid,
            "max_tokens_per_microbatch": self._max_tokens,
            **backend.must_agree,
        }
        self._arguments = {name: repr(value) for name, value in arguments.items()}
        self._shift: int | None = None
        # What this rank has run so far. Counts stay on the device until the end of the step, so
        # that the host does not wait.
        self._metrics: list[Metrics] = []
        self._counts: list[torch.Tensor] = []
        self._groups: list[Groups] = []
        self._sequences = self._batches = self._microbatches = 0
        self._updating = False
        # Counters of writes, and the first sign of a write that the step has not made. The bits are
        # taken after each call: an offload that keeps gradients copies them, and does not tell the
        # step.
        self._writes, self._bits = backend.writes(), backend.gradient_bits()
        self._disturbance: str | None = None
        # What this rank has done, and the statuses of all ranks after that.
        self._outcome: tuple[StepTotals, Update | str] | None = None
        self._votes: list[RankStatus] | None = None

    def add(
        self,
        batch: Batch | None,
        ready: Sequence[Any] | None,
        last: bool,
        microbatch_id: str | None,
    ) -> BatchResult:
        """Run forward and backward of a batch. Before that, the ranks that communicate with each
        other within forward or backward exchange which microbatches each of them has to run.

        Raises what `SplitStep.microbatch` does.
        """
        self._note_writes()
        coupled, group = self._backend.lockstep_group()
        prepared, packed_rows = PreparedBatch(), None
        identity: Mapping[str, Any] = {}
        error: Exception | None = None
        try:
            refuse_no_grad("microbatch")
            check_arguments("microbatch", last=last, microbatch_id=microbatch_id)
            if microbatch_id is not None:
                identity = fingerprint(batch if ready is None else ready)
            with in_batch("microbatch() got "):
                prepared, packed_rows = self._prepare(batch, ready)
            sequences = self._sequences + prepared.sequences
            completed = prepared.sequences > 0 and sequences == self.begun_with["rank_batch_size"]
            last = last or completed
        except Exception as caught:  # told to all ranks that wait for this one
            if not coupled:
                raise
            prepared, packed_rows, error = PreparedBatch(), None, caught
        statuses: list[RankStatus] = []
        reduces = False
        with self._noting_failures(unless=WindowAborted):
            if last:
                # A peer in its first forward waits for this gather before it agrees on anything.
                self._backend.join(wait=False)
            phase: Phase = "last" if last else "batch"
            if coupled and group is None and self._max_tokens is not None:
                # All ranks make the same number of packs, so that none needs dummies. A rank with
                # fewer spreads its sequences over more packs, down to one sequence each.
                own_packs = 0 if packed_rows is None else packed_rows.packs
                statuses = self._agree_to_run(phase, (), error, None, packs=own_packs)
                packs = max(status.packs for status in statuses)
                if packed_rows is not None and packs > own_packs:
                    prepared = packed_rows.prepare(packs)
            if coupled:
                statuses = self._agree_to_run(
                    phase, prepared.calls, error, group, uneven=group is None
                )
                reduces = last and group is None and all(peer.phase == "last" for peer in statuses)
            if last and (group is not None or not coupled):
                all_statuses = self._agree_to_run("last", prepared.calls, None, None)
                reduces = all(peer.phase == "last" and peer.calls for peer in all_statuses)
        with self._noting_failures():
            number, results = self._run(prepared.calls, statuses, reduces)
            self._counts += prepared.counts
            self._groups += prepared.groups
            self._sequences += prepared.sequences
            self._microbatches += number
            self._writes, self._bits = self._backend.writes(), self._backend.gradient_bits()
            self.last = last
            batch_result = BatchResult(
                microbatch_id=f"#{self._batches}" if microbatch_id is None else microbatch_id,
                rows=prepared.sequences,
                microbatches=number,
                outputs={
                    name: tuple(value for result in results for value in result.outputs[name])
                    for name in (results[0].outputs if results else ())
                },
                reported=tuple(result.metrics for result in results),
            )
            self._batches += 1
            if microbatch_id is not None:  # else it cannot be sent again, and outputs may be large
                self.named_batches[microbatch_id] = identity, batch_result
            return batch_result

    def _prepare(
        self, batch: Batch | None, ready: Sequence[Any] | None
    ) -> tuple[PreparedBatch, PackedRows | None]:
        """Make the microbatches of `batch` (cut by rows, or packed within a budget of tokens) or of
        `ready`, the caller's own microbatches, and return them as a `PreparedBatch`. If `batch` is
        packed, also return its `PackedRows`, else None.

        Raises:
            ValueError: both were given, or one that cannot be run or counted.
        """
        options, grouped = self._options, counts_groups(self._loss)
        if ready is not None and batch is not None:
            raise ValueError(
                "a batch and microbatches: pass rows to be cut, or a list of microbatches that are "
                "run as they are"
            )
        packed_rows: PackedRows | None = None
        if ready is not None:
            prepared = take_ready(ready, options.shape, options.counts, grouped=grouped)
        elif batch is None:
            prepared = PreparedBatch()
        elif self._max_tokens is None:
            size = self.begun_with["micro_batch_size"]
            prepared = cut_rows(batch, size, options.shared, grouped=grouped)
        else:
            backend = self._backend
            limits = backend.alignment, backend.microbatch_multiple, backend.attention
            budget = Budget(self._max_tokens, *limits)
            packed_rows = PackedRows(batch, budget, options.shared, grouped=grouped)
            prepared = packed_rows.prepare(packed_rows.packs)
        rank_size = self.begun_with["rank_batch_size"]
        if rank_size is not None and self._sequences + prepared.sequences > rank_size:
            raise ValueError(
                f"{prepared.sequences} rows, after {self._sequences} of rank_batch_size="
                f"{rank_size}: begin() with the true number, or without it"
            )
        self._backend.accept(prepared.calls)
        return prepared, packed_rows

    def repeated(self, microbatch_id: str, batch: Batch | None, ready: Any) -> BatchResult:
        """Return the result of the batch that was sent earlier under this id.
        Raise `ValueError` if this batch differs from that one.

        Raises:
            ValueError: this batch differs from the one that was sent before.
        """
        leaves, result = self.named_batches[microbatch_id]
        new_leaves = fingerprint(batch if ready is None else ready)
        for path in (*leaves, *new_leaves):
            old, new = describe_leaf(leaves.get(path)), describe_leaf(new_leaves.get(path))
            if old != new:
                raise ValueError(
                    f"microbatch() got microbatch_id={microbatch_id!r} again, and another batch: "
                    f"its {path} is {new}, and was {old}. Send the batch of the first time, or "
                    "take another id"
                )
        return result

    def _note_writes(self) -> None:
        """Check if other code has written gradients or parameters since the last call of the step.
        If so, record a sentence about it, unless one is recorded already.
        """
        writes = self._backend.writes()
        gradients, parameters = writes.since(self._writes)
        if self._disturbance is None and parameters:
            self._disturbance = (
                f"{parameters} of {len(writes.parameters)} trained parameters were written while "
                "the step was open, so that its gradients are of two models"
            )
        elif self._disturbance is None and gradients:
            bits = self._backend.gradient_bits()
            if bits is not None and int(bits) == int(self._bits):
                return  # such as after an offload that keeps them
            self._disturbance = (
                "gradients were written between two calls of the step, by zero_grad_buffer() or "
                "by a backward or a reduction of your own, so that they are no sum over its "
                "microbatches"
            )

    def finish(self, increment: int | None, lr: float | None, divisor: Any) -> StepResult:
        """Agree with all ranks that no rank failed, then update parameters, and return the result.
        If all ranks have updated already, only return the result.
        """
        if not self.committed:
            with self._noting_failures(unless=WindowAborted):
                totals = self._gather_totals(increment, lr, divisor)
                reason = self._reason_to_skip(totals)
                if reason is None:
                    self._update(totals, increment, lr)
                else:
                    self._outcome, self._votes = (totals, reason), []
        assert self._outcome is not None
        totals, update = self._outcome
        if isinstance(update, str):
            self._backend.skip()
            update = Update(skipped=update, grad_norm=None)
        return StepResult(
            step_id=self.step_id,
            updated=update.skipped is None,
            skipped=update.skipped,
            grad_norm=update.grad_norm,
            global_valid_sequences=totals.counts.sequences,
            global_valid_tokens=totals.counts.tokens,
            microbatches=totals.counts.microbatches,
            auxiliary_loss_scale=1.0 / max(self._microbatches, 1),
            lr=totals.lr,
            weight_decay=totals.weight_decay,
            metrics=totals.metrics(),
            rows=totals.rows(),
            reported_by=dist.get_rank() if dist.is_initialized() else 0,
            replica=self._backend.replica,
        )

    @property
    def committed(self) -> bool:
        """True once all ranks have updated, after which the step cannot be aborted.

        It holds from the moment in which all ranks know; an exception right after changes nothing.
        """
        return self._votes is not None and not failures_of(self._votes)

    @property
    def partially_updated(self) -> bool:
        """True if an update stopped half-way on any rank, and no copy can be restored."""
        if self._votes is None:
            return self._backend.partially_updated
        return not self.committed and any(vote.partially_updated for vote in self._votes)

    @property
    def updates(self) -> int:
        """The number of updates in all steps so far, this step's included if all ranks have made
        it.
        """
        has_updated = self._outcome is not None and isinstance(self._outcome[1], Update)
        return self._updates + (has_updated and self.committed)

    def announce_abort(self) -> None:
        """Tell all ranks that this rank aborts the step, unless they already know that it failed.
        All ranks take part.
        """
        if self.peers_wait and not is_poisoned():
            self._fail("it was interrupted on its way into a batch")
            poison(f"a batch of step {self.step_id!r} was left before it was run")
        if self.all_know or self._votes is not None:
            return
        poisoned = is_poisoned()
        try:
            # In an update these gathers are over, and the next ones are of updated parameters.
            if not poisoned and not self._updating:
                self._backend.join()
            statuses = self._exchange(
                self._status("abort", failure=self.failure, poisoned=poisoned)
            )
            own_report = "abort", self.failure
            if any(peer.phase == "updated" for peer in statuses) or (
                self._updating
                and any((peer.phase, peer.failure) != own_report for peer in statuses)
            ):
                raise poison(f"the update of step {self.step_id!r} was left on some ranks only")
        except SessionPoisoned:
            if self.failure is None:
                raise
        except RuntimeError as error:  # from a gather that a peer has not joined
            poisoned_by = poison(f"step {self.step_id!r} was aborted by {describe(error)}")
            if self.failure is None:
                raise poisoned_by from error

    def _gather_totals(self, increment: int | None, lr: float | None, divisor: Any) -> StepTotals:
        """Gather counts and metrics of all ranks, once all of them are at the end of the step."""
        error: Exception | None = None
        counts = (0.0, 0.0)
        rows: tuple[dict[str, float], ...] = ()
        groups: tuple[int, ...] = ()
        bad_parameter: str | None = None
        try:
            self._note_writes()
            self._backend.join()
            self._backend.check_gradients()
            if lr is not None:
                refuse_other_learning_rates(self._backend.optimizer)
            counts, bad_parameter = self._check_at_the_end()
            groups = distinct_groups(self._groups)
            rows = as_numbers(self._metrics)
        except Exception as caught:  # noqa: BLE001  told to all ranks, and raised on all
            error = caught
        coupled, group = self._backend.lockstep_group()
        reports, has_losses = self._backend.is_reporting_rank, self._backend.has_losses
        status = self._status(
            "finish",
            error,
            arguments={
                **self._arguments,
                "normalizers": repr(dict(sorted(self._loss.normalizers.items()))),
                "context_parallel": repr(context_scope(self._loss)),
                "finish(global_batch_size)": repr(increment),
                "finish(lr)": repr(lr),
                "finish(divisor)": _comparable(divisor),
            },
            replica=self._backend.replica,
            shift=self._shift,
            counts=counts if reports else (0.0, 0.0),
            groups=groups if reports else (),
            rows=rows if has_losses else (),
            rates=lr_and_weight_decay(self._backend.optimizer),
            bad_parameter=bad_parameter,
        )
        all_meet = coupled and group is None
        while True:
            self.peers_wait = all_meet
            statuses = self._exchange(status)
            self._stop_if(failures_of(statuses), error)
            self._agree_on_shift(peer.shift for peer in statuses)
            if all(peer.phase == "finish" for peer in statuses):
                self.peers_wait = False
                break
            if all_meet:  # others still have data, and meet this rank inside of the model
                self._run((), statuses, reduces=False)
        totals = StepTotals(
            self._loss,
            counts=[peer.counts for peer in statuses],
            groups=[peer.groups for peer in statuses],
            rows=[(peer.replica, peer.rows) for peer in statuses],
        )
        totals.own_count = counts[self._loss.kind == "token"]
        totals.bad_parameters = {
            rank: peer.bad_parameter for rank, peer in enumerate(statuses) if peer.bad_parameter
        }
        rates = [peer.rates for peer in (status, *statuses) if peer.rates is not None]
        own_lr, totals.weight_decay = rates[0] if rates else (0.0, 0.0)
        totals.lr = own_lr if lr is None else lr
        totals.divisor = divisor
        if callable(divisor):
            totals.divisor = self._agree_on_divisor(divisor, totals.counts)
        return totals

    def _check_at_the_end(self) -> tuple[tuple[float, float], str | None]:
        """Return this rank's numbers of valid sequences and tokens, and a description of its first
        NaN or infinite parameter, or None.

        The host reads all of it from the device at once.

        Raises:
            ValueError: a count is no number from 0 on.
            RuntimeError: weights or gradients were written beside the step.
        """
        # What was given as numbers is on the host, all else on the device.
        device = self._backend.device
        facts = torch.zeros(4, dtype=torch.float64, device=device)
        for counts in self._counts:
            facts[:2] += counts.to(device, non_blocking=True)
        if self._options.non_finite != "update":
            facts[2] = self._backend.parameter_norm()
        facts[3] = self._backend.outdated_main_parameters()
        sequences, tokens, norm, outdated = facts.tolist()
        if math.isnan(sequences + tokens):
            # Masks or counts on a device, which no call has checked.
            first = next(i for i, counts in enumerate(self._counts) if counts.isnan().any())
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
        if math.isfinite(norm) and self._disturbance is not None:
            raise RuntimeError(
                f"{self._disturbance}. abort() the step on all ranks, and begin again; what "
                "writes belongs before begin() or after finish()"
            )
        bad_parameter = None if math.isfinite(norm) else self._backend.bad_parameter()
        return (sequences, tokens), bad_parameter

    def _agree_on_divisor(
        self, divisor: Callable[[StepCounts], float], counts: StepCounts
    ) -> float:
        """Call the divisor function, and return its number; raise on all ranks unless all ranks got
        an equal number.

        This takes another gather: a function may look at what only one rank has, and parameters
        would differ between replicas that divide by different numbers.
        """
        error: Exception | None = None
        value = 0.0
        try:
            value = call_divisor(divisor, counts)
        except Exception as caught:  # noqa: BLE001  told to all ranks, and raised on all
            error = caught
        status = self._status("divide", error, arguments={"divisor": repr(value)})
        self._stop_if(failures_of(self._exchange(status)), error)
        return value

    def _reason_to_skip(self, totals: StepTotals) -> str | None:
        """Return the reason to skip the update, the same on all ranks; None if there is none.

        Raises:
            WindowAborted: a loss or a parameter is not finite, and the step refuses that.
        """
        if totals.is_empty and self._options.nothing_valid == "skip":
            kind = " microbatch" if self._loss.kind == "none" else f" {self._loss.kind}"
            return f"no valid{kind} on any rank"
        if self._options.non_finite == "update":
            return None
        # A lower scale does not repair a parameter, and a bad parameter explains a bad loss.
        faults = {} if self._backend.lowers_scale else totals.bad_losses()
        faults |= totals.bad_parameters
        if self._options.non_finite == "refuse":
            self._stop_if(faults, None)
        return f"{_by_rank(faults)}, and non_finite='skip'" if faults else None

    def _update(self, totals: StepTotals, increment: int | None, lr: float | None) -> None:
        error: BaseException | None = None
        update: Update | None = None
        self._updating = True
        try:
            if lr is not None:
                set_learning_rate(self._backend.optimizer, lr)
            # Half the deadline: a rank that waited for a failed peer still meets it below.
            update = self._backend.update(totals, increment, self._options.deadline_s / 2)
        except BaseException as caught:  # noqa: BLE001  told to all ranks, and raised on all
            error = caught
        is_torn = self._backend.partially_updated
        vote = self._status("updated", error, partially_updated=is_torn)
        if update is not None:
            self._outcome = totals, update
        self._votes = self._exchange(vote)
        failures = failures_of(self._votes)
        if not failures:
            return
        remedy = _TORN if self.partially_updated else "All ranks can go back: abort() the step."
        if len({peer.failure for peer in self._votes}) > 1:
            # A rank left collectives that the others were in, or have started since.
            self._fail("; ".join(failures.values()), all_know=True)
            poisoned = poison(f"a step was left in its update: {_by_rank(failures)}. {remedy}")
            if error is None or isinstance(error, Exception):
                raise poisoned from error
        self._stop_if(failures, error, remedy)

    def _agree_to_run(
        self,
        phase: Phase,
        calls: Calls,
        error: Exception | None,
        group: Any,
        *,
        uneven: bool = False,
        packs: int = 0,
    ) -> list[RankStatus]:
        """Tell the ranks of `group` (None: all ranks) what this rank is about to run, and return
        the status of each of them. Raise on all of them if any cannot run its microbatches.

        If ranks may have an `uneven` number of microbatches, also send a template of this rank's.
        """
        firsts = [call[0] for call in calls] if uneven else []
        status = self._status(
            phase,
            error,
            replica=self._backend.replica,
            arguments=self._arguments,
            packs=packs,
            shift=self._shift_for(calls),
            calls=tuple(map(call_shape, calls)),
            templates=tuple((template(first.inputs), first.shape) for first in firsts),
        )
        self.peers_wait = True
        statuses = self._exchange(status, group)
        failures = failures_of(statuses, group)
        difference = differing_replicas(statuses)
        if difference and not failures:
            failures = {_ranks_of(statuses, group)[0]: difference}
        self.peers_wait = not failures
        in_other_step = any(
            peer.phase == "abort" or peer.step_id != self.step_id for peer in statuses
        )
        if in_other_step or differing_arguments(statuses, range(len(statuses))):
            remedy = "No rank has run this batch; abort() the step."
            self._stop_if(failures, error, remedy, all_know=group is None)
        if failures:
            consequence = "No rank has run this batch; the step is as it was."
            raise WindowAborted(failures, consequence) from error
        self._agree_on_shift(peer.shift for peer in statuses)
        return statuses

    def _shift_for(self, calls: Calls) -> int | None:
        """Return n, so that the step divides losses by 2 ** n, which is at least the number of
        losses that a replica's gradient sums; None if the step does not divide losses.

        Divided by that power, gradients are no larger than those of a mean. It is chosen once in a
        step, with the first batch, because gradients of all batches are added up; it grows with the
        batches only if `begin` was not told how large the step will be.
        """
        global_size = self.begun_with["global_batch_size"] or 0
        if not calls or not self._backend.narrow or (global_size and self._shift is not None):
            return self._shift
        microbatches = [microbatch for call in calls for microbatch in call]
        batch_sequences = sum(microbatch.sequences for microbatch in microbatches)
        terms = max(
            -(-global_size // self._backend.replicas),
            self.begun_with["rank_batch_size"] or 0,
            batch_sequences if global_size else self._sequences + batch_sequences,
        )
        if self._loss.kind == "none":  # divided already, but for what begin() was told
            divisor = self.begun_with["divisor"]
            if not callable(divisor):
                terms = math.ceil((divisor or 1) / self._backend.replicas)
        if self._loss.kind == "token":  # about as many tokens in each as in those of this batch
            positions = sum(microbatch.positions for microbatch in microbatches)
            terms *= -(-positions // max(batch_sequences, 1))
        return max(int(max(terms, 1) - 1).bit_length(), self._shift or 0)

    def _agree_on_shift(self, shifts: Iterable[int | None]) -> None:
        """Adopt the largest of the ranks' exponents on this rank: divide losses, and the gradients
        so far, by 2 ** that exponent.
        """
        largest = max((shift for shift in shifts if shift is not None), default=None)
        if largest is not None and largest != self._shift:
            self._shift = largest
            self._backend.divide_losses(largest)

    def _stop_if(
        self,
        failures: Mapping[int, str],
        error: BaseException | None,
        remedy: str = "No rank has updated its parameters; abort() the step.",
        *,
        all_know: bool = True,
    ) -> None:
        """Stop the step if there are `failures`, by global rank: raise `WindowAborted` with them.
        All ranks call it with equal failures.
        """
        if failures:
            self.peers_wait = False
            self._fail("; ".join(failures.values()), all_know=all_know)
            if error is not None and not isinstance(error, Exception):
                raise error  # such as KeyboardInterrupt
            raise WindowAborted(failures, remedy) from error

    def _status(self, phase: Phase, error: Any = None, **fields: Any) -> RankStatus:
        if error is not None:
            fields["failure"] = describe(error)
        return RankStatus(phase=phase, step_id=self.step_id, updates=self._updates, **fields)

    def _exchange(self, status: RankStatus, group: Any = None) -> list[RankStatus]:
        """Send this rank's status; return that of each rank of the group, by rank. A collective."""
        if not dist.is_initialized() or dist.get_world_size(group) == 1:
            return [status]
        try:
            return all_gather_status(status, self._options.deadline_s, group)
        except BaseException:
            # A gather of all ranks that failed has told all of them, unless it had not begun.
            self.all_know = self.all_know or (group is None and is_poisoned())
            raise

    @contextmanager
    def _noting_failures(self, *, unless: type[BaseException] | tuple[()] = ()) -> Iterator[None]:
        """Context manager: record that the step has failed if the block raises.
        Exceptions of the type `unless` are not recorded.
        """
        try:
            yield
        except unless:
            raise  # all who would wait for this rank have stopped as well
        except BaseException as error:
            close_contexts(error)
            self._fail(describe(error))
            raise

    def _fail(self, failure: str, *, all_know: bool = False) -> None:
        self.failure = self.failure or failure
        self.all_know = self.all_know or all_know

    def _run(
        self, calls: Calls, statuses: list[RankStatus], reduces: bool
    ) -> tuple[int, list[LossResult]]:
        """Run forward and backward of this rank's calls and, where only other ranks have
        microbatches left, of dummy microbatches. Return the number of this rank's own microbatches,
        and their results.

        `statuses` are those of ranks that run in lockstep; empty if this rank runs by itself.
        Results, one per microbatch, are empty if this rank does not have the loss.
        """
        self.peers_wait = bool(statuses) or reduces
        number = 0
        results: list[LossResult] = []
        try:
            self._agree_on_shift([self._shift_for(calls)])
            plan = [(call, False) for call in calls]
            if statuses:
                plan = list(calls_in_lockstep(calls, statuses, self._backend.device))
            for index, (call, dummies) in enumerate(plan):
                reduce = reduces and index == len(plan) - 1
                call_results = self._backend.run(call, self._loss, reduce=reduce, dummies=dummies)
                if not dummies:
                    results += call_results
                    number += len(call)
        except (LocalFailure, WindowAborted, SessionPoisoned) as failure:
            self.peers_wait = False
            if isinstance(failure, LocalFailure):
                raise failure.error from None
            raise
        except BaseException as error:
            if self.peers_wait:
                # The others have begun, and wait for this rank.
                poisoned = poison(f"a batch was left by {describe(error)}")
                if isinstance(error, Exception):
                    raise poisoned from error
            raise
        self._metrics += [result.metrics for result in results]
        self.peers_wait = False
        return number, results


def _comparable(divisor: Any) -> str:
    """Describe a divisor as text, so that ranks can compare it.
    All functions have one text, because ranks cannot compare functions.
    """
    return "a function" if callable(divisor) else repr(divisor)


def _by_rank(faults: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank}: {fault}" for rank, fault in faults.items())


_TORN = (
    "The update had begun on some rank, which keeps no copy to go back to: abort() the step, load "
    "a checkpoint and make a new TrainStep, or make it with undo=True from the start."
)
