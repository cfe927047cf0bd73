"""Muon's layer-wise optimizer: every reader of a parameter gets what a run without overlap has."""

from __future__ import annotations

import functools
import importlib.util

import pytest

from megatron_idempotent.patching import decide
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.source import locate

STALE, ERASED = "layerwise-params-stale-after-step", "layerwise-gather-erases-gradients"
INSTALLED = decide.installed("megatron-core")
assert INSTALLED is not None, "the tests need a Megatron"


def affects(patch_id: str) -> bool:
    patch = patches()[patch_id]
    return decide.supported(INSTALLED, patch.since, patch.before)


pytestmark = pytest.mark.skipif(
    not affects(STALE), reason=f"megatron-core {INSTALLED.text} leaves no layer-wise gather pending"
)
SOURCE = locate("megatron.core.optimizer.layer_wise_optimizer")
#: A development commit says the release that it leads to.
TEXT = "" if SOURCE is None else SOURCE.read_text()
HAS_LAYOUT = "def compute_full_param_layout" in TEXT
FORGETS_CHUNKS = "self.model_chunks = " not in TEXT
needs_layout = pytest.mark.skipif(
    not affects(ERASED) or not HAS_LAYOUT,
    reason=f"megatron-core {INSTALLED.text} gathers into memory of its own",
)
needs_muon = pytest.mark.skipif(
    importlib.util.find_spec("emerging_optimizers") is None,
    reason="Muon is in emerging-optimizers, which is not installed",
)
LISTS = {"distributed_optimizer": False}
EXPERTS = {"experts": 2}
VIRTUAL = {"pp": 2, "vpp": 2, "layers_per_stage": 1}
MUON = {"optimizer_overrides": {"optimizer": "muon"}}
PLAIN = [
    pytest.param(2, {}, id="layout", marks=needs_layout),
    pytest.param(2, LISTS, id="lists"),
]
KINDS = [
    # With Muon there is a layout too, and a DistributedOptimizer beside it.
    pytest.param(2, {}, id="layout", marks=[needs_layout, pytest.mark.matrix]),
    PLAIN[1],
    pytest.param(2, MUON, id="muon-layout", marks=[needs_layout, needs_muon]),
    pytest.param(
        4, EXPERTS | {"ep": 2}, id="layout-ep2", marks=[needs_layout, pytest.mark.exhaustive]
    ),
    pytest.param(2, LISTS | EXPERTS, id="lists-experts", marks=pytest.mark.exhaustive),
    pytest.param(
        4, VIRTUAL, id="layout-virtual-stages", marks=[needs_layout, pytest.mark.exhaustive]
    ),
    pytest.param(2, LISTS | MUON, id="muon-lists", marks=[needs_muon, pytest.mark.exhaustive]),
]


def built(kind: dict, *, overlap: bool = True):
    from megatron_idempotent.proof.cpu import tiny

    return tiny.build(dtype="bf16", layer_wise=True, overlap_param_gather=overlap, **kind)


def forward_before_the_step(model, overlap: bool) -> None:
    model.forward_backward(2, data_seed=1, forward_only=True)
    model.step()
    model.forward_backward(2, data_seed=2, forward_only=True)


def hooks_off_and_on_before_the_step(model, overlap: bool) -> None:
    for chunk in model.chunks if overlap else ():
        chunk.disable_forward_pre_hook()
        chunk.enable_forward_pre_hook()
    model.step()
    model.forward_backward(2, data_seed=2, forward_only=True)


def synced_before_the_step(model, overlap: bool) -> None:
    import megatron_idempotent

    megatron_idempotent.ensure_params_synced(model.chunks)
    model.step()
    assert (megatron_idempotent.ensure_params_synced(model.chunks) > 0) == overlap
    assert megatron_idempotent.ensure_params_synced(model.chunks) == 0


def export(model, overlap: bool) -> None:
    import megatron_idempotent

    model.step()
    assert (megatron_idempotent.ensure_params_synced(model.chunks) > 0) == overlap
    assert megatron_idempotent.ensure_params_synced(model.chunks) == 0


def save(model, overlap: bool) -> None:
    import contextlib
    import tempfile

    from megatron.core import dist_checkpointing

    class Looked(Exception):
        pass

    def look(_):
        raise Looked

    model.step()
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Looked):
        dist_checkpointing.save(
            {str(i): chunk.module.sharded_state_dict() for i, chunk in enumerate(model.chunks)},
            folder,
            preprocess_common_before_consistancy_check=look,
        )
        raise AssertionError("save() did not validate what it was given")


def hooks_off_with_an_update_pending(model, overlap: bool) -> None:
    model.step()
    for chunk in model.chunks if overlap else ():
        chunk.disable_forward_pre_hook(param_sync=False)
    model.forward_backward(2, data_seed=1)
    model.step()
    model.forward_backward(2, data_seed=2, forward_only=True)


def forced_with_a_gather_in_flight(model, overlap: bool) -> None:
    model.step()
    for chunk in model.chunks if overlap else ():
        chunk.start_param_sync()
        chunk.disable_forward_pre_hook()


def stepped_with_a_gather_in_flight(model, overlap: bool) -> None:
    model.step()
    model.forward_backward(2, data_seed=1)
    for chunk in model.chunks if overlap else ():
        chunk.start_param_sync()
    model.step()
    model.forward_backward(2, data_seed=2, forward_only=True)


