"""Runs whose ranks share the model, in every way, or that train on packs of sequences: what they
compute is what one rank computes on padded rows."""

from __future__ import annotations

import functools
import itertools
import json
import shutil

import pytest

pytest.importorskip("tokenizers")  # comes with the extra `trainer`

from trainer_cases import (
    ASYNC,
    SHARED,
    TIMEOUT_S,
    digest,
    job_for,
    needs_megatron_training,
    rows,
    run_and_note,
)

from megatron_idempotent.rl.trainer.async_run import run_controller
from megatron_idempotent.rl.trainer.output import data_path
from megatron_idempotent.rl.trainer.task.prompts import read_prompts
from megatron_idempotent.rl.trainer.task.tokenizer import TextTokenizer

pytestmark = [pytest.mark.full, needs_megatron_training]
EXPERTS = ("model.num_experts=4",)
#: Engines and trainers here differ by rounding alone, so that no expert is another one.
REPLAYED = "rollout.router_replay=replay"
# A gradient, and a log-prob, goes through at most so many additions on its way: 4 layers, forward
# and backward, of 8 sums each, of at most 64 terms. Each rounds by 2^-24, and another layout adds
# in another order.
ROUNDING = 2 * (2 * 4 * 8 * 64) * 2.0**-24


def layout(name, ranks, *settings, always=False):
    marks = [] if always else [pytest.mark.exhaustive]
    overrides = [f"run.ranks={ranks}", *(f"parallel.{each}" for each in settings)]
    return pytest.param(ranks, overrides, id=name, marks=marks)


