"""Contexts whose exit an exception interrupted do not run into a later step."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import Version

FORK = "dot_product_attention.py", "_GeneratorContextManager.__exit__"


def fork_of_random_states(held_by: str) -> None:
    """On a rank: the attention's dropout is interrupted as its fork of random states ends."""
    import gc

    import call_sites
    from stopping import Steps

    options = {"config_overrides": {"attention_dropout": 0.1, "hidden_dropout": 0.1}}
    clean = Steps("megatron", False, **options)
    for number in range(3):
        clean.whole(number)
    expected = clean.digest()
    steps = Steps("megatron", False, **options)  # seeds anew
    steps.whole(0)
    first, *rest = steps.calls(1)
    found = call_sites.sites(first)
    for call in rest:
        call()
    (at,) = (n for (file, _, name), n in found.items() if (file.split("/")[1], name) == FORK)

    first, *_ = steps.calls(2)
    raised: Any = [call_sites.interrupt(first, at, call_sites.Injected)]
    if held_by == "a cycle":
        raised.append(raised)
    steps.step.abort()
    first, *rest = steps.calls(2)
    first()
    raised = None
    gc.collect()  # now what the traceback held ends
    for call in rest:
        call()
    assert steps.digest() == expected


@pytest.mark.parametrize("held_by", ["a variable", "a cycle"])
def test_random_states(megatron_ranks, held_by):
    megatron_ranks(1, fork_of_random_states, held_by)


def fork_in_a_fork() -> None:
    """On a rank: which random states are in use after an inner fork was never left."""
    from megatron.core import tensor_parallel
    from split_bench import ROWS, TokenLoss, build, data

    from megatron_idempotent import TrainStep

    model, scheduler, _ = build()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.add("inner", 3)

    def interrupted(chunk, microbatch):
        with tracker.fork():
            inner = tracker.fork("inner")
            inner.__enter__()
            raise KeyboardInterrupt

    step = TrainStep(model.chunks, model.optimizer, scheduler, forward=interrupted)
    name = step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)
    with pytest.raises(Exception, match="current state name inner"):
        step.microbatch(name, data(0, ROWS, 0))
    step.abort()
    with tracker.fork():  # raises at its end unless it is the one that is in use
        name = tracker._current_state_name
    assert name == "model-parallel-rng"
    assert tracker._current_state_name == "default-rng"


@pytest.mark.skipif(
    Version(version("megatron-core")) < Version("0.16"), reason="forks have no names before 0.16"
)
def test_random_states_in_use(megatron_ranks):
    megatron_ranks(1, fork_in_a_fork)
