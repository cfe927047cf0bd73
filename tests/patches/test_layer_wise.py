"""Muon's layer-wise optimizer: every reader of a parameter gets what a run without overlap has."""

from __future__ import annotations

import functools
import importlib.util
import warnings

import pytest
from megatron_idempotent.patches import _case
from ranks import VIRTUAL, digest, on_ranks, same

import megatron_idempotent
from megatron_idempotent.patching import releases
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.source import locate
from megatron_idempotent.proof.cpu import tiny

STALE, ERASED = "layerwise-params-stale-after-step", "layerwise-gather-erases-gradients"
INSTALLED = releases.installed("megatron-core")
assert INSTALLED is not None, "the tests need a Megatron"


def affects(patch_id: str) -> bool:
    patch = patches()[patch_id]
    return releases.supported(INSTALLED, patch.since, patch.before)


pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not affects(STALE),
        reason=f"megatron-core {INSTALLED.text} leaves no layer-wise gather pending",
    ),
]
SOURCE = locate("megatron.core.optimizer.layer_wise_optimizer")
#: A development commit says the release that it leads to.
TEXT = "" if SOURCE is None else SOURCE.read_text()
FORGETS_CHUNKS = "self.model_chunks = " not in TEXT
needs_layout = pytest.mark.skipif(
    not affects(ERASED) or "def compute_full_param_layout" not in TEXT,
    reason=f"megatron-core {INSTALLED.text} gathers into memory of its own",
)
needs_muon = pytest.mark.skipif(
    importlib.util.find_spec("emerging_optimizers") is None,
    reason="Muon is in emerging-optimizers, which is not installed",
)
LISTS = {"distributed_optimizer": False}
EXPERTS = {"experts": 2}
MUON = {"optimizer_overrides": {"optimizer": "muon"}}
EXHAUSTIVE = pytest.mark.exhaustive
PLAIN = [pytest.param(2, {}, id="layout", marks=needs_layout), pytest.param(2, LISTS, id="lists")]
KINDS = [
    # With Muon there is a layout too, and a DistributedOptimizer beside it.
    pytest.param(2, {}, id="layout", marks=needs_layout),
    PLAIN[1],
    pytest.param(2, MUON, id="muon-layout", marks=[needs_layout, needs_muon]),
    pytest.param(4, EXPERTS | {"ep": 2}, id="layout-ep2", marks=[needs_layout, EXHAUSTIVE]),
    pytest.param(2, LISTS | EXPERTS, id="lists-experts", marks=EXHAUSTIVE),
    pytest.param(4, VIRTUAL, id="layout-virtual-stages", marks=[needs_layout, EXHAUSTIVE]),
    pytest.param(2, LISTS | MUON, id="muon-lists", marks=[needs_muon, EXHAUSTIVE]),
]


def built(kind: dict, *, overlap: bool = True):
    """A bench after a window."""
    model = tiny.build(dtype="bf16", layer_wise=True, overlap_param_gather=overlap, **kind)
    model.forward_backward(2, data_seed=0)
    return model


def look(model) -> None:
    model.forward_backward(2, data_seed=2, forward_only=True)


def start(model, overlap: bool) -> None:
    for chunk in model.chunks if overlap else ():
        chunk.start_param_sync()


def hooks_off(model, overlap: bool, **how) -> None:
    for chunk in model.chunks if overlap else ():
        chunk.disable_forward_pre_hook(**how)


def synced(model, overlap: bool) -> None:
    assert (megatron_idempotent.ensure_params_synced(model.chunks) > 0) == overlap
    assert megatron_idempotent.ensure_params_synced(model.chunks) == 0


# Programs after a window; they may read parameters that a step has written elsewhere.


def forward_before_the_step(model, overlap: bool) -> None:
    model.forward_backward(2, data_seed=1, forward_only=True)
    model.step()
    look(model)


def hooks_off_and_on_before_the_step(model, overlap: bool) -> None:
    hooks_off(model, overlap)
    for chunk in model.chunks if overlap else ():
        chunk.enable_forward_pre_hook()
    model.step()
    look(model)


