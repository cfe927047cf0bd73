"""Timers that an exception left running are stopped, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import built, on_microbatch, on_ranks

pytestmark = pytest.mark.patched


class Failure(Exception):
    """Breaks in the middle of a window or a step."""


def timed() -> tuple[Any, Any]:
    """A tiny model under the patches, and the timers of its config and its optimizer."""
    from megatron.core.timers import Timers

    model = built(overlap_grad_reduce=False)
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


@pytest.mark.parametrize("hook", [fail, backward_fails])
@on_ranks(2)
def test_a_broken_window_stops_its_timers_and_keeps_what_was_measured(hook):
    """One that ran before it, the caller's, goes on."""
    model, timers = timed()
    timers("rollout", log_level=0).start()
    model.forward_backward(2, data_seed=0)
    before = timers("forward-backward")._elapsed
    with on_microbatch(model, hook), pytest.raises(Failure):
        model.forward_backward(2, data_seed=1)
    assert running(timers) == ["rollout"]
    assert timers("forward-backward")._elapsed == before > 0


@on_ranks(2)
def test_a_broken_step_and_a_broken_finalize_stop_their_timers():
    from megatron.core import distributed

    model, timers = timed()
    model.forward_backward(2, data_seed=0)
    inner = getattr(model.optimizer, "chained_optimizers", [model.optimizer])[0]
    inner._copy_model_grads_to_main_grads = fail
    with pytest.raises(Failure):
        model.step()
    assert running(timers) == []
    del inner._copy_model_grads_to_main_grads
    assert model.step()[0]
    model.config.finalize_model_grads_func = None
    model.forward_backward(2, data_seed=0)
    model.chunks[0].finish_grad_sync = fail
    with pytest.raises(Failure):
        distributed.finalize_model_grads(model.chunks)
    assert running(timers) == []


@on_ranks(2)
def test_timers_of_another_make_are_left_alone():
    """`config.timers` may be any callable."""

    class Silent:
        def start(self, barrier: bool = False) -> None: ...
        def stop(self) -> None: ...

    model, _ = timed()
    model.config.timers = lambda name, log_level=None: Silent()
    assert len(model.forward_backward(2, data_seed=0)) == 2
