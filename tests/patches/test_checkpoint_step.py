"""A run that loads a checkpoint goes on as the run that saved it, in each format of the state."""

import pytest
from ranks import built, needs_release, on_ranks, same
from test_optimizer_on_host import offload

pytest.importorskip("psutil", reason="megatron.core.dist_checkpointing needs psutil, undeclared")
# 0.12's writer calls a private function of torch that takes one more argument today; 0.15
# asserts that the step counter of torch's Adam has a parameter's shape.
needs_release((0, 16), "releases before 0.16 cannot save torch's Adam of today")

pytestmark = [pytest.mark.full, pytest.mark.patched]

#: The formats that releases save from 0.16 on.
DP, FULL = "dp_reshardable", "fully_reshardable"
ONE_BUCKET = {"ddp_overrides": {"bucket_size": None}}
#: A norm over shards depends on how they are cut.
UNCLIPPED = {"optimizer_overrides": {"clip_grad": 0.0}}


def on_host(fraction, **more):
    """Options of a model whose optimizer is on the host in part or whole."""
    return {"dtype": "bf16", "optimizer_overrides": offload(fraction, **more)}


def save(bench, sharding, folder):
    import queue

    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if getattr(filesystem_async, "_results_queue", ()) is None:
        # Or upstream starts a process for it, which imports Megatron: some ten seconds.
        filesystem_async._results_queue = queue.Queue()
    # The class of an inner optimizer on the host is in its groups, and so in the checkpoint.
    torch.serialization.add_safe_globals([torch.optim.AdamW])
    dist_checkpointing.save(sharded(bench, sharding, False), str(folder))


def sharded(bench, sharding, is_loading):
    model = bench.chunks[0].module.sharded_state_dict()
    how = {"metadata": {"distrib_optim_sharding_type": sharding}}
    optimizer = bench.optimizer.sharded_state_dict(model, is_loading=is_loading, **how)
    return {"model": model, "optimizer": optimizer}


def load(bench, sharding, folder):
    import torch
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(sharded(bench, sharding, True), str(folder))
    bench.chunks[0].module.load_state_dict(state["model"])
    with torch.no_grad():  # upstream copies into fp32 parameters in place
        bench.optimizer.load_state_dict(state["optimizer"])


@pytest.mark.parametrize(
    ("sharding", "layout", "options"),
    [
        pytest.param(DP, {}, UNCLIPPED, id="dp"),
        pytest.param(FULL, {}, UNCLIPPED, id="full"),
        pytest.param(FULL, ONE_BUCKET, UNCLIPPED, id="full into one bucket"),
        pytest.param(FULL, {"tp": 2}, UNCLIPPED, id="full into tensor parallel ranks"),
        pytest.param(DP, {}, on_host(0.5), id="half on the host"),
        pytest.param(DP, {}, on_host(1.0), id="all on the host"),
        pytest.param(DP, {}, on_host(0.5, precise=True), id="precise, half on the host"),
    ],
)
@on_ranks(2)
def test_a_loaded_run_goes_on_to_the_bit(tmp_path, sharding, layout, options):
    """Three steps, saved after two; loaded into a model that never stepped, or did.

    Tensor-parallel ranks add up in another order, so that there the state that was loaded is saved
    again, and loaded into the layout that it came from.
    """
    from megatron.core import parallel_state

    saved = built(seed=1, **options)
    saved.train_step(2, data_seed=0)
    saved.train_step(2, data_seed=1)
    save(saved, sharding, tmp_path)
    saved.train_step(2, data_seed=2)
    if "tp" in layout:
        parallel_state.destroy_model_parallel()
        other = built(seed=2, **layout, **options)
        load(other, sharding, tmp_path)
        tmp_path = tmp_path / "again"
        tmp_path.mkdir(exist_ok=True)
        save(other, sharding, tmp_path)
        parallel_state.destroy_model_parallel()
        layout = {}
    for steps_before in (0, 1):
        loaded = built(seed=2, **layout, **options)
        for data_seed in range(steps_before):
            loaded.train_step(2, data_seed=data_seed)
        load(loaded, sharding, tmp_path)
        loaded.train_step(2, data_seed=2)
        assert same(saved.parameters(), loaded.parameters())


@pytest.mark.parametrize("persistent", [False, True])
@on_ranks(2)
def test_steps_that_a_save_is_written_in_are_not_saved(tmp_path, persistent):
    """Two saves, each written while two steps run, by a worker per save or by one that stays."""
    from functools import partial

    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron_idempotent.patches._case import once_there

    from megatron_idempotent.megatron.layer_specs import takes

    how = {"async_sharded_save": True}
    if takes(dist_checkpointing.save, "async_strategy"):
        how["async_strategy"] = "mcore"
    going_on = built(seed=1)
    going_on.train_step(2, data_seed=0)
    queue = AsyncCallsQueue(persistent=persistent)
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir(exist_ok=True)
        request = dist_checkpointing.save(sharded(going_on, DP, False), str(folder), **how)
        stepped = folder / "stepped"
        queue.schedule_async_request(
            request._replace(async_fn=partial(once_there, stepped, request.async_fn))
        )
        for data_seed in (1, 2):
            going_on.train_step(2, data_seed=data_seed)
        stepped.touch()
        queue.maybe_finalize_async_calls(blocking=True)
        loaded = built(seed=2)
        load(loaded, DP, folder)
        for data_seed in (1, 2):
            loaded.train_step(2, data_seed=data_seed)
        assert same(going_on.parameters(), loaded.parameters())
    queue.close()
