"""`SplitStep` with one bug each, as they were in frameworks, for the check that catches it.

After those of each check come bugs of packs and of what ranks share, of means over sequences, of
offloads and of several adapters, and adapters that are right in another way than certify's own.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from typing import Any

import torch
from mutations import after, before, but, nothing, returning, rows_of, setting, taking
from torch import Tensor

from megatron_idempotent.fp8 import TokenAlignment
from megatron_idempotent.proof.certify import Finished, batches, low_rank
from megatron_idempotent.proof.certify.adapters import (
    FSDPSplitStep,
    Megatron,
    OrderStable,
    SplitStep,
    _described,
    _logprobs,
    _Loss,
    buffers,
    parameters_of,
)
from megatron_idempotent.proof.certify.oracle import counted
from megatron_idempotent.step import own_positions
from megatron_idempotent.step.pack_layout import context_parallel_ranks


class Counting(SplitStep):
    """Knows the calls, rows and positions of a step on this rank; no bug yet."""

    def begin(self) -> None:
        super().begin()
        self.calls = self.rows = 0
        self.counted = 0.0

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        self.calls += 1
        self.rows += len(rows["input_ids"])
        self.counted += float(counted(rows).sum())
        super().microbatch(rows, fail=fail)


class _Divided(_Loss):
    """Is divided by what the adapter says."""

    kind = "none"
    count = 1.0

    def __call__(self, output: Any, microbatch: Any) -> Any:
        total, _ = super().__call__(output, microbatch)
        return total / self.count, {}


# --- One for each check, in their order.


# Forgets a division.
TwiceTheLoss = setting(
    SplitStep, loss_of=returning(_Loss, "__call__", lambda made: (2 * made[0], made[1]))
)


class _MeansOfRows(_Loss):
    kind = "sequence"

    def __call__(self, output: Any, microbatch: Any) -> Any:
        if self.fail:
            return super().__call__(output, microbatch)
        mask_BT = counted(microbatch)
        sums_B = (output * mask_BT * microbatch["scale"][:, None]).sum(1)
        total = (sums_B / mask_BT.sum(1).clamp(min=1)).sum()
        return total, {"nll": total}


# Divides each row by its own length.
MeanOfMeans = setting(SplitStep, loss_of=_MeansOfRows)


class EvenSequences(SplitStep):
    """Takes the sequences of a pack for equally long ones."""

    def forward(self, chunk: Any, microbatch: Any) -> Tensor:
        if "pack" not in microbatch:
            return super().forward(chunk, microbatch)
        pack = batches.described(microbatch)
        borders = pack["packed_seq_params"].cu_seqlens_q
        even = torch.linspace(0, int(borders[-1]), len(borders)).to(borders)
        pack["packed_seq_params"].cu_seqlens_q = pack["packed_seq_params"].cu_seqlens_kv = even
        return self.subject.forward(chunk, pack)


class KeepsTheLastCall(Counting):
    """Zeroes the gradients in each call."""

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        if self.calls:
            self.step.abort()
            SplitStep.begin(self)
        super().microbatch(rows, fail=fail)


class FirstStepsDivisor(Counting):
    """Goes on dividing by the number of positions of the first step."""

    loss_of = _Divided
    known = None

    def finish(self) -> Finished:
        if self.known is None:
            self.known = self.counted * torch.distributed.get_world_size()
        return super().finish(divisor=self.known)


class MeanOfReplicas(Counting):
    """Averages replicas, whatever they have."""

    loss_of = _Divided

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        ranks = torch.distributed.get_world_size()
        self.loss.count = max(float(counted(rows).sum()), 1.0) * ranks
        super().microbatch(rows, fail=fail)

    def finish(self) -> Finished:
        return super().finish(divisor=float(self.calls))


def _first_row_read(self: Any, rows: Any) -> Any:
    rows["input_ids"][0]
    return rows


# Takes the shape of the first row.
RefusesNoRows = taking(SplitStep, "microbatch", _first_row_read)


# Cuts a call after the sixth microbatch.
SixAtMost = taking(SplitStep, "microbatch", lambda self, rows: rows_of(rows, slice(12)))


class StepOverZero(Counting):
    """Divides a step by what counts in it, which may be nothing."""

    def finish(self) -> Finished:
        valid = torch.tensor(self.counted)
        torch.distributed.all_reduce(valid)
        if valid:
            return super().finish()
        self.abort()
        raise RuntimeError("the gradient is NaN")


class HooksStayOff(Megatron):
    """Turns off the hooks that gather parameters after an update, and gathers nothing itself."""

    def build(self, subject: Any) -> None:
        super().build(subject)
        for chunk in subject.chunks:
            if chunk.remove_forward_pre_hook_handles:
                chunk.disable_forward_pre_hook(param_sync=False)


class _WeighsByTheFirstCall(_Loss):
    share = 1.0

    def auxiliary_weight(self, microbatch: Any) -> float:
        return self.share * microbatch["input_ids"].numel()


class CallsCountAlike(Counting):
    """Scales auxiliary losses by the microbatches of a step's first call, in all of its calls."""

    loss_of = _WeighsByTheFirstCall

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        number = len(rows["input_ids"])
        self.first = self.first if self.rows else number
        self.loss.share = self.first / max(number, 1)
        super().microbatch(rows, fail=fail)


