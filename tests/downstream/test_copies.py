"""Frameworks' copies of Megatron's code, in our own words: what is patched, and what it mends."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
from loops import BRIDGE, SLIME, VERL, load, write

import megatron_idempotent
from megatron_idempotent.patching.source import locate
from megatron_idempotent.proof.cpu import RankError, tiny

pytestmark = pytest.mark.full

TAKEN = "config.no_sync_func is taken"
needs_training = pytest.mark.skipif(
    locate("megatron.training.training") is None,
    reason="this release's wheel does not carry megatron.training, which slime imports",
)


def apply():
    return megatron_idempotent.apply()


def status(patch_id: str) -> str:
    from megatron_idempotent import report

    return report()[patch_id].status


def build(**options):
    model = tiny.build(**options)
    model.config.no_sync_func = None  # it is for the framework to set
    return model


def with_args(**options: object) -> None:
    """Megatron's global arguments, which slime's loop reads."""
    from megatron.training import global_vars

    off = {"align_param_gather": False, "manual_gc": False, "overlap_param_gather": False}
    global_vars.set_args(SimpleNamespace(**{**off, "overlap_grad_reduce": True, **options}))


def without_a_statement(folder: str, module: str, statement: str, patch_id: str) -> str:
    write(Path(folder), module, without=statement)
    apply()
    load(module)
    return status(patch_id)


@pytest.mark.parametrize(
    ("module", "statement", "patch_id", "expected"),
    [
        (VERL, "config = get_model_config(one_model)", "verl-wiring-reentry", "drifted"),
        (
            VERL,
            'assert config.no_sync_func is None, "config.no_sync_func is taken"',
            "verl-wiring-reentry",
            "fixed_upstream",
        ),
        (
            BRIDGE,
            "model_config.no_sync_func = [model_chunk.no_sync for model_chunk in model]",
            "bridge-setup-reentry",
            "drifted",
        ),
    ],
)
def test_the_statements_decide(module, statement, patch_id, expected, tmp_path, megatron_ranks):
    found = megatron_ranks(1, without_a_statement, str(tmp_path), module, statement, patch_id)
    assert found == [expected]


def wired(folder: str, times: int, applied: bool, vpp: int | None) -> list[list[bool]]:
    """Runs on a rank: verl's wiring, run so often; is each chunk's own no_sync in place?"""
    write(Path(folder), VERL)
    if applied:
        apply()
    model = build(pp=2 if vpp else 1, vpp=vpp)
    verl = load(VERL)
    for _ in range(times):
        verl.register_megatron_training_hooks(model.chunks, model.optimizer)
    installed = model.config.no_sync_func
    functions = installed if isinstance(installed, list) else [installed]
    both = zip(functions, model.chunks, strict=True)
    return [
        [function.__self__ is chunk for function, chunk in both],
        [chunk.config is model.config for chunk in model.chunks],
    ]


@pytest.mark.parametrize(("times", "vpp"), [(1, 2), (2, None), (3, 2)])
def test_verls_wiring_takes_chunks_that_share_a_config_and_takes_them_again(
    times, vpp, tmp_path, megatron_ranks
):
    with pytest.raises(RankError, match=TAKEN):
        megatron_ranks(2, wired, str(tmp_path), times, False, vpp)
    chunks = vpp or 1
    expected = [[True] * chunks, [True] * chunks]
    assert megatron_ranks(2, wired, str(tmp_path), times, True, vpp) == [expected] * 2


def set_up_again(folder: str, applied: bool) -> tuple[bool, bytes]:
    """Runs on a rank: a second model on the config of the first; the second one's gradients."""
    write(Path(folder), BRIDGE)
    if applied:
        apply()
    setup = load(BRIDGE)
    model = build()
    setup._update_model_config_funcs(model.chunks, model.config, model.chunks[0].ddp_config)
    model.forward_backward(3, data_seed=0)
    second = build()
    (chunk,) = second.chunks
    config = second.config
    config.no_sync_func = model.config.no_sync_func  # as on one config, the caller's
    setup._update_model_config_funcs(second.chunks, config, chunk.ddp_config)
    second.forward_backward(3, data_seed=1)
    return config.no_sync_func.__self__ is chunk, second.gradients().numpy().tobytes()


