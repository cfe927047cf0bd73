"""`abort_window` puts back what a window leaves, also where no patch is applied."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from abort_sites import Interrupted
from megatron_idempotent.patches._case import EXPERT_BIAS
from ranks import abort, built, digest, fails, groups, on_microbatch, on_ranks, same

import megatron_idempotent

pytestmark = pytest.mark.full


def _aborted(model: Any) -> None:
    """A window that ends before the forward of its second microbatch."""
    with on_microbatch(model, fails(Interrupted(), 1, in_loss=False)), pytest.raises(Interrupted):
        model.forward_backward(2, data_seed=1)


@on_ranks(2)
def test_between_two_steps_it_changes_no_value_however_often():
    def values(times: int) -> list[str]:
        model = built(applied=False, overlap_param_gather=True)
        for _ in range(2):
            model.train_step(2, data_seed=0)
        for _ in range(times):
            abort(model)
        states = model.optimizer.chained_optimizers[0].optimizer.state.values()
        found = [digest(*(value for each in states for value in each.values()), model.parameters())]
        model.forward_backward(2, data_seed=1)
        return [*found, digest(model.gradients(), model.parameters())]

    assert values(0) == values(1) == values(2)


@on_ranks(1)
def test_a_no_sync_that_a_traceback_holds_is_left_for_good():
    """Its exit comes in a later window, and turns nothing on."""
    model = built(applied=False)
    (chunk,) = model.chunks
    held = [chunk.no_sync()]
    held[0].__enter__()  # as the pipeline schedules do, and an exception leaves it like this
    abort(model)
    with chunk.no_sync():
        held.clear()
        assert not any(group.is_last_microbatch for group in chunk.bucket_groups)


@pytest.mark.parametrize(
    ("at", "after"),
    [
        ("enter", "abort_window"),
        ("exit", "abort_window"),
        ("exit", "rebuild_process_groups"),
        pytest.param("enter", "rebuild_process_groups", marks=pytest.mark.exhaustive),
    ],
)
@on_ranks(2)
def test_later_sums_are_not_added_to_an_interrupted_reduction(at, after):
    """A reduction is interrupted as it is put together; a traceback holds its context."""
    from megatron.core import parallel_state
    from megatron.core.distributed import param_and_grad_buffer

    model = built(applied=False, distributed_optimizer=False)
    held = []

    class Coalescing:
        """Stands for a KeyboardInterrupt that upstream's context is entered or left upon."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            held.append(coalescing(*args, **kwargs))

        def __enter__(self) -> Any:
            if at == "enter":
                raise Interrupted
            return held[-1].__enter__()

        def __exit__(self, *_: Any) -> None:
            raise Interrupted

    coalescing = param_and_grad_buffer._coalescing_manager
    param_and_grad_buffer._coalescing_manager = Coalescing
    with pytest.raises(Interrupted):
        model.forward_backward(1, data_seed=0)
    param_and_grad_buffer._coalescing_manager = coalescing
    if after == "abort_window":
        abort(model)
    else:
        megatron_idempotent.window.rebuild_process_groups(model.chunks, model.optimizer)
    one = torch.ones(1)
    dist.all_reduce(one, group=parallel_state.get_data_parallel_group())
    model.forward_backward(1, data_seed=0)
    assert (float(one), len(held)) == (2.0, 1)


@on_ranks(2)
def test_gathers_in_flight_end():
    model = built(applied=False, overlap_param_gather=True)
    (chunk,) = model.chunks

    def interrupt(*_: Any) -> None:
        raise Interrupted

    def flying() -> int:
        return sum(group.param_gather_handle is not None for group in groups(model))

    hook = chunk.module.decoder.layers[0].register_forward_pre_hook(interrupt)
    with pytest.raises(Interrupted):
        model.forward_backward(1, data_seed=0)
    hook.remove()
    assert flying() > 0
    abort(model)
    assert flying() == 0
    chunk.start_param_sync()  # asserts that nothing is under way


@on_ranks(2)
def test_zeroing_waits_for_a_reduction_that_a_peer_has_not_started():
    import time

    model = built(["reduction-outlives-its-window"], distributed_optimizer=False)
    (chunk,) = model.chunks
    for buffer in chunk.buffers:
        buffer.grad_data.fill_(1.0)
    if dist.get_rank() == 1:
        time.sleep(0.3)
    for group in chunk.bucket_groups:
        group.start_grad_sync()
    chunk.zero_grad_buffer()
    dist.barrier()
    time.sleep(0.3)  # for what would still be written
    assert not model.gradients().any()


# State beside the gradients.


@on_ranks(1)
def test_timers_of_the_window_stop_and_those_of_the_caller_run_on():
    from megatron.core.timers import Timers

    model = built(applied=False, overlap_grad_reduce=False)
    model.config.timers = Timers(2, "minmax")
    model.config.timers("rollout", log_level=0).start()
    _aborted(model)

    def running() -> set[str]:
        return {name for name, timer in model.config.timers._timers.items() if timer._started}

    assert "forward-backward" in running()
    abort(model)
    assert running() == {"rollout"}
    model.forward_backward(2, data_seed=0)


