"""Megatron's state beside its gradients, which `abort_window` resets without any patch."""

from __future__ import annotations

import re
from typing import Any

import pytest
from abort_sites import Interrupted
from benches import abort


def _interrupt(index: int, loss: Any) -> None:
    if index == 1 and loss is None:
        raise Interrupted


def _aborted(model: Any) -> None:
    """A window that ends before the forward of its second microbatch."""
    model.on_microbatch = _interrupt
    with pytest.raises(Interrupted):
        model.forward_backward(2, data_seed=1)
    model.on_microbatch = None


def timers() -> tuple[set[str], set[str]]:
    """Runs on a rank: timers running after an aborted window, and after the abort."""
    from megatron.core.timers import Timers

    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build(overlap_grad_reduce=False)
    model.config.timers = Timers(2, "minmax")
    model.config.timers("rollout", log_level=0).start()
    _aborted(model)

    def running() -> set[str]:
        return {name for name, timer in model.config.timers._timers.items() if timer._started}

    after_window = running()
    abort(model)
    left = running()
    model.forward_backward(2, data_seed=0)
    return after_window, left


def test_timers_of_the_window_stop_and_those_of_the_caller_run_on(megatron_ranks):
    for after_window, left in megatron_ranks(1, timers):
        assert "forward-backward" in after_window
        assert left == {"rollout"}


def timers_in_megatron() -> tuple[set[str], set[str]]:
    """Runs on a rank: names of the timers in the installed Megatron's core, and those we stop."""
    import pathlib

    import megatron.core

    from megatron_idempotent.window.abort import WINDOW_TIMERS

    name = re.compile(r"""timers\(\s*['"]([^'"]+)['"]""")
    folder = pathlib.Path(megatron.core.__file__).parent
    sources = [path.read_text() for path in folder.rglob("*.py")]
    return {found for text in sources for found in name.findall(text)}, set(WINDOW_TIMERS)


def test_every_timer_of_megatron_core_is_known(megatron_ranks):
    for names, known in megatron_ranks(1, timers_in_megatron):
        assert len(names) > 15
        assert names <= known


def counts_of_experts() -> list[tuple[float, float]]:
    """Runs on a rank: tokens counted and auxiliary losses logged, before and after the abort."""
    import sys

    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build(
        experts=4,
        overlap_grad_reduce=False,
        config_overrides={
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        },
    )
    _aborted(model)

    def counted() -> tuple[float, float]:
        tokens = sum(
            float(module.local_tokens_per_expert.sum())
            for module in model.chunks[0].modules()
            if getattr(module, "local_tokens_per_expert", None) is not None
        )
        logging = sys.modules.get("megatron.core.transformer.moe.moe_logging")
        if logging is not None:
            logged = [entry.values for entry in logging.get_moe_metrics_tracker().metrics.values()]
        else:
            from megatron.core import parallel_state
            from megatron.core.transformer.moe import moe_utils

            home = moe_utils if hasattr(moe_utils, _TRACKER) else parallel_state
            logged = [entry["values"] for entry in getattr(home, _TRACKER)().values()]
        return tokens, sum(float(values.abs().sum()) for values in logged)

    before = counted()
    abort(model)
    return [before, counted()]


_TRACKER = "get_moe_layer_wise_logging_tracker"


def test_tokens_and_losses_of_experts_are_forgotten(megatron_ranks):
    for before, after in megatron_ranks(2, counts_of_experts):
        assert all(value > 0 for value in before)
        assert after == (0.0, 0.0)


def lists_of_a_window() -> list[int]:
    """Runs on a rank: lengths of what the next window would take for its own."""
    import types

    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build()
    inner = model.chunks[0].module
    inner.embedding_activation_buffer, inner.grad_output_buffer = ["activation"], ["gradient"]
    inner.router_replay = types.SimpleNamespace(replay_backward_list=["routing"])
    lists = [inner.embedding_activation_buffer, inner.grad_output_buffer]
    abort(model)
    return [len(items) for items in (*lists, inner.router_replay.replay_backward_list)]


def test_deferred_gradients_and_replayed_routings_are_dropped(megatron_ranks):
    assert megatron_ranks(1, lists_of_a_window) == [[0, 0, 0]]


def shared_experts() -> bool:
    """Runs on a rank: whether a window is right after one that ended between pieces of a layer."""
    import torch

    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build(
        experts=4,
        overlap_grad_reduce=False,
        config_overrides={
            "moe_shared_expert_intermediate_size": 64,
            "moe_shared_expert_overlap": True,
        },
    )
    model.forward_backward(1, data_seed=0)
    expected = model.gradients()
    shared = model.chunks[0].module.decoder.layers[0].mlp.shared_experts

    def interrupt() -> None:
        raise Interrupted

    shared.get_output = interrupt
    with pytest.raises(Interrupted):
        model.forward_backward(1, data_seed=1)
    del shared.get_output
    abort(model)
    model.forward_backward(1, data_seed=0)
    return torch.equal(model.gradients(), expected)


def test_overlapped_shared_experts_start_over(megatron_ranks):
    assert all(megatron_ranks(2, shared_experts))


def states() -> tuple[Any, ...]:
    """Runs on a rank: the process's state machine and recompute flag after an abort."""
    from megatron.core import rerun_state_machine
    from megatron.core.tensor_parallel import random

    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build()
    untouched = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    abort(model)
    assert rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE is untouched is None
    machine = rerun_state_machine.get_rerun_state_machine()
    before = machine.current_iteration
    assert machine.should_run_forward_backward(None)
    random.IS_CHECKPOINTING = True
    abort(model)
    abort(model)
    flag = random.is_checkpointing() if hasattr(random, "is_checkpointing") else False
    return machine.state.name, machine.current_iteration - before, flag


def test_the_state_machine_waits_for_a_step_and_nothing_is_recomputed(megatron_ranks):
    assert megatron_ranks(1, states) == [("NOT_RUNNING_YET", 0, False)]