def zeroed_with_a_gather_in_flight(model, overlap: bool) -> None:
    model.step()
    for chunk in model.chunks if overlap else ():
        chunk.start_param_sync()
    model.forward_backward(2, data_seed=1)


PROGRAMS = [
    forward_before_the_step,
    hooks_off_and_on_before_the_step,
    synced_before_the_step,
    export,
    save,
    hooks_off_with_an_update_pending,
    forced_with_a_gather_in_flight,
    stepped_with_a_gather_in_flight,
    zeroed_with_a_gather_in_flight,
]
#: They ask what is pending, which nobody watches on stock.
OF_THE_HELPER = [synced_before_the_step, export]
#: On stock a program that runs these reads something else than a run without overlap has.
WRONG_ON_STOCK = {"forward_before_the_step", "save", "hooks_off_with_an_update_pending"}


def parameters_after(kind: dict, *, overlap: bool, applied: bool) -> dict[str, list[float]]:
    """Runs on a rank: the parameters that each of the programs leaves."""
    import megatron_idempotent

    if applied:
        megatron_idempotent.apply(strict=True)
    found = {}
    for program in PROGRAMS:
        if not applied and program in OF_THE_HELPER:
            continue
        model = built(kind, overlap=overlap)
        model.forward_backward(2, data_seed=0)
        program(model, overlap)
        found[program.__name__] = model.parameters().tolist()
    return found


def deviating(have: list[dict], want: list[dict]) -> set[str]:
    """The programs that left other parameters on any rank."""
    return {name for h, w in zip(have, want, strict=True) for name in h if h[name] != w[name]}


@pytest.mark.parametrize(("ranks", "kind"), KINDS)
def test_every_rank_reads_what_a_run_without_overlap_has(ranks, kind, megatron_ranks):
    run = functools.partial(megatron_ranks, ranks, parameters_after, kind, timeout_s=120)
    want = run(overlap=False, applied=True)
    assert not deviating(run(overlap=True, applied=True), want)
    assert deviating(run(overlap=True, applied=False), want) >= WRONG_ON_STOCK


def known_to_others(kind: dict) -> tuple[bool, bool]:
    """Runs on a rank: agreement after a step and the call, with all patches but these two."""
    from megatron_idempotent.patches import _scenarios

    import megatron_idempotent

    megatron_idempotent.apply(exclude=[STALE, ERASED])
    model = built(kind)
    model.forward_backward(2, data_seed=0)
    model.step()
    gathered = megatron_idempotent.ensure_params_synced(model.chunks)
    _scenarios.expect_agreement(model, "after the call")
    return gathered > 0, megatron_idempotent.ensure_params_synced(model.chunks) > 0


@pytest.mark.parametrize(("ranks", "kind"), PLAIN)
def test_the_watch_on_another_optimizer_is_not_believed(ranks, kind, megatron_ranks):
    assert megatron_ranks(ranks, known_to_others, kind) == [(True, True)] * ranks


def erased_alone() -> list[float]:
    """Runs on a rank: one of the two patches; what it keeps back, a step has to make up for."""
    import megatron_idempotent

    megatron_idempotent.apply(only=[ERASED])
    model = built(LISTS)
    model.forward_backward(2, data_seed=0)
    forward_before_the_step(model, overlap=True)
    return model.parameters().tolist()


def without_overlap() -> list[float]:
    """Runs on a rank: the same on stock."""
    model = built(LISTS, overlap=False)
    model.forward_backward(2, data_seed=0)
    forward_before_the_step(model, overlap=False)
    return model.parameters().tolist()


@needs_layout
def test_keeping_a_gather_back_leaves_nothing_stale(megatron_ranks):
    assert megatron_ranks(2, erased_alone) == megatron_ranks(2, without_overlap)


def synced_before_any_gather() -> tuple[int, bool]:
    """Runs on a rank: bucket groups that the call gathers before the first step, the hooks off."""
    import torch

    import megatron_idempotent

    megatron_idempotent.apply(strict=True)
    model = built(LISTS)
    model.chunks[0].disable_forward_pre_hook(param_sync=False)
    model.forward_backward(2, data_seed=0)
    reduced = model.gradients()
    gathered = megatron_idempotent.ensure_params_synced(model.chunks)
    return gathered, torch.equal(model.gradients(), reduced)


@needs_layout
def test_gradients_of_the_first_window_of_all_outlive_the_call(megatron_ranks):
    assert megatron_ranks(2, synced_before_any_gather) == [(0, True)] * 2


def late(kind: dict) -> list[str]:
    """Runs on a rank: the warnings of two steps, with the patches applied after the optimizer."""
    import warnings

    import megatron_idempotent

    model = built(kind)
    megatron_idempotent.apply(only=[STALE])
    said = []
    for seed in range(2):
        model.forward_backward(1, data_seed=seed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.step()
        said += [str(w.message) for w in caught if "LayerWise" in str(w.message)]
    return said


def test_an_optimizer_that_forgot_its_chunks_is_named_once(megatron_ranks):
    for said in megatron_ranks(2, late, LISTS):
        assert len(said) == FORGETS_CHUNKS, said
