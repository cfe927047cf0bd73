"""Contexts whose exit an exception interrupted do not run into a later step."""

from __future__ import annotations

import gc
from typing import Any

import call_sites
import pytest
from ranks import RELEASE, on_ranks
from scenario import Bench, forward

FORK = "dot_product_attention.py", "_GeneratorContextManager.__exit__"


def _fork_ends(found: set[Any]) -> Any:
    """The call that ends the fork around the attention's dropout, among those that were found."""
    (at,) = (site for site in found if (site[0].split("/")[1], site[2]) == FORK)
    return at


@pytest.mark.parametrize("held_by", ["a variable", "a cycle"])
@pytest.mark.parametrize("interrupted", ["a step", "log-probs"])
@on_ranks(1)
def test_random_states(interrupted: str, held_by: str) -> None:
    """The attention's dropout is interrupted as its fork of random states ends."""
    from stopping import Steps

    options = {"config_overrides": {"attention_dropout": 0.1, "hidden_dropout": 0.1}}
    clean = Steps("megatron", False, **options)
    for number in range(3):
        clean.whole(number)
    expected = clean.digest()
    steps = Steps("megatron", False, **options)  # seeds again
    steps.whole(0)
    steps.whole(1)

    def logprobs() -> None:
        with steps.step.reading() as (chunk,):
            forward(chunk, steps.bench.batch(1, seed=2))

    first, *rest = steps.calls(2)
    call = first if interrupted == "a step" else logprobs
    at = _fork_ends(call_sites.sites(call))
    if interrupted == "a step":
        steps.step.abort()
        first, *rest = steps.calls(2)
        call = first
    raised: Any = [call_sites.interrupt(call, at, call_sites.Injected)]
    assert isinstance(raised[0], call_sites.Injected)
    if held_by == "a cycle":
        raised.append(raised)
    if interrupted == "a step":
        steps.step.abort()
        first, *rest = steps.calls(2)
    first()
    raised = None
    gc.collect()  # now what the traceback held ends
    for call in rest:
        call()
    assert steps.digest() == expected


@on_ranks(1)
def test_random_states_of_a_window() -> None:
    """`abort_window` handles the interrupt, and its traceback is freed early or
    late."""
    import torch

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    def gradients_of_the_next(freed_in_microbatch: int | None) -> Any:
        dropout = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
        model = tiny.build(config_overrides=dropout)

        def window() -> None:
            model.forward_backward(2, data_seed=1)

        window()  # the first one makes other calls
        at = _fork_ends(call_sites.sites(window))
        model.step()
        held = [call_sites.interrupt(window, at, call_sites.Injected)]
        try:
            raise held[0]
        except call_sites.Injected:
            megatron_idempotent.abort_window(model.chunks, model.optimizer)
        if freed_in_microbatch is None:
            held.clear()
        torch.rand(1)  # of the states that the fork would put back

        def free(index: int, _loss: Any) -> None:
            if index == freed_in_microbatch:
                held.clear()
                gc.collect()

        model.on_microbatch = free
        window()
        assert not held
        return model.gradients()

    assert torch.equal(gradients_of_the_next(None), gradients_of_the_next(0))


@pytest.mark.skipif(RELEASE < (0, 16), reason="forks have no names before 0.16")
@on_ranks(1)
def test_random_states_in_use() -> None:
    """An inner fork is never left."""
    from megatron.core import tensor_parallel

    def interrupted(chunk, microbatch):
        with tracker.fork():
            inner = tracker.fork("inner")
            inner.__enter__()
            raise KeyboardInterrupt

    bench = Bench(step={"forward": interrupted})
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.add("inner", 3)
    with pytest.raises(Exception, match="current state name inner"):
        bench.run([bench.batch(1)])
    bench.step.abort()
    with tracker.fork():  # raises at its end unless it is the one that is in use
        name = tracker._current_state_name
    assert name == "model-parallel-rng"
    assert tracker._current_state_name == "default-rng"