def zero_unseen(subject: Any) -> None:
    """Zero gradients so that neither a `TrainStep` nor a patch sees it, and only a check can."""
    for chunk in subject.chunks:
        for buffer in buffers(chunk):
            if buffer.grad_data.untyped_storage().size():  # not while it is offloaded
                buffer.grad_data.data.zero_()


# Begins an evaluation as a step begins.
LogprobsZeroGradients = before(SplitStep, "logprobs", lambda self: zero_unseen(self.subject))


@torch.no_grad()
def _round(self: Any) -> None:
    for each in parameters_of(self.subject):
        each.copy_(each.to(torch.bfloat16))


# Converts the weights in place.
ExportRounds = after(SplitStep, "export", _round)


class AbortUpdates(SplitStep):
    """Finishes a step that is to be dropped."""

    def abort(self) -> None:
        try:
            super().finish()
        except Exception:  # noqa: BLE001  of a step that has failed
            super().abort()


# Logs an error, and goes on with what is there.
SwallowsErrors = but(
    SplitStep,
    microbatch=lambda microbatch, self, rows, *, fail=False: None if fail else microbatch(rows),
)


# Does not look at the norm.
UpdatesWithNaN = setting(SplitStep, options={**SplitStep.options, "non_finite": "update"})


class WarmsUpTwice(SplitStep):
    """Changes the optimizer in each set-up."""

    def build(self, subject: Any) -> None:
        super().build(subject)
        if getattr(subject.optimizer, "seen", False):
            for group in subject.optimizer.param_groups:
                group["lr"] *= 2
        subject.optimizer.seen = True


# Saves the weights alone.
ForgetsMoments = returning(SplitStep, "save", lambda state: {**state, "optimizer": []})


class LosesMomentsOnTheHost(SplitStep):
    """Brings the optimizer's state back as zeros."""

    def onload(self, *, training: bool = True) -> None:
        super().onload(training=training)
        if training:
            for state in self.subject.optimizer.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        value.zero_()


# Leaves parameters on the host unless it is to train.
BringsNothingBackForLogprobs = but(
    SplitStep, onload=lambda onload, self, *, training=True: onload() if training else None
)


class DropsGradientsOffloaded(SplitStep):
    """Zeroes what an open step has added up."""

    def offload(self) -> None:
        zero_unseen(self.subject)
        super().offload(only="weights")


class ForgetsTheRank(SplitStep):
    """Multiplies the factors' product by alpha, not by alpha over the rank."""

    def low_rank(self, module: Any, *, rank: int, magnitudes: bool) -> None:
        low_rank.add(module, rank=rank, magnitudes=magnitudes)
        for each in module.modules():
            if isinstance(each, low_rank.Adapted):
                each.scale *= rank


class PromisesBits(SplitStep):
    """Adds gradients up in the order in which they come."""

    def build(self, subject: Any) -> None:
        self.order_stable = False
        super().build(subject)

    order_stable = True


# --- What an adapter says of itself, and reports.


# Says what it does not do, in all layouts, in those with experts, and with a word of no layout.
DeclaresNaN, DeclaresNaNOfExperts, DeclaresAnUnknownWord = (
    setting(UpdatesWithNaN, cannot={name: "nobody looks at the norm"})
    for name in ("nan", "nan/moe", "nan/experts")
)


# Takes rows alone, and a mean over positions alone.
NoPacks = setting(SplitStep, packs=False, sequences=False)


class OneRankReportsAnotherNorm(SplitStep):
    """Forgets to take the root, on the last rank."""

    options = {"deadline_s": 5.0}  # noqa: RUF012

    def finish(self) -> Finished:
        made = super().finish()
        norm = 4 * made.grad_norm**2 if torch.distributed.get_rank() else made.grad_norm
        return dataclasses.replace(made, grad_norm=norm)


