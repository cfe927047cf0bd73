"""A step with `order_stable` has the same bits on any number of replicas, in any order or calls."""

from __future__ import annotations

import gc
import hashlib
import weakref
from typing import Any

import pytest
import torch
from ranks import on_ranks
from scenario import ROWS, Bench, TokenLoss, build, data, raised_by

pytestmark = pytest.mark.full

MICROBATCHES = 8


def trained(
    order: list[int],
    calls: int,
    options: dict[str, Any],
    *,
    stable: bool = True,
    last: bool = False,
) -> bytes:
    """Runs on a rank: two steps over `order`, of which each replica has as many in a row.

    Returns the bits of the parameters; none of other replicas than the first.
    """
    rates = {"lr": 0.1, **options.pop("optimizer_overrides", {})}
    bench = Bench(optimizer_overrides=rates, step={"order_stable": stable}, **options)
    batch = data(3, MICROBATCHES * ROWS, 0)
    replicas = torch.distributed.get_world_size() // options.get("pp", 1)
    mine = order[bench.replica * len(order) // replicas :][: len(order) // replicas]
    size = -(-len(mine) // calls)
    picked = [
        [row for each in mine[start : start + size] for row in (ROWS * each, ROWS * each + 1)]
        for start in range(0, len(mine), size)
    ]
    pieces = [{name: value[rows] for name, value in batch.items()} for rows in picked]
    for _ in range(2):
        assert bench.run(pieces, last=last).updated
    # All replicas take part in a gather.
    found: bytes = bench.parameters().cpu().numpy().tobytes()
    return b"" if bench.replica else found


def bits(ranks: list[bytes]) -> str:
    """The hash of the first replica's parameters, stage after stage."""
    return hashlib.sha256(b"".join(ranks)).hexdigest()


FORWARD, BACKWARD = [*range(MICROBATCHES)], [*range(MICROBATCHES)][::-1]
AVERAGED = {"config_overrides": {"calculate_per_token_loss": False}}
SHARDED = {"overlap_param_gather": True, "optimizer_overrides": {"clip_grad": 0.0}}


#: Name → ranks, order, calls, whether the last batch is said to be it.
WAYS: dict[str, tuple[int, list[int], int, bool]] = {
    "two replicas, shuffled": (2, [3, 0, 6, 5, 1, 7, 2, 4], 2, True),
    "backwards": (1, BACKWARD, 1, False),
    "three calls": (1, FORWARD, 3, False),
    "two replicas": (2, FORWARD, 1, False),
    "four replicas": (4, BACKWARD, 1, True),
}


@pytest.mark.parametrize(
    ("options", "ways"),
    [
        ({}, ["two replicas, shuffled", "four replicas"]),
        (SHARDED, ["two replicas, shuffled"]),
        *(
            pytest.param(each, list(WAYS), marks=pytest.mark.exhaustive)
            for each in ({}, AVERAGED, SHARDED)
        ),
    ],
    ids=["summed", "sharded", "summed, all", "averaged, all", "sharded, all"],
)
def test_the_same_microbatches_give_the_same_bits(megatron_ranks, options, ways):
    options = {"distributed_optimizer": options is SHARDED, **options}
    one = bits(megatron_ranks(1, trained, FORWARD, 1, options))
    for name in ways:
        ranks, order, calls, last = WAYS[name]
        assert bits(megatron_ranks(ranks, trained, order, calls, options, last=last)) == one, name


def test_two_stages_of_two_replicas_too(megatron_ranks):
    options = {"distributed_optimizer": False, "pp": 2}
    one = bits(megatron_ranks(2, trained, FORWARD, 1, options))
    assert bits(megatron_ranks(4, trained, BACKWARD, 2, options)) == one


def test_without_it_the_bits_are_others(megatron_ranks):
    options = {"distributed_optimizer": False}
    one = bits(megatron_ranks(1, trained, FORWARD, 1, options, stable=False))
    assert bits(megatron_ranks(2, trained, FORWARD, 1, options, stable=False)) != one


@pytest.mark.parametrize(
    ("scale", "of_gradient", "said"),
    [
        (1e9, 1.0, "adds up to 4096 exactly"),
        (float("nan"), 1.0, "nan"),
        (1.0, float("inf"), "norm of the gradients is nan"),
    ],
    ids=["large", "loss", "gradient"],
)
@on_ranks(2)
def test_a_gradient_that_cannot_be_added_stops_all_ranks(
    scale: float, of_gradient: float, said
) -> None:
    """A step that one rank spoils, aborted and taken again as it should be."""
    plain = TokenLoss()

    class Loss(TokenLoss):
        def __call__(self, output: Any, microbatch: Any) -> Any:
            total, _ = plain(output, microbatch)
            if bench.replica == 1:
                total = total * scale
                total.register_hook(lambda gradient: gradient * of_gradient)
            return total, {}

    bench = Bench(step={"order_stable": True})
    before = bench.parameters()
    told = raised_by(bench.run, [bench.batch(2)], loss=Loss())
    bench.step.abort()
    assert before.equal(bench.parameters())
    assert bench.run([bench.batch(2)]).updated
    text = str(told)
    assert said in text.lower()


@on_ranks(1)
def test_a_step_that_nobody_holds_keeps_no_sums() -> None:
    bench = Bench(step={"order_stable": True})
    step = bench.__dict__.pop("step")
    sums = weakref.ref(step._backend._sums)
    del step
    gc.collect()
    assert sums() is None


def refused(options: dict[str, Any], later: dict[str, Any]) -> str:
    """Runs on a rank: what is said of a model that cannot have exact sums."""
    from megatron_idempotent import TrainStep

    model, scheduler, _ = build(**options)
    for name, value in later.items():  # it takes a GPU to be built with some
        setattr(model.config, name, value)
    return str(raised_by(TrainStep, model.chunks, model.optimizer, scheduler, order_stable=True))


@pytest.mark.parametrize(
    ("ranks", "options", "later", "said"),
    [
        (1, {"dtype": "fp16"}, {}, "got fp16=True"),
        (3, AVERAGED, {}, "got 3 ranks over which"),
        # Gradients that come after their backward.
        *(
            (1, {}, {name: True}, f"got {name}=True")
            for name in ("defer_embedding_wgrad_compute", "delay_wgrad_compute")
        ),
    ],
)
def test_what_cannot_be_added_exactly_is_refused(megatron_ranks, ranks, options, later, said):
    assert all(said in text for text in megatron_ranks(ranks, refused, options, later))