def straight(folder: str) -> bytes:
    """Runs on a rank: the second model's gradients where there was no first one."""
    model = build()
    model.config.no_sync_func = model.chunks[0].no_sync
    model.forward_backward(3, data_seed=1)
    return model.gradients().numpy().tobytes()


def test_a_second_setup_on_one_config_belongs_to_the_second_model(tmp_path, megatron_ranks):
    with pytest.raises(RankError, match=TAKEN):
        megatron_ranks(2, set_up_again, str(tmp_path), False)
    found = megatron_ranks(2, set_up_again, str(tmp_path), True)
    expected = megatron_ranks(2, straight, str(tmp_path))
    assert found == [(True, gradients) for gradients in expected]


def with_a_custom_no_sync(folder: str, module: str) -> None:
    """Runs on a rank: somebody's own `no_sync_func` in the config."""
    from contextlib import nullcontext

    write(Path(folder), module)
    apply()
    model = build()
    model.config.no_sync_func = nullcontext
    if module == BRIDGE:
        load(module)._update_model_config_funcs(
            model.chunks, model.config, model.chunks[0].ddp_config
        )
    elif module == VERL:
        load(module).register_megatron_training_hooks(model.chunks, model.optimizer)
    else:
        with_args()
        load(module).train(model.chunks, [])


@pytest.mark.parametrize("module", [BRIDGE, VERL, pytest.param(SLIME, marks=needs_training)])
def test_a_custom_no_sync_func_still_meets_the_frameworks_assertion(
    module, tmp_path, megatron_ranks
):
    with pytest.raises(RankError, match=TAKEN):
        megatron_ranks(2, with_a_custom_no_sync, str(tmp_path), module)


def rollouts(folder: str, calls: tuple[int, ...], applied: bool) -> bytes:
    """Runs on a rank: slime's loop in our words around a tiny model; the parameters after it."""
    write(Path(folder), SLIME)
    if applied:
        apply()
    model = build()
    with_args()
    seeds = iter(range(sum(calls)))

    def step() -> None:
        model.train_step(3, data_seed=next(seeds))

    for steps in calls:
        load(SLIME).train(model.chunks, [step] * steps)
    return model.bits()


@needs_training
def test_slimes_loop_called_again_equals_one_long_call(tmp_path, megatron_ranks):
    with pytest.raises(RankError, match=TAKEN):
        megatron_ranks(2, rollouts, str(tmp_path), (1, 1), False)
    apart = megatron_ranks(2, rollouts, str(tmp_path), (1, 2, 1), True)
    assert apart == megatron_ranks(2, rollouts, str(tmp_path), (4,), True)
    assert apart != megatron_ranks(2, rollouts, str(tmp_path), (3,), True)


def left_behind(folder: str, applied: bool, align: bool) -> tuple[bool, bool]:
    """Runs on a rank: the collector and param_sync_func after a rollout whose first step raised."""
    write(Path(folder), SLIME)
    if applied:
        apply()
    model = build(overlap_param_gather=True)
    (chunk,) = model.chunks
    with_args(overlap_param_gather=True, align_param_gather=align, manual_gc=True)
    model.config.param_sync_func = None if align else chunk.start_param_sync

    def step() -> None:
        raise ValueError("bad data")

    with pytest.raises(ValueError, match="bad data"):
        load(SLIME).train(model.chunks, [step])
    return gc.isenabled(), model.config.param_sync_func == chunk.start_param_sync


@needs_training
@pytest.mark.parametrize("align", [False, True])
def test_slimes_loop_leaves_collector_and_param_sync_func_where_a_step_raised(
    align, tmp_path, megatron_ranks
):
    assert megatron_ranks(2, left_behind, str(tmp_path), False, align) == [(False, False)] * 2
    assert megatron_ranks(2, left_behind, str(tmp_path), True, align) == [(True, True)] * 2