# Reports a sum for a mean.
ReportsAnotherLoss = returning(
    SplitStep, "finish", lambda made: dataclasses.replace(made, loss=2 * made.loss)
)


# Says that experts' loss is a mean over all positions, and weighs it by those that count.
SaysThatItAverages = setting(SplitStep, balance_mean=True)


class OneRankRaises(SplitStep):
    """Raises on the first rank before it agrees with the others, which wait for it."""

    def begin(self) -> None:
        if torch.distributed.get_rank() == 0:
            raise RuntimeError("the first rank cannot begin")
        super().begin()
        torch.distributed.barrier()

    def abort(self) -> None:
        return


class OneRankDies(SplitStep):
    """Is ended on the last rank by a signal, as by a lack of memory."""

    def begin(self) -> None:
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().begin()


def _scaled(made: Any) -> Any:
    return made[0] * (1 + torch.distributed.get_world_size() * 2.0**-24), made[1]


# Has a loss that grows a little with the number of replicas.
ScalesWithReplicas = setting(OrderStable, loss_of=returning(_Loss, "__call__", _scaled))


def _round_sums(self: Any) -> None:
    for each in (p for chunk in self.subject.chunks for p in chunk.parameters()):
        each.main_grad.data.copy_(each.main_grad.bfloat16())  # the step would refuse what it sees


# Adds gradients up in 16 bits.
Bfloat16Sums = before(SplitStep, "finish", _round_sums)


class Clips(SplitStep):
    """Clips, as Megatron does where it is told to."""

    def build(self, subject: Any) -> None:
        subject.optimizer.config.clip_grad = 0.1
        super().build(subject)


class ClipsItself(SplitStep):
    """Clips to 0.1 by itself."""

    def finish(self) -> Finished:
        config = self.subject.config
        theirs = config.finalize_model_grads_func

        def clipped(*args: Any, **kwargs: Any) -> Any:
            theirs(*args, **kwargs)
            for chunk in self.subject.chunks:
                chunk.scale_gradients(0.125)

        config.finalize_model_grads_func = clipped
        try:
            found = super().finish()
        finally:
            config.finalize_model_grads_func = theirs
        return dataclasses.replace(found, grad_norm=8 * found.grad_norm)


class WeightRaises(SplitStep):
    """Has a loss that weighs layers' losses, of which the model has none; it is right."""

    class loss_of(_Loss):
        def auxiliary_weight(self, microbatch: Any) -> float:
            raise KeyError("weight")


# --- Packs, what ranks share, and main parameters.


class _Spoiled(SplitStep):
    """Changes each pack before it is run."""

    def build(self, subject: Any) -> None:
        def forward(chunk: Any, rows: Any) -> Tensor:
            return subject.forward(chunk, self.spoiled(rows) if "labels" in rows else rows)

        def loss(output: Tensor, pack: Any) -> Any:
            return subject.loss(output, self.spoiled(pack))

        super().build(dataclasses.replace(subject, forward=forward, loss=loss))

    def spoiled(self, pack: Any) -> Any:
        raise NotImplementedError


class SeesTheWholePack(_Spoiled):
    """Gives attention no borders."""

    def spoiled(self, pack: Any) -> Any:
        whole = pack["packed_seq_params"].cu_seqlens_q[[0, -1]]
        changed = {f"cu_seqlens_{each}": whole for each in ("q", "kv")}
        changed |= {f"max_seqlen_{each}": int(whole[-1]) for each in ("q", "kv")}
        borders = dataclasses.replace(pack["packed_seq_params"], **changed)
        return {**pack, "packed_seq_params": borders}


class PositionsGoOn(_Spoiled):
    """Counts positions over the pack."""

    def spoiled(self, pack: Any) -> Any:
        place_S = torch.arange(pack["input_ids"].shape[1]) % 32  # the model has no more
        return {**pack, "position_ids": place_S[None].cuda()}


class PredictsTheNextSequence(_Spoiled):
    """Shifts over borders."""

    def spoiled(self, pack: Any) -> Any:
        labels_1S = pack["input_ids"].roll(-1, 1)
        return {**pack, "labels": labels_1S, "loss_mask": torch.ones_like(pack["loss_mask"])}


