"""Weights that are loaded beside an optimizer on the host. Checkpoints: test_checkpoint_step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import built, on_ranks, same

pytestmark = pytest.mark.full


def offload(fraction: float, *, precise: bool = False) -> dict[str, Any]:
    return {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": fraction,
        "use_precision_aware_optimizer": precise,
        "overlap_cpu_optimizer_d2h_h2d": True,
    }


#: Layouts, and overrides with which a layout has to have the same bits. On the host torch's fused
#: Adam steps, which rounds otherwise than the one of an optimizer that is not hybrid.
KINDS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"dtype": "bf16"}, [offload(0.0), offload(0.5), offload(1.0), offload(0.5, precise=True)]),
    ({"dtype": "bf16"}, [{}]),
    ({"dtype": "bf16", "distributed_optimizer": False}, [{}]),
    ({"dtype": "bf16", "experts": 2}, [offload(0.5)]),  # a chain of two
    ({"distributed_optimizer": False}, [offload(0.0), offload(0.5), offload(1.0)]),
]


def advance(model: Any, data_seed: int) -> Any:
    model.train_step(2, data_seed=data_seed)
    return model.parameters()


@on_ranks(2)
def test_weights_that_are_written_are_what_the_next_step_starts_from():
    """Through Megatron's call and through ours, with every optimizer that has copies."""

    from megatron_idempotent import ensure_main_params_synced

    for layout, overrides in KINDS:
        found = {}
        for number, more in enumerate(overrides):
            for way in ("reload", "ensure"):
                model = built(optimizer_overrides={"lr": 0.1, **more}, **layout)
                written = [each.detach() + 8 for each in model.chunks[0].parameters()]
                advance(model, 0)
                with torch.no_grad():
                    for each, value in zip(model.chunks[0].parameters(), written, strict=True):
                        each.copy_(value)
                if way == "reload":
                    model.optimizer.reload_model_params()
                renewed = ensure_main_params_synced(model.optimizer)
                assert bool(renewed) == (way == "ensure" and layout.get("dtype") == "bf16")
                assert ensure_main_params_synced(model.optimizer) == 0
                found[number, way] = advance(model, 1)
        first = found[0, "reload"]
        assert all(same(first, each) for each in found.values()), (layout, list(found))
