"""Random programs over a model: overlapped parameter gathers change no bit that anybody reads."""

from __future__ import annotations

import random

import pytest
import torch
from ranks import VIRTUAL

from megatron_idempotent.patching import OPEN, releases

INSTALLED = releases.installed("megatron-core")
assert INSTALLED is not None, "the tests need a Megatron"
pytestmark = pytest.mark.exhaustive

OPERATIONS = (
    *("window", "window", "forward_only", "forward_only", "step", "step", "step", "zero"),
    *("disable_with_sync", "disable_without_sync", "enable", "start", "start_with_force"),
    *("ensure", "read", "save", "load", "abort"),
)
LENGTH = 24


class Aborted(Exception):
    """A bad sample, on all ranks alike."""


def run_program(operations: list[tuple[str, int]], *, overlap: bool, **layout) -> list:
    """Runs on a rank: everything that the program read, in order.

    `overlap` switches overlap_param_gather; what concerns the gathers alone does nothing without.
    """

    from megatron_idempotent import ensure_params_synced
    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build(overlap_param_gather=overlap, **layout)
    seen: list = []
    saved = None

    def middle(*_):
        raise Aborted

    for operation, draw in operations:
        if operation == "window":
            seen.append(model.forward_backward(2 + 2 * (draw % 2), data_seed=draw))
        elif operation == "forward_only":
            seen.append(model.forward_backward(2, data_seed=draw, forward_only=True))
        elif operation == "step":
            success, norm, _ = model.step()
            seen.append((success, float(norm)))
        elif operation == "zero":
            for chunk in model.chunks:
                chunk.zero_grad_buffer()
        elif operation == "read":
            ensure_params_synced(model.chunks)
            seen.append(model.parameters())
        elif operation == "save":
            ensure_params_synced(model.chunks)
            saved = [
                {k: v.clone() for k, v in chunk.state_dict().items() if torch.is_tensor(v)}
                for chunk in model.chunks
            ]
        elif operation == "load" and saved is not None:
            ensure_params_synced(model.chunks)
            for chunk, state in zip(model.chunks, saved, strict=True):
                chunk.load_state_dict(state, strict=False)
        elif operation == "abort" and len(model.chunks) == 1:  # or the pipeline would hang
            layers = [m for c in model.chunks for m in c.modules() if hasattr(m, "self_attention")]
            handle = layers[draw % len(layers)].register_forward_hook(middle)
            with pytest.raises(Aborted):
                model.forward_backward(2, data_seed=draw, forward_only=bool(draw % 2))
            handle.remove()
        elif operation == "ensure":
            ensure_params_synced(model.chunks)
        elif overlap and operation in GATHERS:
            for chunk in model.chunks:
                GATHERS[operation](chunk)
    ensure_params_synced(model.chunks)
    return [*seen, model.parameters()]


#: What a program may do to the gathers of one chunk at any time.
GATHERS = {
    "disable_with_sync": lambda chunk: chunk.disable_forward_pre_hook(),
    "disable_without_sync": lambda chunk: chunk.disable_forward_pre_hook(param_sync=False),
    "enable": lambda chunk: chunk.enable_forward_pre_hook(),
    "start": lambda chunk: chunk.start_param_sync(),
    "start_with_force": lambda chunk: chunk.start_param_sync(force_sync=True),
}


def draw_program(seed: int) -> list[tuple[str, int]]:
    """The same on all ranks."""
    generator = random.Random(seed)
    return [(generator.choice(OPERATIONS), generator.randrange(100)) for _ in range(LENGTH)]


def with_fresh_gradients(operations: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Without the steps that have no window's gradients of their own.

    Gathers by lists take the gradients' memory, and where these were used or belong to no window
    nothing keeps them.
    """
    kept = []
    fresh = False
    for operation in operations:
        if operation[0] != "step" or fresh:
            kept.append(operation)
        if operation[0] in ("window", "step", "zero", "abort"):
            fresh = operation[0] == "window"
    return kept


def deviations(seeds: list[int], layout: dict) -> list[str]:
    """Runs on a rank: the programs whose reads differ from those without overlap_param_gather."""

    import megatron_idempotent

    megatron_idempotent.apply()
    found = []
    for seed in seeds:
        operations = draw_program(seed)
        if layout.get("layer_wise") and not layout.get("distributed_optimizer", True):
            operations = with_fresh_gradients(operations)
        plain = run_program(operations, overlap=False, **layout)
        overlapped = run_program(operations, overlap=True, **layout)
        for index, (want, have) in enumerate(zip(plain, overlapped, strict=True)):
            same = torch.equal(want, have) if torch.is_tensor(want) else want == have
            if not same:
                found.append(f"seed {seed}, read {index}: {operations}")
                break
    return found


LAYOUTS = {
    "fp32": (2, {}, range(8)),
    "bf16": (2, {"dtype": "bf16"}, range(10, 14)),
    "experts": (2, {"experts": 2}, range(20, 22)),
    "expert-parallel": (4, {"experts": 2, "ep": 2}, range(30, 32)),
    "virtual-stages": (4, VIRTUAL, range(40, 43)),
    "aligned": (4, {**VIRTUAL, "align": True}, range(50, 53)),
    **{
        name: (2, {"dtype": "bf16", "layer_wise": True, **options}, seeds)
        for name, options, seeds, since in (
            ("layer-wise", {}, range(60, 64), "0.18"),
            ("layer-wise-lists", {"distributed_optimizer": False}, range(70, 78), "0.17"),
        )
        if releases.supported(INSTALLED, since, OPEN)
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_the_program_does_it_reads_what_it_reads_without_overlap(layout, megatron_ranks):
    ranks, options, seeds = LAYOUTS[layout]
    results = megatron_ranks(ranks, deviations, list(seeds), options, timeout_s=120)
    assert results == [[]] * ranks