class CountsPadding(_Spoiled):
    """Pads each sequence, and learns to predict what it has padded with."""

    options = {  # noqa: RUF012
        **SplitStep.options,
        "alignment": TokenAlignment(sequence=16, pack=16),
    }

    def spoiled(self, pack: Any) -> Any:
        last_1S = pack["position_ids"].roll(-1, 1) == 0
        return {**pack, "loss_mask": pack["loss_mask"].new_ones(()) * ~last_1S}


class MeanOfPacks(SplitStep):
    """Averages packs, whatever they hold."""

    class loss_of(_Divided):
        def __call__(self, output: Any, microbatch: Any) -> Any:
            total, count = self._subject.loss(output, _described(microbatch))
            return total / count.clamp(min=1), {}

    def finish(self) -> Finished:
        return super().finish(divisor=lambda counts: float(counts.microbatches))


# Trains on the first sequence of each call twice, and not on the last one.
LosesASequence = taking(
    SplitStep,
    "microbatch",
    lambda self, rows: rows_of(rows, [*range(len(rows["input_ids"]) - 1), 0]),
)


class OneSequenceEach(SplitStep):
    """Makes a pack of each sequence, which is right too, if the losses of packs are then theirs."""

    def begin(self) -> None:
        size = self.subject.max_tokens // 2
        self.open = self.step.begin(self.loss, max_tokens_per_microbatch=size)


class TellsOfPadding(SplitStep):
    """Tells the model where padding is, so that routers leave it out; it is right."""

    def forward(self, chunk: Any, microbatch: Any) -> Tensor:
        pack = _described(microbatch)
        mine = batches.token_fields({**pack, "loss_mask": pack["loss_mask"].double()})
        padding_1S = ~microbatch["pack"].mask[None]
        return chunk(
            mine["input_ids"],
            mine["position_ids"],
            None,
            labels=mine["labels"],
            packed_seq_params=pack["packed_seq_params"],
            padding_mask=padding_1S,
        )


class CutsInHalves(SplitStep):
    """Gives each context-parallel rank one half of a row's labels."""

    def forward(self, chunk: Any, microbatch: Any) -> Tensor:
        tokens_BT = microbatch["input_ids"]
        rank, size = context_parallel_ranks()
        length = tokens_BT.shape[1]
        places_BT = torch.arange(length, device=tokens_BT.device).expand_as(tokens_BT)
        hidden = torch.ones(1, 1, length, length, device=tokens_BT.device).tril() < 0.5
        return chunk(
            own_positions(tokens_BT),
            own_positions(places_BT),
            own_positions(hidden, dim=2),
            labels=tokens_BT.roll(-1, 1).chunk(size, 1)[rank],
        )


class CountsOnEachRank(Counting):
    """Adds up counts of whole rows over ranks that share these."""

    def finish(self) -> Finished:
        divisor = self.counted * torch.distributed.get_world_size()
        return dataclasses.replace(super().finish(divisor=divisor), loss=None)


# Makes main parameters of the model's own, which have been rounded.
ForgetsMainParameters = after(
    SplitStep, "load", lambda self: self.subject.optimizer.reload_model_params()
)


@torch.no_grad()
def _move(self: Any) -> None:
    for each in parameters_of(self.subject):
        each.mul_(1.5)


# Moves the model's parameters, of which the optimizer does not learn.
UpdatesTheModelAlone = after(SplitStep, "finish", _move)


class ReducesTheLastCallAlone(KeepsTheLastCall, FSDPSplitStep):
    """Zeroes the gradients in each call, on FSDP2."""


# --- A mean over sequences.


class MeanOverPositions(SplitStep):
    """Divides what it has added up over positions by their number."""

    class loss_of(_Loss):
        kind = "token"

        def __call__(self, output: Any, microbatch: Any) -> Any:
            total, _ = batches.of_positions(output, microbatch)
            return total, {"nll": total}


class CountsMaskedSequences(Counting):
    """Divides by all rows of a step, those among them that do not count."""

    def finish(self) -> Finished:
        divisor = float(max(self.rows, 1) * 2)
        return dataclasses.replace(super().finish(divisor=lambda counts: divisor), loss=None)


# Multiplies MoE's loss by positions, and divides it by sequences (NeMo-RL #3888).
WeighsExpertsByPositions = setting(
    SplitStep,
    loss_of=setting(
        _Loss, auxiliary_weight=lambda self, microbatch: float(microbatch["input_ids"].numel())
    ),
)


# --- Offloads.


