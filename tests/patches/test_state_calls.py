"""Calls that look at a run's state, save it or put it back leave the next step's bits alone."""

import contextlib
import io
from pathlib import Path

import pytest
import torch
from ranks import RELEASE, on_ranks

import megatron_idempotent

pytest.importorskip("psutil", reason="megatron.core.dist_checkpointing needs psutil, undeclared")

#: Before 0.17 `megatron.training` is in a source checkout only.
needs_training = pytest.mark.skipif(RELEASE < (0, 17), reason="has no megatron.training")
# 0.12's writer calls a private function of torch that takes one more argument today.
needs_writer = pytest.mark.skipif(RELEASE < (0, 13), reason="cannot write with a new torch")


class Run:
    """A program of Megatron with dropout and its folder, at iteration 1, saved there."""

    def __init__(self, folder, *options):
        from megatron_idempotent.proof.cpu import program

        megatron_idempotent.apply()
        dropout = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
        self.program = program.start(["--bf16", *dropout, *options], num_microbatches=2)
        self.args = self.program.args
        self.args.save = self.args.load = str(folder)
        self.whole = self.program.chunks, self.program.optimizer, self.program.scheduler
        self.program.train(1)
        self.save()

    def save(self):
        from megatron.training import checkpointing

        with contextlib.redirect_stdout(io.StringIO()):
            checkpointing.save_checkpoint(self.args.iteration, *self.whole, 0)

    def load(self):
        """Load in place, put the data back too, and return the iteration."""
        from megatron.core.rerun_state_machine import RerunDataIterator
        from megatron.training import checkpointing

        from megatron_idempotent.proof.cpu import program

        with contextlib.redirect_stdout(io.StringIO()):
            iteration, _ = checkpointing.load_checkpoint(*self.whole)
        self.args.iteration = self.args.train_iters = iteration
        batches = program._batches(7, self.args.micro_batch_size)
        for _ in range(2 * iteration):
            next(batches)
        self.program.data[:] = [RerunDataIterator(batches)]
        return iteration

    def step(self):
        """Train an iteration, and return its bits: parameters, losses, the optimizer's state."""
        self.program.train(1)
        state = self.program.optimizer.optimizer.state
        moments = [each["exp_avg"].tolist() for each in state.values()]
        return self.program.parameters().tolist(), self.program.losses[-2:], moments


def rolls_back(run):
    for _ in range(2):
        run.step()
        run.load()


def begins_a_step(run):
    """End in its second microbatch, and go back."""
    forward_step = run.program._forward_step
    count = iter((1, 0))

    def broken(*arguments):
        if not next(count):
            raise KeyError("a microbatch that cannot be read")
        return forward_step(*arguments)

    run.program._forward_step = broken
    with pytest.raises(KeyError):
        run.program.train(1)
    run.program._forward_step = forward_step
    run.args.save += "-broken"
    run.save()
    run.args.save = run.args.load
    run.load()


def cannot_load(run):
    run.args.load = str(Path(run.args.save, "nothing"))
    assert run.load() == 0
    run.args.load = run.args.save
    run.load()


def saves_in_the_background(run):
    from megatron.training import async_utils

    run.args.async_save, run.args.async_strategy = True, "mcore"
    for ends in (False, False, True):
        run.save()
        async_utils.maybe_finalize_async_save(blocking=True, terminate=ends)
    run.args.async_save = False


def looks(run):
    from megatron.core import mpu, num_microbatches_calculator
    from megatron.training import checkpointing, get_timers

    groups = mpu.get_tensor_model_parallel_group(), mpu.get_pipeline_model_parallel_group()
    state = checkpointing.get_rng_state("torch_dist", *groups)
    with contextlib.redirect_stdout(io.StringIO()):
        how = {"metadata": checkpointing._build_sharded_state_dict_metadata(run.args)}
        checkpointing.generate_state_dict(
            run.args, *run.whole, state, optim_sd_kwargs=how, model_sd_kwargs=how
        )
        checkpointing.load_args_from_checkpoint(run.args)
        get_timers().log(["forward-backward"])
    for samples in (10**6, 0, run.args.consumed_train_samples):
        num_microbatches_calculator.update_num_microbatches(samples)


