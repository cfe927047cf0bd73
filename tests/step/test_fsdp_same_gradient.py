"""A step on FSDP2 in any number of pieces is plain torch's one-shot step, to the bit."""

from __future__ import annotations

import math

import pytest

SIZES = {1: [6], 3: [1, 2, 3], 6: [1] * 6}
RANKS = {
    "shard": 2,
    "sum": 2,
    "half precision": 2,
    "whole after forward": 2,
    "replicate and shard": 4,
    "tensor parallel": 4,
}


def compared(layout, kind, sizes):
    """Runs on a rank: by number of pieces and `last`, two steps in pieces against two one-shot
    ones.

    Equal bits, of gradients and of all that the next step depends on; norms, metrics, and counts
    of collectives, of both.
    """
    import scenario
    import torch
    from fsdp_bench import CLIP, Counting, build, gradients, one_shot, replica_of, state, step_of

    loss = getattr(scenario, kind)()
    clip = layout != "tensor parallel"
    replicas = torch.distributed.get_world_size() // (1 if clip else 2)

    def run(pieces, last=None):
        # Where FSDP2 is told to add up, the loop to compare with lets it average.
        parts = build("shard" if last is None and layout == "sum" else layout)
        counting = Counting(parts[0])
        step = None if last is None else step_of(*parts, clip_grad=CLIP if clip else None)
        bits, told = [], []
        for seed in (1, 2):
            batch = scenario.data(seed, 2 * sum(pieces), replica_of(layout))
            if step is None:
                norm, metrics = one_shot(*parts, loss, batch, clip=clip, replicas=replicas)
            else:
                result = scenario.split_step(step, loss, batch, pieces, last=last)
                norm, metrics = result.grad_norm, result.metrics
            bits += [gradients(parts[0]), *state(*parts)]
            told += [norm, dict(metrics)]
        return bits, [*told, counting.counts]

    want, told = run([6])
    assert told[0] > CLIP
    found = {}
    for number in sizes:
        for last in (False, True):
            got, also = run(SIZES[number], last)
            equal = [torch.equal(a, b) for a, b in zip(got, want, strict=True)]
            found[f"{number} {last}"] = equal, also, told
    return found


def check(answers, *, exact_norm=True):
    for found in answers:
        for equal, got, want in found.values():
            assert all(equal), found
            for index in (0, 2):
                # 6,000 squares are added up in float32, in whatever order: at most a relative
                # error of 6,000 u in the sum, half of that in the root; u = 2**-24.
                bound = 0.0 if exact_norm else 3000 * 2.0**-24
                assert math.isclose(got[index], want[index], rel_tol=bound)
            assert [got[1], *got[3:]] == [want[1], *want[3:]]


@pytest.mark.parametrize("kind", ["TokenLoss", "SequenceLoss"])
def test_pieces(megatron_ranks, kind):
    sizes = list(SIZES) if kind == "TokenLoss" else [3]
    check(megatron_ranks(2, compared, "shard", kind, sizes, timeout_s=120))


#: These alone gather, reduce or scale otherwise than the others.
ALWAYS = ("replicate and shard", "tensor parallel", "half precision")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(each, marks=() if each in ALWAYS else pytest.mark.exhaustive)
        for each in RANKS
        if each != "shard"
    ],
)
def test_layouts(megatron_ranks, layout):
    answers = megatron_ranks(RANKS[layout], compared, layout, "TokenLoss", [3], timeout_s=120)
    check(answers, exact_norm=layout != "tensor parallel")
