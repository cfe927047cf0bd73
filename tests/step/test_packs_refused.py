"""Packs and budgets that cannot be run are refused on all ranks, and the step is as it was."""

from __future__ import annotations

import re
from typing import Any

import pytest


def bad_packs(good: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Microbatches that a step cannot run, by what is wrong with them; made of a right pack."""
    import dataclasses

    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    pack = good["pack"]
    plain = {name: value for name, value in good.items() if name != "pack"}
    tokens = pack.tokens

    def cut(*ends: int) -> dict[str, Any]:
        return {**plain, "cu_seqlens": torch.tensor(ends)}

    shorter = dataclasses.replace(pack, tokens=tokens - 1)
    return {
        "falls": cut(0, 9, 5, tokens),
        "late": cut(3, 9, tokens),
        "ends": cut(0, 9, tokens - 1),
        "padded": {**cut(0, 9, tokens), "cu_seqlens_padded": torch.tensor([0, 8, tokens])},
        "number": {**cut(0, 9, tokens), "cu_seqlens_padded": torch.tensor([0, tokens])},
        "params": {**plain, "params": PackedSeqParams(cu_seqlens_q=torch.tensor([0, 7, 5]))},
        "pack": {**plain, "pack": shorter},
        "token mask": {**good, "token_mask": torch.ones(1, tokens + 1)},
        "sample mask": {**good, "sample_mask": torch.ones(len(pack.lengths) + 1)},
        "rows' mask": {
            "input_ids": torch.zeros(2, 4, dtype=torch.int64),
            "token_mask": torch.ones(2, 5),
        },
    }


PACKS = {
    "falls": r"microbatches\[1\], whose cu_seqlens fall from 9 to 5 in sequence 1",
    "late": r"whose cu_seqlens begin with \[3\]",
    "ends": r"whose cu_seqlens end at (\d+), and which has (\d+) tokens",
    "padded": r"whose sequence 0 has 9 tokens and 8 places",
    "number": r"whose cu_seqlens have 2 sequences, and cu_seqlens_padded 1",
    "params": r"fall from 7 to 5 in sequence 1",
    "pack": r"whose Pack has (\d+) tokens, and whose 'input_ids' has (\d+)",
    "token mask": r"whose 'token_mask' has (\d+) entries, and which has (\d+) tokens",
    "sample mask": r"whose 'sample_mask' has (\d+) entries for (\d+) sequences",
    "rows' mask": r"whose 'token_mask' has shape \(2, 5\): give it \(2, 4\)",
}
ROWS = {
    "long": r"12 rows, of which sequence 2 has 30 tokens and a bin at most 24",
    "unknown": r"not how many are real",
    "mask": r"'attention_mask' of \(12, 31\) for 'input_ids' of \(12, 32\)",
    "above": r"row 4 with 'lengths' 33: give an int from 0 to 32",
}


def refused(options: dict[str, Any]) -> dict[str, str]:
    """Runs on ranks that meet; returns what is said of each bad batch, and then makes a step."""
    import torch
    from packs import PackLoss, make, rows
    from scenario import DEADLINE_S, raised_by

    from megatron_idempotent import TrainStep
    from megatron_idempotent.step import pack_batches

    model, scheduler, replica = make(**options)
    step = TrainStep(model.chunks, model.optimizer, scheduler, deadline_s=DEADLINE_S)
    rank = torch.distributed.get_rank()
    batch = rows(replica)
    ready = pack_batches(batch, 96)
    told = {}
    step_id = step.begin(PackLoss(), global_batch_size=24, max_tokens_per_microbatch=96)
    for name, each in bad_packs(ready[0]).items():
        # On one rank only: the other has nothing against its own.
        mine = [ready[0], each] if rank == 1 else ready
        told[name] = str(raised_by(step.microbatch, step_id, microbatches=mine))
    longer = batch["lengths"].clone()
    longer[4] = 33
    wrong: dict[str, dict[str, Any]] = {
        "unknown": {name: value for name, value in batch.items() if name != "lengths"},
        "mask": {**batch, "attention_mask": torch.ones(12, 31)},
        "above": {**batch, "lengths": longer},
    }
    for name, each in wrong.items():
        told[name] = str(raised_by(step.microbatch, step_id, each if rank == 1 else batch))
    step.microbatch(step_id, batch)
    result = step.finish(step_id)
    assert result.updated
    step_id = step.begin(PackLoss(), global_batch_size=24, max_tokens_per_microbatch=24)
    told["long"] = str(raised_by(step.microbatch, step_id, batch))
    step.abort(step_id)
    return told


def misaligned(options: dict[str, Any], sequence: int, pack: int) -> str:
    """Runs on ranks that share positions, of which a pack has other multiples."""
    from packs import PackLoss, make, rows
    from scenario import DEADLINE_S, raised_by

    from megatron_idempotent import TrainStep
    from megatron_idempotent.fp8 import TokenAlignment
    from megatron_idempotent.step import pack_batches

    model, scheduler, replica = make(**options)
    step = TrainStep(model.chunks, model.optimizer, scheduler, deadline_s=DEADLINE_S)
    alignment = TokenAlignment(sequence=sequence, pack=pack)
    packs = pack_batches(rows(replica), 96, alignment=alignment)
    step_id = step.begin(PackLoss(), global_batch_size=12)
    told = str(raised_by(step.microbatch, step_id, microbatches=packs))
    step.microbatch(step_id, microbatches=pack_batches(rows(replica), 96, alignment=_four()))
    step.finish(step_id)
    return told


def _four() -> Any:
    from megatron_idempotent.fp8 import TokenAlignment

    return TokenAlignment(sequence=4, pack=4)


def test_packs_that_ranks_cannot_share_are_refused(megatron_ranks):
    shared = {"tp": 2, "sequence_parallel": True}
    for told in megatron_ranks(2, misaligned, shared, 3, 3):
        assert re.search(r"got \d+ positions for 2 ranks that share them by sequence", told), told
    for told in megatron_ranks(2, misaligned, {"cp": 2}, 2, 4):
        assert re.search(r"sequence \d+ begins at \d+, for 2 context-parallel ranks", told), told


@pytest.mark.parametrize("layout", ["pipeline", "experts"])
def test_bad_packs_are_refused_on_all_ranks_and_the_step_is_as_it_was(megatron_ranks, layout):
    options: dict[str, Any] = {"pp": 2} if layout == "pipeline" else {"experts": 4, "ep": 2}
    for told in megatron_ranks(2, refused, options):
        for name, words in {**PACKS, **ROWS}.items():
            assert re.search(words, told[name]), (name, told[name])
            assert name == "long" or "rank 1" in told[name], (name, told[name])
        # Both numbers are there, and they differ.
        for name in ("ends", "pack", "token mask", "sample mask"):
            found = re.search(PACKS[name], told[name])
            assert found is not None
            assert len(set(found.groups())) == 2


def differing() -> dict[str, str]:
    """Runs on two stages that are given other sequences, or begin with other budgets."""
    import torch
    from packs import PackLoss, make, rows
    from scenario import DEADLINE_S, raised_by

    from megatron_idempotent import TrainStep

    model, scheduler, replica = make(pp=2)
    step = TrainStep(model.chunks, model.optimizer, scheduler, deadline_s=DEADLINE_S)
    rank = torch.distributed.get_rank()
    told = {}
    begin = {"global_batch_size": 24, "max_tokens_per_microbatch": 96}
    step_id = step.begin(PackLoss(), **begin)
    batch = rows(replica)
    # As many tokens in packs as large, of other sequences.
    moved = {**batch, "lengths": batch["lengths"].clone()}
    moved["lengths"][0] += 1
    moved["lengths"][3] -= 1
    told["lengths"] = str(raised_by(step.microbatch, step_id, moved if rank else batch))
    step.microbatch(step_id, batch)
    step.finish(step_id)
    step_id = step.begin(PackLoss(), global_batch_size=24, max_tokens_per_microbatch=96 + rank)
    told["budget"] = str(raised_by(step.microbatch, step_id, batch))
    step.abort(step_id)
    told["both"] = str(raised_by(step.begin, PackLoss(), micro_batch_size=2, **begin))
    begin["max_tokens_per_microbatch"] = 0
    told["none"] = str(raised_by(step.begin, PackLoss(), **begin))
    narrow = TrainStep(
        model.chunks, model.optimizer, scheduler, alignment=alignment(), deadline_s=DEADLINE_S
    )
    begin["max_tokens_per_microbatch"] = 96
    told["alignment"] = str(raised_by(narrow.begin, PackLoss(), **begin))
    return told


def alignment() -> Any:
    from megatron_idempotent.fp8 import TokenAlignment

    return TokenAlignment(sequence=4, pack=128)


def test_ranks_that_were_given_other_sequences_are_told(megatron_ranks):
    for told in megatron_ranks(2, differing):
        assert re.search(
            r"was given chunk\(2 microbatches of up to 1 x \d+ \(shapes and lengths \w{8}\)\) on "
            r"one of its model parallel ranks and chunk\(2 microbatches",
            told["lengths"],
        ), told
        assert "the step is as it was" in told["lengths"]
        assert "max_tokens_per_microbatch=97 where rank 0 has 96" in told["budget"]
        assert "got micro_batch_size=2, max_tokens_per_microbatch=96" in told["both"]
        assert "positive int as max_tokens_per_microbatch, got 0" in told["none"]
        assert re.search(r"begin\(\) got a budget of 96 tokens, .* 128", told["alignment"])