#: In this order in one process, as a run meets them.
HARMLESS = [looks, rolls_back, begins_a_step, cannot_load, saves_in_the_background, Run.save]


@needs_training
@on_ranks(1, timeout_s=120.0)
def test_a_step_has_the_bits_of_one_before_which_nobody_called_anything(tmp_path):
    run = Run(tmp_path)
    expected = run.step()
    run.load()
    changed = []
    for call in HARMLESS:
        call(run)
        if run.step() != expected:
            changed.append(call.__name__)
        run.load()
    assert not changed


@on_ranks(1)
def test_a_second_backward_through_a_recomputed_layer_drops_the_same_elements():
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    megatron_idempotent.apply(["rng-states-shared"], strict=True)
    parallel_state.initialize_model_parallel()
    random.model_parallel_cuda_manual_seed(1)

    def drop(values):
        with random.get_cuda_rng_tracker().fork():
            return torch.nn.functional.dropout(values, 0.5)

    values = torch.ones(64, requires_grad=True)
    kept = random.checkpoint(drop, False, values)
    for _ in range(3):
        values.grad = None
        kept.sum().backward(retain_graph=True)
        assert torch.equal(values.grad, kept)


def state(value, note=""):
    """Return what a rank saves: a tensor, and an object of some size."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return {
        "note": ShardedObject("note", note, (1,), (0,)),
        "weight": ShardedTensor.from_rank_offsets("weight", torch.full((4,), float(value))),
    }


@needs_writer
@on_ranks(1)
def test_a_save_that_is_refused_leaves_the_older_checkpoint_and_one_that_ends_replaces_it(tmp_path):
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException

    megatron_idempotent.apply(["overwritten-checkpoint-mixed"], strict=True)
    for value in (1, 2):
        dist_checkpointing.save(state(value), str(tmp_path))
        refused = state(3)
        refused["weight"].replica_id = 1  # so that nobody saves the shard
        with pytest.raises(CheckpointingException):
            dist_checkpointing.save(refused, str(tmp_path))
        assert dist_checkpointing.load(state(0), str(tmp_path))["weight"].eq(value).all()


@pytest.mark.skipif(RELEASE < (0, 17), reason="keeps no metadata by name")
@on_ranks(1)
def test_metadata_is_kept_for_the_file_it_was_read_from(tmp_path):
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import cached_metadata_filesystem_reader
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    megatron_idempotent.apply(["checkpoint-metadata-stale"], strict=True)
    reader = cached_metadata_filesystem_reader.CachedMetadataFileSystemReader
    for value in (1, 2, 3):
        dist_checkpointing.save(state(value, "n" * 500 * value), str(tmp_path))
        found = []
        for _ in range(2):
            strategy = TorchDistLoadShardedStrategy(cache_metadata=True)
            loaded = dist_checkpointing.load(state(0), str(tmp_path), strategy)
            assert loaded["weight"].eq(value).all()
            found.append(strategy.cached_global_metadata)
        assert found[0] is found[1]
        assert [*reader._metadata_cache.values()] == found[:1]


@needs_writer
@on_ranks(1)
def test_a_checkpoint_says_what_it_has_and_keeps_what_it_was_read_with(tmp_path):
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
    from torch.distributed.checkpoint import FileSystemReader

    megatron_idempotent.apply(["checkpoint-shapes-unreadable"], strict=True)
    dist_checkpointing.save(state(1), str(tmp_path))
    whole = serialization.load_sharded_metadata(str(tmp_path))
    assert {"note", "weight"} <= {name.partition("/")[0] for name in whole}  # 0.19 has one more
    loaded = dist_checkpointing.load(state(0), str(tmp_path), strict="raise_all")
    assert loaded["weight"].eq(1).all()
    less = {"weight": state(0)["weight"]}
    with pytest.raises(CheckpointingException, match="note"):
        dist_checkpointing.load(less, str(tmp_path), strict="raise_all")
    read = FileSystemReader(tmp_path).read_metadata()
    before = vars(read.state_dict_metadata["weight"].properties).copy()
    found = TorchDistLoadShardedStrategy().load_tensors_metadata(tmp_path, read)
    assert (found["weight"].global_shape, found["weight"].dtype) == ((4,), torch.float32)
    assert vars(read.state_dict_metadata["weight"].properties) == before