class InParts(Megatron):
    """Adds up several calls of Megatron's schedule, and finalizes after the last; needs nooverlap.

    It stands on none of this library's patches, so that it runs without them.
    """

    def build(self, subject: Any) -> None:
        super().build(subject)
        self._finalize = subject.config.finalize_model_grads_func
        subject.config.finalize_model_grads_func = self._count

    def _count(self, _: Any, tokens: Tensor, **__: Any) -> None:
        self.tokens = self.tokens + tokens

    def begin(self) -> None:
        self._zero()
        self.tokens: Any = 0

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        self.fail = fail
        self._train(self._pieces(rows))

    def finish(self) -> Finished:
        self._finalize(self.subject.chunks, self.tokens)
        return self._update()


class ZeroesBeforeLogprobs(Megatron):
    """Zeroes gradients that have no memory."""

    def logprobs(self, rows: Any) -> Any:
        for chunk in self.subject.chunks:
            chunk.zero_grad_buffer()
        return _logprobs(self.subject, rows)


# Leaves all on the device.
OffloadsNothing = but(SplitStep, offload=nothing, onload=nothing)


class LeavesMomentsOnTheHost(SplitStep):
    """Brings the model back alone."""

    def onload(self, *, training: bool = True) -> None:
        super().onload(training=False)
        for chunk in self.subject.chunks:
            chunk.restore_grad_buffers()


class LeavesGradientsFreed(SplitStep):
    """Takes no memory for gradients."""

    def onload(self, *, training: bool = True) -> None:
        super().onload(training=False)
        if training:
            self.subject.optimizer.restore_from_cpu()


class KeepsOneCopy(SplitStep):
    """Computes log-probs with what its first offload has copied."""

    copies: Any = None

    def offload(self) -> None:
        self.copies = self.copies or [each.detach().clone() for each in self.own()]
        super().offload()

    def own(self) -> list[Any]:
        return parameters_of(self.subject)

    def logprobs(self, rows: Any) -> Any:
        now = [each.detach().clone() for each in self.own()]
        self.put(self.copies)
        try:
            return super().logprobs(rows)
        finally:
            self.put(now)

    @torch.no_grad()
    def put(self, values: list[Any]) -> None:
        for parameter, value in zip(self.own(), values, strict=True):
            parameter.copy_(value)


class KeepsGradients(SplitStep):
    """Copies gradients to the host before it frees them, and back; it is right."""

    def offload(self) -> None:
        self.kept = [
            (buffer, buffer.grad_data.cpu())
            for chunk in self.subject.chunks
            for buffer in buffers(chunk)
        ]
        super().offload()

    def onload(self, *, training: bool = True) -> None:
        super().onload(training=training)
        for buffer, values in self.kept if training else ():
            buffer.reset()  # or the step would miss what was dropped
            buffer.grad_data.copy_(values.cuda())

    def abort(self) -> None:
        raise AssertionError("an offload that keeps gradients was refused")


class OneRankRefuses(SplitStep):
    """Raises at an offload in an open step, on the first rank alone; it is right."""

    is_open = False

    def begin(self) -> None:
        super().begin()
        self.is_open = True

    def offload(self) -> None:
        if self.is_open and torch.distributed.get_rank() == 0:
            raise RuntimeError("a step is open")
        super().offload()

    def finish(self) -> Finished:
        self.is_open = False
        return super().finish()

    def abort(self) -> None:
        self.is_open = False
        super().abort()


def _refuse(self: Any) -> None:
    if torch.distributed.get_rank() == 0:
        raise RuntimeError("gradients were offloaded")


# Raises on the first rank once all have updated.
OneRankRefusesTooLate = after(but(OffloadsNothing, abort=nothing), "finish", _refuse)


# --- Adapters over a frozen base.


@torch.no_grad()
def _nudge(self: Any) -> None:
    layer = self.subject.chunks[0].module.decoder.layers[0].mlp.linear_fc1
    if hasattr(layer, "to_wrap"):
        layer.to_wrap.weight[0, 0] += 2.0**-40


# Moves a frozen parameter by less than roundings can explain.
NudgesTheBase = after(SplitStep, "finish", _nudge)


class SharedFactorUnmarked(SplitStep):
    """Says of no factor that finalizing has to add up its gradients."""

    def low_rank(self, module: Any, *, rank: int, magnitudes: bool) -> None:
        low_rank.add(module, rank=rank, magnitudes=magnitudes)
        for name, parameter in module.named_parameters():
            if ".adapter." in name:
                parameter.sequence_parallel = False
