"""A save that fails on one rank raises on all, and the checkpoint of before can be loaded."""

import re

import pytest
import torch
from ranks import RELEASE, needs_release, on_ranks, patch

needs_release((0, 13), "0.12 cannot write with a torch of today")
pytest.importorskip("psutil", reason="megatron.core.dist_checkpointing needs psutil, undeclared")

pytestmark = [pytest.mark.full, pytest.mark.patched]

SAVES = pytest.mark.parametrize("later", [False, True], ids=["synchronous", "asynchronous"])


def state(value, *, twice=False):
    """Return a part of a weight on each rank; `twice` both say that theirs is the first part."""
    from megatron.core.dist_checkpointing import ShardedTensor

    rank, weight = torch.distributed.get_rank(), torch.full((64,), value)
    place = (0, 0 if twice else rank, 2)
    return {"weight": ShardedTensor.from_rank_offsets("weight", weight, place), "step": 1}


def save(folder, value, *, later=False, parallel=False, **how):
    """Save with the queue of asynchronous saves, if `later`, and wait until all is written."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import async_utils, fully_parallel
    from megatron.core.dist_checkpointing.strategies import torch as torch_dist

    from megatron_idempotent.megatron.layer_specs import takes

    given = {"async_sharded_save": later}
    if later and takes(dist_checkpointing.save, "async_strategy"):
        given["async_strategy"] = "mcore"  # without nvidia-resiliency-ext
    if parallel:
        strategy = torch_dist.TorchDistSaveShardedStrategy("torch_dist", 1)
        given["sharded_strategy"] = fully_parallel.FullyParallelSaveStrategyWrapper(strategy)
    request = dist_checkpointing.save(state(value, **how), str(folder), **given)
    if later:
        queue = async_utils.AsyncCallsQueue()
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)


def raised(call, *args, **kwargs):
    """Return what each rank's call raises; a rank that waits for another one does not come back."""
    from torch.distributed.checkpoint.api import CheckpointException  # which is no Exception

    error, told = "", [None, None]
    try:
        call(*args, **kwargs)
    except (Exception, CheckpointException) as failed:  # noqa: BLE001  each kind is a result
        error = f"{type(failed).__name__}: {failed}"
    torch.distributed.all_gather_object(told, error)
    return told


def in_the_way(path):
    """Let a folder have the name of what is to be written."""
    if torch.distributed.get_rank() == 0:
        path.mkdir(parents=True)
    torch.distributed.barrier()


def new(tmp_path, name):
    folder = tmp_path / name
    if torch.distributed.get_rank() == 0:
        folder.mkdir()
    torch.distributed.barrier()
    return folder


#: By what is in the way: what the error says on all ranks, or for tensors on rank 0.
CAUSES = {
    "__1_0.distcp": "Is ?[aA] ?[dD]irectory",
    ".metadata": ".metadata",
    "metadata.json": "metadata.json",
    "no folder": "No such file",
    "one part twice": "Invalid access pattern",
}
if RELEASE < (0, 19):  # later releases save its contents beside the tensors
    CAUSES["common.pt"] = "Is a directory"


@SAVES
@pytest.mark.parametrize("parallel", [False, True], ids=["plain", "parallel"])
@on_ranks(2)
def test_ranks_hear_of_what_one_of_them_could_not_write(tmp_path, parallel, later):
    from megatron.core import dist_checkpointing

    patch()
    older, how = new(tmp_path, "older"), {"later": later, "parallel": parallel}
    save(older, 1.0)
    for broken, cause in CAUSES.items():
        folder, twice = tmp_path / broken.strip("."), broken == "one part twice"
        if twice:
            new(tmp_path, folder.name)
        elif broken != "no folder":
            in_the_way(folder / broken)
        told = raised(save, folder, 2.0, twice=twice, **how)
        assert re.search(cause, told[0]), told
        assert re.search(cause, told[1]) or (broken == "__1_0.distcp" and told[1]), told
        loaded = dist_checkpointing.load(state(0.0), str(older))
        assert loaded["weight"].eq(1.0).all()
    save(new(tmp_path, "newest"), 3.0, **how)
    assert dist_checkpointing.load(state(0.0), str(tmp_path / "newest"))["weight"].eq(3.0).all()


@pytest.mark.skipif(RELEASE < (0, 17), reason="megatron.training is in a source checkout only")
@SAVES
@on_ranks(2, timeout_s=120)
def test_a_tracker_file_that_cannot_be_written_leaves_the_one_of_before(tmp_path, later):
    from megatron.training import async_utils, checkpointing

    from megatron_idempotent.proof.cpu import program

    patch()
    asked = ["--async-save", "--async-strategy", "mcore"] if later else []
    running = program.start(["--bf16", "--ckpt-format", "torch_dist", *asked])
    running.args.save = running.args.load = str(tmp_path)
    whole = running.chunks, running.optimizer, running.scheduler

    def save(iteration):
        checkpointing.save_checkpoint(iteration, *whole, 0)
        async_utils.maybe_finalize_async_save(blocking=True)

    running.train(1)
    save(1)
    before, tracker = running.parameters(), tmp_path / "latest_checkpointed_iteration.txt"
    running.train(1)
    if torch.distributed.get_rank() == 0:
        tracker.rename(tmp_path / "kept")
    in_the_way(tracker)
    told = raised(save, 2)
    assert all(tracker.name in each for each in told), told
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        tracker.rmdir()
        (tmp_path / "kept").rename(tracker)
    torch.distributed.barrier()
    with torch.no_grad():  # upstream copies into fp32 parameters in place
        assert checkpointing.load_checkpoint(*whole)[0] == 1
    assert running.parameters().equal(before)