@on_ranks(1)
def test_every_timer_of_megatron_core_is_known():
    import pathlib

    import megatron.core

    from megatron_idempotent.window.abort import WINDOW_TIMERS

    name = re.compile(r"""timers\(\s*['"]([^'"]+)['"]""")
    folder = pathlib.Path(megatron.core.__file__).parent
    found = {each for path in folder.rglob("*.py") for each in name.findall(path.read_text())}
    assert len(found) > 15
    assert found <= set(WINDOW_TIMERS)


_TRACKER = "get_moe_layer_wise_logging_tracker"


@on_ranks(2)
def test_tokens_and_losses_of_experts_are_forgotten():
    import sys

    overrides = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    model = built(applied=False, experts=4, overlap_grad_reduce=False, config_overrides=overrides)
    _aborted(model)

    def counted() -> tuple[float, float]:
        """Tokens counted, and auxiliary losses logged."""
        counts = (getattr(m, "local_tokens_per_expert", None) for m in model.chunks[0].modules())
        tokens = sum(float(each.sum()) for each in counts if each is not None)
        logging = sys.modules.get("megatron.core.transformer.moe.moe_logging")
        if logging is not None:
            logged = [entry.values for entry in logging.get_moe_metrics_tracker().metrics.values()]
        else:
            from megatron.core import parallel_state
            from megatron.core.transformer.moe import moe_utils

            home = moe_utils if hasattr(moe_utils, _TRACKER) else parallel_state
            logged = [entry["values"] for entry in getattr(home, _TRACKER)().values()]
        return tokens, sum(float(values.abs().sum()) for values in logged)

    assert all(value > 0 for value in counted())
    abort(model)
    assert counted() == (0.0, 0.0)


@on_ranks(1)
def test_deferred_gradients_and_replayed_routings_are_dropped():
    import types

    model = built(applied=False)
    inner = model.chunks[0].module
    inner.embedding_activation_buffer, inner.grad_output_buffer = ["activation"], ["gradient"]
    inner.router_replay = types.SimpleNamespace(replay_backward_list=["routing"])
    lists = [inner.embedding_activation_buffer, inner.grad_output_buffer]
    abort(model)
    assert [*lists, inner.router_replay.replay_backward_list] == [[], [], []]


@on_ranks(2)
def test_overlapped_shared_experts_start_over():
    """A window is right after one that ended between pieces of a layer."""
    overrides = {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True}
    model = built(applied=False, experts=4, overlap_grad_reduce=False, config_overrides=overrides)
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
    assert same(model.gradients(), expected)


@on_ranks(1)
def test_the_state_machine_waits_for_a_step_and_nothing_is_recomputed():
    from megatron.core import rerun_state_machine
    from megatron.core.tensor_parallel import random

    model = built(applied=False)
    abort(model)
    assert rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE is None
    machine = rerun_state_machine.get_rerun_state_machine()
    before = machine.current_iteration
    assert machine.should_run_forward_backward(None)
    random.IS_CHECKPOINTING = True
    abort(model)
    abort(model)
    assert (machine.state.name, machine.current_iteration) == ("NOT_RUNNING_YET", before)
    assert not (hasattr(random, "is_checkpointing") and random.is_checkpointing())


# Tokens that the routers counted in an aborted window.
GLOBAL_LOSS = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0}


@pytest.mark.parametrize("overrides", [EXPERT_BIAS, GLOBAL_LOSS], ids=["bias", "global-loss"])
@on_ranks(2)
def test_the_next_window_counts_its_own_tokens_only_but_on_stock(overrides):
    def window(recovery: str, *, aborted: bool = True) -> list[str] | None:
        """Digests of the gradients and of all expert biases; None where there is no such loss."""
        model = built(
            applied=recovery == "patches",
            experts=4,
            overlap_grad_reduce=False,
            config_overrides=overrides,
        )
        names = ("local_tokens_per_expert", "global_tokens_per_expert")
        counted = [
            module
            for module in model.chunks[0].modules()
            if any(getattr(module, name, None) is not None for name in names)
        ]
        if aborted:
            _aborted(model)
            if recovery == "abort_window":
                abort(model)
        model.forward_backward(2, data_seed=0)
        biases = [m.expert_bias for m in counted if getattr(m, "expert_bias", None) is not None]
        values = (model.gradients(), torch.cat([torch.zeros(1), *biases]))
        return [digest(value) for value in values] if counted else None

    never, on_stock = window("none", aborted=False), window("none")
    differs = int(overrides == EXPERT_BIAS)
    assert never is None or never[differs] != on_stock[differs]
    for recovery in ("abort_window", "patches"):  # which stay
        assert window(recovery) == window(recovery, aborted=False), recovery
