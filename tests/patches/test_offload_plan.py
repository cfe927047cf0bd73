"""Windows from which activation offload takes its plan, on real ranks."""

from __future__ import annotations

import contextlib
import io

import pytest
from ranks import VIRTUAL, built, digest, fails, needs_release, on_microbatch

import megatron_idempotent
from megatron_idempotent.proof.cpu import tiny

needs_release((0, 16), "fine-grained activation offload came with 0.16")

pytestmark = pytest.mark.full

ID = "offload-plan-mislearned"


class Interrupted(Exception):
    pass


def run(program: str, patched: bool, offload: bool, layout: dict) -> list[tuple[str, int]]:
    """Runs on a rank: gradients, and tensors offloaded, of each training window of the program.

    T2: training with two microbatches. F2, E2: forward-only, in train and in eval mode. R2: that of
    a second model. N2: two calls without a schedule. A2: training that raises in its last loss.
    """
    import torch
    from megatron_idempotent.patches import offload_plan_mislearned as case

    if patched:
        megatron_idempotent.apply(only=[ID])

    def build(**how):
        plain = {"applied": False, "with_optimizer": False, **how}
        return case.offloading(**how) if offload else built(**plain)

    training = []
    with contextlib.redirect_stdout(io.StringIO()):
        model = build(**layout)
        for kind, count in program.split():
            microbatches = int(count)
            before = case.offloaded() if offload else 0
            if kind == "T":
                model.forward_backward(microbatches, data_seed=1)
                moved = case.offloaded() - before if offload else 0
                training.append((digest(model.gradients()), moved))
            elif kind == "A":
                hook = fails(Interrupted(), microbatches - 1, in_loss=True)
                with on_microbatch(model, hook), pytest.raises(Interrupted):
                    model.forward_backward(microbatches, data_seed=3)
            elif kind == "N":
                with torch.no_grad():
                    for _ in range(microbatches):
                        model.chunks[0](*tiny.inputs(2))
            else:
                other = build(**layout, seed=9) if kind == "R" else model
                for chunk in other.chunks:
                    chunk.train(kind != "E")
                other.forward_backward(microbatches, data_seed=2, forward_only=True)
                for chunk in other.chunks:
                    chunk.train()
    return training


@pytest.fixture(scope="module")
def alone(megatron_rank_pool):
    """Return what two training windows offload on stock, with nothing else around them."""
    (found,) = megatron_rank_pool.run(1, run, "T2 T2", False, True, {})
    assert all(count for _, count in found)
    return [found]


FIRST = ["E2 T2 T2", "F1 T2 T2", "R2 T2 T2", "N1 T2 T2", "A2 T2 T2"]
LATER = ["T2 F2 T2", "T2 E1 T2", "T2 N1 T2", "T2 A2 T2"]


@pytest.mark.parametrize("program", FIRST + LATER)
def test_training_windows_offload_as_if_they_were_alone(program, alone, megatron_ranks):
    assert megatron_ranks(1, run, program, True, True, {}) == alone


@pytest.mark.parametrize("layout", [{"pp": 2}, VIRTUAL, {"experts": 2, "ep": 2}], ids=str)
@pytest.mark.parametrize(
    "program", ["E2 T4 F2 T4", pytest.param("T4 E4 T4", marks=pytest.mark.exhaustive)]
)
def test_gradients_are_those_without_offload_in_every_layout(program, layout, megatron_ranks):
    alone = megatron_ranks(2, run, "T4 T4", False, True, layout)
    assert megatron_ranks(2, run, program, True, True, layout) == alone
    plain = megatron_ranks(2, run, "T4 T4", False, False, layout)
    without = [[digest for digest, _ in rank] for rank in plain]
    assert [[digest for digest, _ in rank] for rank in alone] == without


WHOLE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PART = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
RECOMPUTED = {
    "full": {"offload_modules": ["core_attn"], **WHOLE},
    "selective": {"offload_modules": ["attn_norm"], **PART},
}


@pytest.mark.parametrize("kind", RECOMPUTED)
def test_recomputed_layers_offload_as_before(kind, megatron_ranks):
    """Their first forward has no gradients either, but belongs to training."""
    layout = {"config_overrides": RECOMPUTED[kind]}
    alone = megatron_ranks(1, run, "T2 T2", False, True, layout)
    assert all(count for _, count in alone[0])
    for program in ("E1 T2 T2", "T2 E1 T2"):
        assert megatron_ranks(1, run, program, True, True, layout) == alone
