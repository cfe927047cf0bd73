"""Packs that are cut as Megatron cuts them, and what Transformer Engine says of the pieces."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from ranks import on_ranks

from megatron_idempotent.fp8.packing import RECIPES, Pack, TokenAlignment, token_alignment
from megatron_idempotent.logprobs import context_parallel_part

pytestmark = pytest.mark.full

LAYOUTS = [
    (tp, cp, sequence_parallel)
    for tp, cp in itertools.product([1, 2, 3, 4, 8], [1, 2, 4])
    for sequence_parallel in ([False] if tp == 1 else [False, True])
]


def refusal(recipe: str | None, shared: bool, local: int, gathered: int) -> str | None:
    """Return what Transformer Engine 2.20 finds wrong with an input of `local` tokens on a rank,
    of which there are `gathered` when the ranks that share them have put them together."""
    if recipe is None:
        return None
    if local % 8:
        return "assert_dim_for_fp8_exec"
    if recipe == "mxfp8" and local % 32:
        return "MXFP8Quantizer"
    if recipe == "blockwise" and shared and local % 128:
        return "Float8BlockQuantizer.is_quantizable"
    if recipe != "mxfp8" and gathered % 16:
        return "cuBLAS: leading dimension of the weight's gradient"
    return None


def wrong(recipe: str | None, tp: int, cp: int, shared: bool, pack: Pack) -> str | None:
    """The first thing that is wrong on any rank, if there is any."""
    places = torch.arange(pack.tokens)
    parts = [places]
    if cp > 1:
        if pack.tokens % (2 * cp):
            return "context parallelism: cut in pieces"
        parts = [
            context_parallel_part(places, rank=rank, size=cp, cu_seqlens=pack.cu_seqlens)
            for rank in range(cp)
        ]
    if not torch.equal(torch.cat(parts).sort().values, places):
        return "context parallelism: each token once"
    for part in parts:
        pieces = tp if shared else 1
        if len(part) % pieces:
            return "sequence parallelism"
        if found := refusal(recipe, shared, len(part) // pieces, len(part)):
            return found
    return None


def packs(alignment: TokenAlignment, count: int) -> list[Pack]:
    draw = random.Random(repr(alignment))
    return [
        Pack.of([draw.randrange(1, 700) for _ in range(draw.randrange(1, 6))], alignment)
        for _ in range(count)
    ]


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_every_rank_of_every_layout_computes_random_packs(recipe):
    for tp, cp, shared in LAYOUTS:
        alignment = token_alignment(recipe, tp, cp, shared)
        for pack in packs(alignment, 15):
            assert wrong(recipe, tp, cp, shared, pack) is None, (tp, cp, shared, pack.lengths)


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_without_one_of_its_factors_no_multiple_suffices(recipe):
    for tp, cp, shared in LAYOUTS:
        alignment = token_alignment(recipe, tp, cp, shared)
        smaller = []
        for factor in (2, 3):
            if alignment.pack % factor == 0:
                # A pack is a multiple of what its sequences are, so that shrinks with it.
                pack = alignment.pack // factor
                smaller.append((math.gcd(alignment.sequence, pack), pack))
            if alignment.sequence % factor == 0:
                smaller.append((alignment.sequence // factor, alignment.pack))
        for sequence, pack in smaller:
            less = TokenAlignment(sequence=sequence, pack=pack)
            found = (wrong(recipe, tp, cp, shared, each) for each in packs(less, 30))
            assert any(found), (tp, cp, shared, less)


def test_a_pack_is_aligned_after_its_sequences():
    alignment = token_alignment("mxfp8", 2, 2, True)
    assert (alignment.sequence, alignment.pack) == (4, 128)
    assert [alignment.of_pack(lengths) for lengths in ([5, 8, 1], [127, 1], [])] == [128, 256, 0]


@on_ranks(1)
def test_the_multiples_are_read_from_megatrons_configuration() -> None:
    """Recipes have Megatron's own names."""
    from megatron.core.enums import Fp8Recipe
    from megatron.core.transformer import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 8}
    layout = {"tensor_model_parallel_size": 2, "context_parallel_size": 2}
    config = TransformerConfig(**sizes, **layout, sequence_parallel=True, fp8="hybrid")
    assert TokenAlignment.of_config(config) == token_alignment("delayed", 2, 2, True)
    config.fp8_recipe = Fp8Recipe.mxfp8
    assert TokenAlignment.of_config(config) == token_alignment("mxfp8", 2, 2, True)
    # Megatron has a recipe by default; what says that FP8 is on is `fp8`.
    config.fp8 = None
    assert TokenAlignment.of_config(config) == token_alignment(None, 2, 2, True)
    for recipe in Fp8Recipe.__members__:
        if recipe != "custom":
            token_alignment(Fp8Recipe[recipe], 1, 1, False)


FIELDS = {
    "fp8": "e4m3",
    "fp8_recipe": "blockwise",
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "sequence_parallel": False,
}


@pytest.mark.parametrize(
    ("call", "texts"),
    [
        (lambda: token_alignment("auto", 1, 1, False), ["'auto'", "mxfp8", "resolve"]),
        (lambda: token_alignment("custom", 1, 1, False), ["'custom'", "TokenAlignment("]),
        (lambda: token_alignment("mxfp8", 1, 1, True), ["sequence_parallel=True", "tp=1"]),
        (lambda: token_alignment("mxfp8", 0, 1, False), ["tp=0"]),
        (lambda: token_alignment("mxfp8", 1, 0, False), ["cp=0"]),
        (lambda: token_alignment("mxfp8", 1, True, False), ["cp=True"]),
        (lambda: token_alignment("mxfp8", 2.0, 1, False), ["tp=2.0"]),
        (lambda: token_alignment("mxfp8", 2, 1, 1), ["sequence_parallel=1"]),
        (lambda: TokenAlignment(sequence=4, pack=6), ["pack=6", "sequence=4"]),
        (lambda: TokenAlignment(sequence=0, pack=6), ["sequence=0"]),
        (lambda: TokenAlignment.of_config({**FIELDS, "fp8_recipe": None}), ["fp8='e4m3'", "None"]),
        (lambda: TokenAlignment.of_config({**FIELDS, "fp8_recipe": "auto"}), ["'auto'"]),
        (lambda: TokenAlignment.of_config({**FIELDS, "fp4": "e2m1"}), ["fp4='e2m1'"]),
        (lambda: TokenAlignment.of_config({"fp8": None}), ["dict", "tensor_model_parallel_size"]),
    ],
)
def test_what_is_not_resolved_or_cannot_be_is_refused(call, texts):
    with pytest.raises(ValueError) as told:  # noqa: PT011  the text is looked at
        call()
    assert all(text in str(told.value) for text in texts), str(told.value)
