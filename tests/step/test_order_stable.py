"""A step with `order_stable` has the same bits on any number of replicas, in any order or calls."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

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
    import torch
    from scenario import ROWS, TokenLoss, build, data, forward, parameters

    from megatron_idempotent import TrainStep

    rates = {"lr": 0.1, **options.pop("optimizer_overrides", {})}
    model, scheduler, replica = build(optimizer_overrides=rates, **options)
    step = TrainStep(
        model.chunks,
        model.optimizer,
        scheduler,
        forward=forward,
        deadline_s=20,
        order_stable=stable,
    )
    batch = data(3, MICROBATCHES * ROWS, 0)
    replicas = torch.distributed.get_world_size() // options.get("pp", 1)
    mine = order[replica * len(order) // replicas :][: len(order) // replicas]
    for _ in range(2):
        step_id = step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)
        size = -(-len(mine) // calls)
        for start in range(0, len(mine), size):
            picked = [
                row for each in mine[start : start + size] for row in (ROWS * each, ROWS * each + 1)
            ]
            piece = {name: value[picked] for name, value in batch.items()}
            step.microbatch(step_id, piece, last=last and start + size >= len(mine))
        assert step.finish(step_id).updated
    # All replicas take part in a gather.
    found: bytes = parameters(model).cpu().numpy().tobytes()
    return b"" if replica else found


def bits(ranks: list[bytes]) -> str:
    """The hash of the first replica's parameters, stage after stage."""
    return hashlib.sha256(b"".join(ranks)).hexdigest()


FORWARD, BACKWARD = [*range(MICROBATCHES)], [*range(MICROBATCHES)][::-1]
AVERAGED = {"config_overrides": {"calculate_per_token_loss": False}}
SHARDED = {"overlap_param_gather": True, "optimizer_overrides": {"clip_grad": 0.0}}


@pytest.mark.parametrize("options", [{}, AVERAGED, SHARDED], ids=["summed", "averaged", "sharded"])
def test_the_same_microbatches_give_the_same_bits(megatron_ranks, options):
    options = {"distributed_optimizer": options is SHARDED, **options}
    one = bits(megatron_ranks(1, trained, FORWARD, 1, options))
    found = {
        "backwards": megatron_ranks(1, trained, BACKWARD, 1, options),
        "three calls": megatron_ranks(1, trained, FORWARD, 3, options),
        "two replicas": megatron_ranks(2, trained, FORWARD, 1, options),
        "two replicas, shuffled": megatron_ranks(2, trained, [3, 0, 6, 5, 1, 7, 2, 4], 2, options),
        "four replicas": megatron_ranks(4, trained, BACKWARD, 1, options, last=True),
    }
    assert {name for name, ranks in found.items() if bits(ranks) != one} == set()


def test_two_stages_of_two_replicas_too(megatron_ranks):
    options = {"distributed_optimizer": False, "pp": 2}
    one = bits(megatron_ranks(2, trained, FORWARD, 1, options))
    assert bits(megatron_ranks(4, trained, BACKWARD, 2, options)) == one


def test_without_it_the_bits_are_others(megatron_ranks):
    options = {"distributed_optimizer": False}
    one = bits(megatron_ranks(1, trained, FORWARD, 1, options, stable=False))
    assert bits(megatron_ranks(2, trained, FORWARD, 1, options, stable=False)) != one


def left_out(scale: float, of_gradient: float) -> list[str]:
    """Runs on a rank: a step that one rank spoils, aborted and taken again as it should be."""
    from scenario import ROWS, TokenLoss, build, data, forward, parameters

    from megatron_idempotent import TrainStep

    model, scheduler, replica = build()
    step = TrainStep(
        model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=20, order_stable=True
    )
    plain = TokenLoss()

    class Loss(TokenLoss):
        def __call__(self, output: Any, microbatch: Any) -> Any:
            total, _ = plain(output, microbatch)
            if replica == 1:
                total = total * scale
                total.register_hook(lambda gradient: gradient * of_gradient)
            return total, {}

    before = parameters(model)
    step_id = step.begin(Loss(), global_batch_size=8, micro_batch_size=ROWS)
    step.microbatch(step_id, data(0, 2 * ROWS, replica))
    said = []
    try:
        step.finish(step_id)
    except Exception as error:  # noqa: BLE001
        said.append(str(error))
    step.abort()
    assert before.equal(parameters(model))
    step_id = step.begin(plain, global_batch_size=8, micro_batch_size=ROWS)
    step.microbatch(step_id, data(0, 2 * ROWS, replica))
    assert step.finish(step_id).updated
    return said


@pytest.mark.parametrize(
    ("scale", "of_gradient", "said"),
    [
        (1e9, 1.0, "adds up to 4096 exactly"),
        (float("nan"), 1.0, "nan"),
        (1.0, float("inf"), "norm of the gradients is nan"),
    ],
    ids=["large", "loss", "gradient"],
)
def test_a_gradient_that_cannot_be_added_stops_all_ranks(megatron_ranks, scale, of_gradient, said):
    for (text,) in megatron_ranks(2, left_out, scale, of_gradient):
        assert said in text.lower()


def differently() -> str:
    """Runs on a rank: what finish() says where one rank adds exactly and the other does not."""
    from scenario import ROWS, TokenLoss, build, data, forward

    from megatron_idempotent import TrainStep

    model, scheduler, replica = build()
    step = TrainStep(
        model.chunks,
        model.optimizer,
        scheduler,
        forward=forward,
        deadline_s=20,
        order_stable=replica == 1,
    )
    step_id = step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)
    step.microbatch(step_id, data(0, ROWS, replica))
    try:
        step.finish(step_id)
    except Exception as error:  # noqa: BLE001
        return str(error)
    return ""


def test_ranks_that_add_differently_are_told_so(megatron_ranks):
    for text in megatron_ranks(2, differently):
        assert "order_stable" in text, text


def let_go() -> bool:
    """Runs on a rank: whether a step is gone once nobody holds it, though its model is there."""
    import gc
    import weakref

    from scenario import build, forward

    from megatron_idempotent import TrainStep

    model, scheduler, _ = build()
    step = TrainStep(model.chunks, model.optimizer, scheduler, forward=forward, order_stable=True)
    sums = weakref.ref(step._backend._sums)
    del step
    gc.collect()
    return sums() is None


def test_a_step_that_nobody_holds_keeps_no_sums(megatron_ranks):
    assert megatron_ranks(1, let_go) == [True]


def refused(options: dict[str, Any], **later: Any) -> str:
    """Runs on a rank: what is said of a model that cannot have exact sums."""
    from scenario import build, forward

    from megatron_idempotent import TrainStep

    model, scheduler, _ = build(**options)
    for name, value in later.items():  # it takes a GPU to be built with some
        setattr(model.config, name, value)
    try:
        TrainStep(model.chunks, model.optimizer, scheduler, forward=forward, order_stable=True)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("ranks", "options", "said"),
    [
        (1, {"dtype": "fp16"}, "got fp16=True"),
        (3, {"config_overrides": {"calculate_per_token_loss": False}}, "got 3 ranks over which"),
    ],
)
def test_what_cannot_be_added_exactly_is_refused(megatron_ranks, ranks, options, said):
    assert all(said in text for text in megatron_ranks(ranks, refused, options))


@pytest.mark.parametrize("name", ["defer_embedding_wgrad_compute", "delay_wgrad_compute"])
def test_gradients_that_come_after_their_backward_are_refused(megatron_ranks, name):
    (text,) = megatron_ranks(1, refused, {}, **{name: True})
    assert f"got {name}=True" in text
