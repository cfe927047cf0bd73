"""Saving and loading through megatron.core.dist_checkpointing on gloo ranks."""

import pytest

from megatron_idempotent.patching.decide import installed

pytest.importorskip("psutil", reason="megatron.core.dist_checkpointing needs psutil, undeclared")

MEGATRON = installed("megatron-core")


# 0.12's writer calls a private function of torch that takes one more argument today; 0.15
# asserts that the step counter of torch's Adam has a parameter's shape.
@pytest.fixture(autouse=True)
def _saves_what_torch_has():
    if MEGATRON is not None and MEGATRON.release < (0, 16):
        pytest.skip(f"megatron-core {MEGATRON.text} cannot save torch's Adam of today")


def save_and_load(folder):
    """Train, save, train on; then load into another model and train on: equal to the bit?"""
    import inspect
    import queue

    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    # With torch's Adam stock Megatron loads neither at a run's start nor the right step counters.
    megatron_idempotent.apply(["unstepped-optimizer-refused", "adam-step-shared"], strict=True)

    def sharded(bench, is_loading):
        model = bench.chunks[0].module.sharded_state_dict()
        parts = getattr(bench.optimizer, "chained_optimizers", [bench.optimizer])
        export = parts[0].sharded_state_dict
        # Older releases have one format; since 0.15 the default is one that 0.17 dropped.
        how = {"metadata": {"distrib_optim_sharding_type": "dp_reshardable"}}
        if "metadata" not in inspect.signature(export).parameters:
            how = {}
        return {
            "model": model,
            "optimizer": bench.optimizer.sharded_state_dict(model, is_loading=is_loading, **how),
        }

    def advance(bench, seed):
        losses = bench.forward_backward(2, data_seed=seed)
        bench.step()
        return losses

    if getattr(filesystem_async, "_results_queue", ()) is None:
        # Or upstream starts a process for it, which imports Megatron: some ten seconds.
        filesystem_async._results_queue = queue.Queue()
    saved = tiny.build(seed=1)
    advance(saved, 0)
    dist_checkpointing.save(sharded(saved, False), folder)
    loaded = tiny.build(seed=2)
    different = not torch.equal(saved.parameters(), loaded.parameters())
    state = dist_checkpointing.load(sharded(loaded, True), folder)
    loaded.chunks[0].module.load_state_dict(state["model"])
    with torch.no_grad():  # upstream copies into fp32 parameters in place
        loaded.optimizer.load_state_dict(state["optimizer"])
    same_weights = torch.equal(saved.parameters(), loaded.parameters())
    same_losses = advance(saved, 1) == advance(loaded, 1)
    return (
        different,
        same_weights,
        same_losses,
        torch.equal(saved.parameters(), loaded.parameters()),
    )


def test_a_checkpoint_continues_to_the_bit(megatron_ranks, tmp_path):
    assert megatron_ranks(2, save_and_load, str(tmp_path)) == [(True, True, True, True)] * 2
