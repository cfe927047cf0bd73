"""Weights and checkpoints that are loaded beside or into an optimizer on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import RELEASE, built, on_ranks, same

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


@on_ranks(2)
def test_a_checkpoint_goes_on_to_the_bit(tmp_path):
    """Saved after two steps; loaded into a model that never stepped, or did, and trained on."""
    import queue

    pytest.importorskip("psutil")
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if getattr(filesystem_async, "_results_queue", ()) is None:
        # Or upstream starts a process for it, which imports Megatron: some ten seconds.
        filesystem_async._results_queue = queue.Queue()
    # The class of the inner optimizer is in its groups, and so in the checkpoint.
    torch.serialization.add_safe_globals([torch.optim.AdamW])
    how = {"metadata": {"distrib_optim_sharding_type": "dp_reshardable"}}

    def sharded(bench, is_loading):
        model = bench.chunks[0].module.sharded_state_dict()
        optimizer = bench.optimizer.sharded_state_dict(model, is_loading=is_loading, **how)
        return {"model": model, "optimizer": optimizer}

    for number, more in enumerate((offload(0.5), offload(1.0), offload(0.5, precise=True))):
        folder = tmp_path / str(number)
        if torch.distributed.get_rank() == 0:
            folder.mkdir()
        torch.distributed.barrier()
        saved = built(dtype="bf16", seed=1, optimizer_overrides=more)
        advance(saved, 0)
        advance(saved, 1)
        dist_checkpointing.save(sharded(saved, False), str(folder))
        advance(saved, 2)
        for steps_before in (0, 1):
            loaded = built(dtype="bf16", seed=2, optimizer_overrides=more)
            for data_seed in range(steps_before):
                advance(loaded, data_seed)
            state = dist_checkpointing.load(sharded(loaded, True), str(folder))
            loaded.chunks[0].module.load_state_dict(state["model"])
            with torch.no_grad():
                loaded.optimizer.load_state_dict(state["optimizer"])
            assert same(advance(loaded, 2), saved.parameters()), (more, steps_before)


# As in test_checkpoint_step.
if RELEASE < (0, 16):
    del test_a_checkpoint_goes_on_to_the_bit
