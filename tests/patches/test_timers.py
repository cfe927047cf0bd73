"""Timers that an exception left running are stopped, and no others."""

from __future__ import annotations

from typing import Any

import pytest


class Failure(Exception):
    """Breaks in the middle of a window or a step."""


def timed(**layout: Any) -> tuple[Any, Any]:
    """Runs on a rank: a tiny model under the patches, and the timers of its config and its
    optimizer."""
    from megatron.core.timers import Timers

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply()
    model = tiny.build(overlap_grad_reduce=False, **layout)
    model.config.timers = timers = Timers(2, "minmax")
    for optimizer in getattr(model.optimizer, "chained_optimizers", [model.optimizer]):
        optimizer.config.timers = timers
    return model, timers


def running(timers: Any) -> list[str]:
    return sorted(name for name, timer in timers._timers.items() if timer._started)


def fail(*_: Any, **__: Any) -> None:
    raise Failure


def backward_fails(index: int, loss: Any) -> None:
    """A tiny model's hook: the second microbatch's backward raises."""
    if loss is not None and index == 1:
        loss.register_hook(fail)


def window(forward: bool) -> tuple[list[str], float, float]:
    """Runs on a rank: a good window, then one that raises; what runs, and the time before and
    after."""
    model, timers = timed()
    model.forward_backward(2, data_seed=0)
    before = timers("forward-backward")._elapsed
    model.on_microbatch = fail if forward else backward_fails
    with pytest.raises(Failure):
        model.forward_backward(2, data_seed=1)
    return running(timers), before, timers("forward-backward")._elapsed


@pytest.mark.parametrize("forward", [True, False])
def test_a_broken_window_stops_its_timers_and_keeps_what_was_measured(forward, megatron_ranks):
    for left, before, after in megatron_ranks(2, window, forward):
        assert left == []
        assert before == after > 0


def step() -> tuple[list[str], bool]:
    """Runs on a rank: an optimizer step that raises, and a good one."""
    model, timers = timed()
    model.forward_backward(2, data_seed=0)
    inner = getattr(model.optimizer, "chained_optimizers", [model.optimizer])[0]
    inner._copy_model_grads_to_main_grads = fail
    with pytest.raises(Failure):
        model.step()
    left = running(timers)
    del inner._copy_model_grads_to_main_grads
    return left, model.step()[0]


def test_a_broken_optimizer_step_stops_its_timers(megatron_ranks):
    assert megatron_ranks(2, step) == [([], True)] * 2


def finalize() -> list[str]:
    """Runs on a rank: `finalize_model_grads`, called by itself, that raises."""
    from megatron.core import distributed

    model, timers = timed()
    model.config.finalize_model_grads_func = None
    model.forward_backward(2, data_seed=0)
    model.chunks[0].finish_grad_sync = fail
    with pytest.raises(Failure):
        distributed.finalize_model_grads(model.chunks)
    return running(timers)


def test_a_broken_finalize_stops_its_timers(megatron_ranks):
    assert megatron_ranks(2, finalize) == [[]] * 2


def timer_of_the_caller() -> list[str]:
    """Runs on a rank: a timer of the caller's own around a window that raises."""
    model, timers = timed()
    timers("rollout", log_level=0).start()
    model.on_microbatch = fail
    with pytest.raises(Failure):
        model.forward_backward(2, data_seed=0)
    return running(timers)


def test_a_timer_that_ran_before_the_window_goes_on(megatron_ranks):
    assert megatron_ranks(2, timer_of_the_caller) == [["rollout"]] * 2


def a_frameworks_own_timers() -> int:
    """Runs on a rank: `config.timers` may be any callable."""

    class Silent:
        def start(self, barrier: bool = False) -> None: ...
        def stop(self) -> None: ...

    model, _ = timed()
    model.config.timers = lambda name, log_level=None: Silent()
    return len(model.forward_backward(2, data_seed=0))


def test_timers_of_another_make_are_left_alone(megatron_ranks):
    assert megatron_ranks(2, a_frameworks_own_timers) == [2, 2]
