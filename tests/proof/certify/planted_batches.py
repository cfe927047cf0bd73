"""`SplitStep` with one bug each in packs, or in what context-parallel ranks share."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from planted import Counting, KeepsTheLastCall
from torch import Tensor

from megatron_idempotent import TrainStep
from megatron_idempotent.fp8 import TokenAlignment
from megatron_idempotent.proof.certify import Finished, packs
from megatron_idempotent.proof.certify.adapters import FSDPSplitStep, SplitStep, _given, _Loss
from megatron_idempotent.step import own_positions
from megatron_idempotent.step.packs import context_parallel_ranks


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
        borders = pack["packed_seq_params"].cu_seqlens_q[[0, -1]]
        longest = int(borders[-1])
        changed = {
            "cu_seqlens_q": borders,
            "cu_seqlens_kv": borders,
            "max_seqlen_q": longest,
            "max_seqlen_kv": longest,
        }
        return {
            **pack,
            "packed_seq_params": dataclasses.replace(pack["packed_seq_params"], **changed),
        }


class PositionsGoOn(_Spoiled):
    """Counts positions over the pack."""

    def spoiled(self, pack: Any) -> Any:
        place_S = torch.arange(pack["input_ids"].shape[1]) % 32  # the model has no more
        return {**pack, "position_ids": place_S[None].cuda()}


class LosesASequence(SplitStep):
    """Trains on the first sequence of each call twice, and not on the last one."""

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        chosen = torch.arange(len(rows["input_ids"]))
        chosen[-1] = 0
        super().microbatch({name: each[chosen] for name, each in rows.items()}, fail=fail)


class OneSequenceEach(SplitStep):
    """Makes a pack of each sequence, which is right too, if the losses of packs are then theirs."""

    def begin(self) -> None:
        size = self.subject.max_tokens // 2
        self.open = self.step.begin(self.loss, max_tokens_per_microbatch=size)


class TellsOfPadding(SplitStep):
    """Tells the model where padding is, so that routers leave it out."""

    def forward(self, chunk: Any, microbatch: Any) -> Tensor:
        given = _given(microbatch)
        mine = packs.own({**given, "loss_mask": given["loss_mask"].double()})
        padding_1S = ~microbatch["pack"].mask[None]
        return chunk(
            mine["input_ids"],
            mine["position_ids"],
            None,
            labels=mine["labels"],
            packed_seq_params=given["packed_seq_params"],
            padding_mask=padding_1S,
        )


class PredictsTheNextSequence(_Spoiled):
    """Shifts over borders."""

    def spoiled(self, pack: Any) -> Any:
        labels_1S = pack["input_ids"].roll(-1, 1)
        return {**pack, "labels": labels_1S, "loss_mask": torch.ones_like(pack["loss_mask"])}


class CountsPadding(_Spoiled):
    """Pads each sequence, and learns to predict what it has padded with."""

    def build(self, subject: Any) -> None:
        super().build(subject)
        self.step = TrainStep(
            self.subject.chunks,
            self.subject.optimizer,
            forward=self.forward,
            alignment=TokenAlignment(sequence=16, pack=16),
            deadline_s=20.0,
        )

    def spoiled(self, pack: Any) -> Any:
        last_1S = pack["position_ids"].roll(-1, 1) == 0
        return {**pack, "loss_mask": pack["loss_mask"].new_ones(()) * ~last_1S}


class _MeansOfPacks(_Loss):
    kind = "none"

    def __call__(self, output: Any, microbatch: Any) -> Any:
        total, count = self._subject.loss(output, _given(microbatch))
        return total / count.clamp(min=1), {}


class MeanOfPacks(SplitStep):
    """Averages packs, whatever they hold."""

    def build(self, subject: Any) -> None:
        super().build(subject)
        self.loss = _MeansOfPacks(subject)

    def finish(self) -> Finished:
        found = self.step.finish(
            self.open, global_batch_size=1, divisor=lambda counts: float(counts.microbatches)
        )
        return Finished(updated=found.updated, grad_norm=found.grad_norm)


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
        found = self.step.finish(
            self.open,
            global_batch_size=1,
            divisor=self.counted * torch.distributed.get_world_size(),
        )
        return Finished(updated=found.updated, grad_norm=found.grad_norm)


class ForgetsMainParameters(SplitStep):
    """Makes main parameters of the model's own, which have been rounded."""

    def load(self, state: Any) -> None:
        super().load(state)
        self.subject.optimizer.reload_model_params()


class UpdatesTheModelAlone(SplitStep):
    """Moves the model's parameters, of which the optimizer does not learn."""

    def finish(self) -> Finished:
        found = super().finish()
        with torch.no_grad():
            for chunk in self.subject.chunks:
                for each in chunk.module.parameters():
                    each.mul_(1.5)
        return found


class ReducesTheLastCallAlone(KeepsTheLastCall, FSDPSplitStep):
    """Zeroes the gradients in each call, on FSDP2."""


class SaysThatItAverages(SplitStep):
    """Says that experts' loss is a mean over all positions, and weighs it by those that count."""

    balance_mean = True
