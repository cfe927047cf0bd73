"""Log-probs of a pack, split into its sequences, are those of the sequences as rows.

Legend: n sequences, T tokens of a pack, L of a sequence, V columns of a rank, H features.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks

from megatron_idempotent import token_logprobs
from megatron_idempotent.fp8 import Pack, TokenAlignment, token_alignment
from megatron_idempotent.logprobs import (
    context_parallel_part,
    context_parallel_whole,
    shift_targets,
)
from megatron_idempotent.step import pack_batches

pytestmark = pytest.mark.full


def _in_order(values: Any) -> Any:
    total = values.new_zeros(())
    for each in values:
        total = total + each
    return total


@pytest.mark.parametrize(
    ("ranks", "sequence_parallel"),
    [
        (1, False),
        (2, True),
        pytest.param(2, False, marks=pytest.mark.exhaustive),
        pytest.param(4, True, marks=pytest.mark.exhaustive),
    ],
)
@on_ranks("ranks")
def test_the_log_probs_of_a_pack_are_those_of_its_rows(sequence_parallel: bool) -> None:
    """The largest difference of each form, in roundings."""
    from megatron.core import parallel_state

    size = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    group = parallel_state.get_tensor_model_parallel_group()
    rank = torch.distributed.get_rank()
    lengths = [9, 1, 30, 0, 17, 4]
    alignment = token_alignment(None, tp=size, cp=1, sequence_parallel=size > 1)
    pack = Pack.of(lengths, alignment, device="cuda")
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).cuda()

    columns, features = 16, 8
    weight_VH = drawn(size * columns, features)[rank * columns :][:columns]
    hidden = [drawn(length, features) for length in lengths]
    tokens = [torch.arange(length).cuda() * 7 % (size * columns) for length in lengths]
    targets_T = shift_targets(pack.join(tokens), mask=pack.mask, cu_seqlens=pack.cu_seqlens)
    weights = [drawn(length) for length in lengths]

    def losses(logprobs: Any) -> Any:
        return sum((each * w).sum() for each, w in zip(logprobs, weights, strict=True))

    found = {}
    for form in ("logits", "hidden"):
        leaves = [each.clone().requires_grad_() for each in hidden]
        again = [each.clone().requires_grad_() for each in hidden]
        heads = [weight_VH.clone().requires_grad_() for _ in range(2)]
        rows = []
        for leaf, ids in zip(leaves, tokens, strict=True):
            given = (
                {"logits": leaf @ heads[0].t()}
                if form == "logits"
                else {"hidden": leaf, "weight": heads[0]}
            )
            stats = token_logprobs(targets=shift_targets(ids), tp_group=group, **given)
            rows.append(stats.logprob)
        joined_TH = pack.join(again)
        if form == "logits":
            # The very logits of the rows, so that no product has another shape.
            given = {"logits": pack.join([leaf @ heads[1].t() for leaf in again])}
        else:
            part = joined_TH
            if sequence_parallel:
                part = joined_TH.chunk(size)[rank]
            layout = "sequence_parallel" if sequence_parallel else "replicated"
            given = {"hidden": part, "weight": heads[1], "hidden_layout": layout}
        stats = token_logprobs(targets=targets_T, tp_group=group, **given)
        packed = pack.split(stats.logprob)
        sums_n = pack.sums(stats.logprob)
        if form == "logits":
            assert all(torch.equal(a, b) for a, b in zip(packed, rows, strict=True))
            assert torch.equal(sums_n, torch.stack([_in_order(each) for each in rows]))
        losses(rows).backward()
        losses(packed).backward()
        pairs = [*zip(packed, rows, strict=True), (heads[1].grad, heads[0].grad)]
        for one, other in zip(again, leaves, strict=True):
            mine = one.grad
            if form == "hidden" and sequence_parallel:
                mine = mine.clone()
                # Each rank's part of the sequence has its own hidden states' gradient.
                torch.distributed.all_reduce(mine, group=group)
            if form == "hidden":
                pairs.append((mine, other.grad))
            else:
                assert torch.equal(mine, other.grad)
        largest = [float((a - b).abs().max()) for a, b in pairs if a.numel()]
        found[form] = max(largest) / 2.0**-53
    # Products of 8 features and of 64 columns, and sums of 61 tokens, each below 32.
    assert max(found.values()) < (8 + 64 + 61) * 32, found


#: What ranks can share: those of `packs`, as multiples of 4.
SHARED_LENGTHS = (12, 4, 32, 20, 4, 0, 12, 28, 8, 24, 4, 16)


def allowed() -> float:
    """Runs on one rank: what log-probs of all sequences may differ by, in roundings."""
    sys.path.append(str(Path(__file__).parents[1] / "step"))
    import packs

    return packs.allowed_logprobs(SHARED_LENGTHS)


@pytest.fixture(scope="module")
def bound(megatron_rank_pool) -> float:
    """Return the same, of float64."""
    (found,) = megatron_rank_pool.run(1, allowed)
    assert found * 2.0**-53 < 2.0**-30  # far below a rounding of float32 or bfloat16
    return found * 2.0**-53


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (2, {"cp": 2}),
        (4, {"cp": 2, "tp": 2, "sequence_parallel": True}),
        pytest.param(2, {"tp": 2}, marks=pytest.mark.exhaustive),
        pytest.param(2, {"tp": 2, "sequence_parallel": True}, marks=pytest.mark.exhaustive),
    ],
)
@on_ranks("ranks")
def test_a_model_gives_a_pack_the_log_probs_of_its_rows(options: dict[str, Any], bound) -> None:
    """The norm of what `model_logprobs` of packs and of each sequence differ by."""
    sys.path.append(str(Path(__file__).parents[1] / "step"))
    from megatron.core import parallel_state
    from packs import double, one_by_one, rows

    from megatron_idempotent.logprobs import model_logprobs
    from megatron_idempotent.step import gpt_inputs

    model = double(**options).chunks[0]
    config = model.module.config
    batch = rows(dtype=torch.float64)
    batch["lengths"] = torch.tensor(SHARED_LENGTHS).cuda()
    alignment = TokenAlignment.of_config(config)
    group = parallel_state.get_context_parallel_group()
    rank, size = parallel_state.get_context_parallel_rank(), config.context_parallel_size

    def logprobs(microbatch: Any, targets: Any, borders: Any) -> Any:
        """Compute those of all positions, each on the context-parallel rank that has it."""
        mine = context_parallel_part(targets, rank=rank, size=size, cu_seqlens=borders)
        stats = model_logprobs(model, **gpt_inputs(model, microbatch), targets=mine)
        return context_parallel_whole(stats.logprob, group=group, cu_seqlens=borders).detach()

    want, got = {}, {}
    for each in one_by_one({**batch, "row": torch.arange(12)}):
        targets = shift_targets(each["input_ids"])
        want[int(each["row"])] = logprobs(each, targets, None)[0]
    for each in pack_batches({**batch, "row": torch.arange(12)}, 96, alignment=alignment):
        pack = each["pack"]
        targets = shift_targets(each["input_ids"], mask=pack.mask[None], cu_seqlens=pack.cu_seqlens)
        found = pack.split(logprobs(each, targets, pack.cu_seqlens))
        got.update(zip(each["row"].tolist(), found, strict=True))
    apart = torch.cat([got[row] - want[row] for row in want])
    assert len(want) == 11
    found = float(apart.norm())
    print(f"{found / bound:.1e} of {bound * 2.0**53:.1e} roundings")
    assert found < bound