def synced_before_the_step(model, overlap: bool) -> None:
    megatron_idempotent.ensure_params_synced(model.chunks)
    model.step()
    synced(model, overlap)


def export(model, overlap: bool) -> None:
    model.step()
    synced(model, overlap)


def save(model, overlap: bool) -> None:
    model.step()
    _case.begin_save(
        {str(i): chunk.module.sharded_state_dict() for i, chunk in enumerate(model.chunks)}
    )


def hooks_off_with_an_update_pending(model, overlap: bool) -> None:
    model.step()
    hooks_off(model, overlap, param_sync=False)
    model.train_step(2, data_seed=1)
    look(model)


def forced_with_a_gather_in_flight(model, overlap: bool) -> None:
    model.step()
    start(model, overlap)
    hooks_off(model, overlap)


def stepped_with_a_gather_in_flight(model, overlap: bool) -> None:
    model.step()
    model.forward_backward(2, data_seed=1)
    start(model, overlap)
    model.step()
    look(model)


def zeroed_with_a_gather_in_flight(model, overlap: bool) -> None:
    model.step()
    start(model, overlap)
    model.forward_backward(2, data_seed=1)


#: They ask what is pending, which nobody watches on stock.
OF_THE_HELPER = [synced_before_the_step, export]
PROGRAMS = [
    *(forward_before_the_step, hooks_off_and_on_before_the_step, save),
    *(hooks_off_with_an_update_pending, forced_with_a_gather_in_flight),
    *(stepped_with_a_gather_in_flight, zeroed_with_a_gather_in_flight),
]
#: On stock a program that runs these reads something else than a run without overlap has.
WRONG_ON_STOCK = {"forward_before_the_step", "save", "hooks_off_with_an_update_pending"}


def parameters_after(kind: dict, *, overlap: bool, applied: bool) -> dict[str, str]:
    """Runs on a rank: digests of the parameters that each of the programs leaves."""
    if applied:
        megatron_idempotent.apply(strict=True)
    found = {}
    for program in [*PROGRAMS, *(OF_THE_HELPER if applied else ())]:
        model = built(kind, overlap=overlap)
        program(model, overlap)
        found[program.__name__] = digest(model.parameters())
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


@pytest.mark.parametrize(("ranks", "kind"), PLAIN)
@on_ranks("ranks")
def test_the_watch_on_another_optimizer_is_not_believed(kind):
    """Ranks agree after a step and the call, with all patches but these two."""
    megatron_idempotent.apply(exclude=[STALE, ERASED])
    model = built(kind)
    model.step()
    for _ in range(2):
        assert megatron_idempotent.ensure_params_synced(model.chunks) > 0
        _case.expect_agreement(model, "after the call")


@needs_layout
@on_ranks(2)
def test_keeping_a_gather_back_leaves_nothing_stale():
    """One of the two patches alone: what it keeps back, a step has to make up for."""
    found = []
    for overlap in (False, True):
        with megatron_idempotent.patched([ERASED] if overlap else []):
            model = built(LISTS, overlap=overlap)
            forward_before_the_step(model, overlap)
            found.append(model.parameters())
    assert same(*found)


@needs_layout
@on_ranks(2)
def test_gradients_of_the_first_window_of_all_outlive_the_call():
    """It gathers nothing before the first step, the hooks off."""
    megatron_idempotent.apply(strict=True)
    model = tiny.build(dtype="bf16", layer_wise=True, overlap_param_gather=True, **LISTS)
    hooks_off(model, True, param_sync=False)
    model.forward_backward(2, data_seed=0)
    reduced = model.gradients()
    assert megatron_idempotent.ensure_params_synced(model.chunks) == 0
    assert same(model.gradients(), reduced)


@on_ranks(2)
def test_an_optimizer_that_forgot_its_chunks_is_named_once():
    """The patches are applied after it was built."""
    model = built(LISTS)
    megatron_idempotent.apply(only=[STALE])
    said = []
    for seed in range(2):
        model.forward_backward(1, data_seed=seed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.step()
        said += [str(w.message) for w in caught if "LayerWise" in str(w.message)]
    assert len(said) == FORGETS_CHUNKS, said