DENSE = [
    layout("tp2", 2, "tp=2"),
    layout("all of them", 4, "tp=2", "pp=2", "vpp=2", "sequence_parallel=true", always=True),
    layout("cp2", 2, "cp=2", always=True),
    layout("tp2 cp2", 4, "tp=2", "cp=2", "sequence_parallel=true"),
    layout("cp2 pp2", 4, "cp=2", "pp=2"),
    layout("cp2 dp2", 4, "cp=2"),
    layout("tp2 sequence parallel", 2, "tp=2", "sequence_parallel=true"),
    layout("pp2", 2, "pp=2"),
    layout("pp2 interleaved", 2, "pp=2", "vpp=2"),
    layout("tp2 pp2", 4, "tp=2", "pp=2"),
    layout("tp2 dp2", 4, "tp=2"),
    layout("pp2 dp2", 4, "pp=2"),
]
MOE = [
    layout("ep2", 2, "ep=2"),
    layout("tp2 ep2", 4, "tp=2", "ep=2", "sequence_parallel=true"),
    layout("cp2 ep2", 2, "cp=2", "ep=2"),
    layout("pp2 ep2", 4, "pp=2", "ep=2"),
    layout("tp2 pp2 with experts", 4, "tp=2", "pp=2", "sequence_parallel=true"),
    pytest.param(
        2,
        [REPLAYED, "run.ranks=2", "parallel.pp=2", "parallel.vpp=2"],
        id="interleaved, replayed",
        marks=pytest.mark.exhaustive,
    ),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Prompts of an odd number of words, so that two ranks have to pad the vocabulary."""
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    rows = [
        {"prompt": f"say {a} {b} {c}", "answer": b, "split": split}
        for split, letters in (("train", "abcdefg"), ("held_out", "fg"))
        for a, b, c in itertools.product(letters, repeat=3)
        if (split == "held_out") == ({a, b, c} <= {"f", "g"})
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert TextTokenizer.of_words(read_prompts(path).all).vocabulary_size % 2
    return f"task.data={path}"


@pytest.fixture(scope="module")
def run(megatron_rank_pool, tmp_path_factory, data):
    """`run(name, ranks, *overrides)` runs a job of that name; the job, and what its ranks noted."""
    out = tmp_path_factory.mktemp("layouts")

    def run(name, ranks, *overrides, resume=False, **options):
        job = job_for(out / name, *SHARED, data, *overrides, resume=resume)
        noted = megatron_rank_pool.run(ranks, run_and_note, job, timeout_s=TIMEOUT_S, **options)
        return job, noted

    return run


@pytest.fixture(scope="module")
def alone(run):
    """`alone(*overrides)` runs the same on one rank, once; the job, and what it noted."""

    @functools.cache
    def one(*overrides):
        job, (noted,) = run(f"one {overrides}", 1, "run.ranks=1", *overrides, with_row_norms=True)
        return job, noted

    return one


@pytest.mark.parametrize(("ranks", "overrides"), DENSE)
def test_ranks_that_share_a_model_are_one_rank(ranks, overrides, alone, run, request):
    check(alone(), run, request.node.callspec.id, ranks, overrides)


@pytest.mark.parametrize(("ranks", "overrides"), MOE)
def test_ranks_that_share_experts_are_one_rank(ranks, overrides, alone, run, request):
    check(alone(*EXPERTS), run, request.node.callspec.id, ranks, [*overrides, *EXPERTS])


def check(one, run, name, ranks, overrides):
    job, noted = run(name, ranks, *overrides)
    assert_same(one, job, noted)
    if name == "cp2":  # each rank has the whole model, as without a layout
        return
    copy = job.out.with_name(f"{name} resumed")
    shutil.copytree(job.out, copy)
    shutil.rmtree(copy / "checkpoints" / "rollout-000002")
    resumed, later = run(copy.name, ranks, *overrides, resume=True)
    assert rows(resumed) == rows(job)
    assert digest(resumed, 2) == digest(job, 2)
    assert later[0].saved == noted[0].saved
    assert sorted(later[0].engine) == [1, 2]


def assert_same(one, job, noted):
    one_job, alone = one
    for each in noted:
        # To the bit: engines serve what the ranks have, whatever the layout.
        assert each.engine[0] == alone.engine[0]
        assert each.engine[2] == each.saved == noted[0].saved
        assert each.engine[2] != each.engine[0]
        # The reference is the initial policy, and stays it.
        assert each.reference.equal(each.policy)
        assert each.reference_later.equal(each.reference)
        assert not each.policy_later.equal(each.policy)
    replica = [each for each in noted if len(each.batch) == len(alone.batch)]
    for each in replica:  # others have a part of the rows
        assert each.batch.tokens_BT.equal(alone.batch.tokens_BT)
        assert float((each.policy - alone.policy).abs().max()) <= ROUNDING * 4  # of logits below 4
    (before, first), (mine_before, mine) = (
        [rows(each)[step] for step in (0, 1)] for each in (one_job, job)
    )
    assert mine_before == pytest.approx(before, rel=2**-40)  # means, in float64
    sampled = ("train/reward", "train/response_tokens", "train/tied_group_fraction")
    assert first["train/positions"] == len(alone.batch) * alone.batch.tokens_BT.shape[1]
    assert mine["train/positions"] == len(alone.batch) * noted[0].batch.tokens_BT.shape[1]
    for name in sampled:
        assert mine[name] == pytest.approx(first[name], rel=2**-40)
    same_step(first, mine, alone)


def same_step(first, mine, alone):
    """Check a step's norm and loss against those of one rank on rows."""
    # A norm differs by no more than the norm of what the gradient differs by: so much of each row.
    largest = ROUNDING * sum(alone.row_norms) / first["train/response_tokens"]
    assert largest < 0.05 * first["train/grad_norm"]  # or it would say nothing
    assert abs(mine["train/grad_norm"] - first["train/grad_norm"]) <= largest
    # |advantage| is below the square root of the group's size, and the ratio 1 but for rounding.
    assert abs(mine["train/loss"] - first["train/loss"]) <= ROUNDING * 4 * 6**0.5


# From random weights, some responses end early and others do not: rows are padded.
LONGER = "rollout.max_response_tokens=24"
PACKED = (LONGER, "optimizer.max_tokens_per_microbatch=64")
PACKS = [
    layout("packs dp2", 2),
    # Interleaved packs are in the asynchronous run below.
    layout("packs, cut positions", 2, "cp=2", always=True),
    layout("packs interleaved, cut positions", 4, "pp=2", "vpp=2", "cp=2"),
    layout("packs tp2", 2, "tp=2", "sequence_parallel=true"),
]


@pytest.mark.parametrize(("ranks", "overrides"), PACKS)
def test_the_first_step_on_packs_is_that_on_rows(ranks, overrides, alone, run, request):
    rows_job, one = alone(LONGER)
    job, noted = run(request.node.callspec.id, ranks, *PACKED, *overrides)
    before, packed = rows(rows_job)[1], rows(job)[1]
    assert packed["train/response_tokens"] == before["train/response_tokens"]
    same_step(before, packed, one)
    assert before["train/positions"] == one.batch.tokens_BT.numel()
    if len(overrides) == 1:  # others pad to what ranks cut
        assert packed["train/positions"] == int(one.batch.lengths_B.sum())
    assert packed["train/positions"] < before["train/positions"]
    assert all(each.saved == noted[0].saved for each in noted)


ASYNCHRONOUS = [
    layout("tp2 dp2", 4, "tp=2", "sequence_parallel=true"),
    layout("cp2 ep2", 4, "cp=2", "ep=2"),
    layout("interleaved with experts", 4, "pp=2", "vpp=2", "ep=2"),
    # Rows that are no multiple of what an interleaved schedule takes, and replicas without any.
    pytest.param(
        4,
        [*(f"parallel.{each}" for each in ("pp=2", "vpp=2", "ep=2")), "run.ranks=4", PACKED[1]],
        id="packs, interleaved with experts",
    ),
    pytest.param(
        4,
        [REPLAYED, "parallel.cp=2", "parallel.ep=2", "run.ranks=4", PACKED[1]],
        id="packs, cut positions, replayed",
        marks=pytest.mark.exhaustive,
    ),
]


@pytest.mark.parametrize(("ranks", "overrides"), ASYNCHRONOUS)
def test_an_asynchronous_run_takes_its_first_step_as_one_rank_does(
    ranks, overrides, megatron_rank_pool, tmp_path
):
    small = (*ASYNC, *EXPERTS, LONGER, "model.layers=4", "run.rollouts=2", "rollout.group_size=3")
    small += ("controller.groups_per_call=1", "optimizer.warmup_steps=0")
    small += ("controller.call_timeout_s=60", "loss.correction=none")
    found = []
    for name, settings in (("one", ["run.ranks=1"]), ("all", overrides)):
        job = job_for(tmp_path / name, *small, *settings)
        prompts = read_prompts(data_path(job.config))
        assert run_controller(job, prompts, pool=megatron_rank_pool)
        assert (job.out / "model" / "model.safetensors").is_file()
        found.append(rows(job))
    one, all_of_them = found
    for name in ("train/loss", "train/grad_norm"):
        # As above; a row's gradient is below the largest that is clipped at, and there are few.
        assert all_of_them[1][name] == pytest.approx(one[1][name], rel=100 * ROUNDING)
    if PACKED[1] in overrides:
        assert all_of_them[1]["train/positions"] < one[1]["train/positions"]
    assert ("train/other_experts" in all_of_them[1]) == (REPLAYED in overrides)
    assert all_of_them[1].get("train/other_experts", 0.0) == 0.0
    assert all_of_them[2]["train/optimizer_steps"] == 1.0
