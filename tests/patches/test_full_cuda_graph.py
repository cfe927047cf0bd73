"""Full-iteration CUDA graphs replay for their own model, with a stand-in for the graph on real
ranks."""

from __future__ import annotations

import gc
import weakref

import pytest
from ranks import needs_release, on_ranks

import megatron_idempotent

needs_release((0, 14), "full-iteration graphs came with 0.14")


class Bench:
    """A model, its schedule, and a new wrapper around it for each window."""

    def __init__(self, *, applied=True, **layout):
        from megatron_idempotent.patches import full_cuda_graph_replayed as case

        if applied:
            megatron_idempotent.apply(only=["full-cuda-graph-replayed"])
        case.stand_in()
        self.case = case
        self.model = case.build(**layout)

    def run(self, microbatches, model=None, wrapper=None, **other):
        """Windows' (losses, whether a graph was replayed)."""
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper
        from megatron.core.pipeline_parallel import get_forward_backward_func

        wrapper = wrapper or FullCudaGraphWrapper(get_forward_backward_func(), 1)
        replays = self.case.Graph.replays
        losses = self.case.window(wrapper, model or self.model, microbatches, **other)
        return losses, self.case.Graph.replays > replays

    def replayed(self, microbatches, **how):
        return self.run(microbatches, **how)[1]


@pytest.mark.parametrize("layout", [{}, {"pp": 2}], ids=str)
@on_ranks(2)
def test_a_new_wrapper_alone_keeps_the_graph(layout):
    bench = Bench(**layout)
    # One warm-up; the call that captures replays, too.
    assert [bench.replayed(2) for _ in range(4)] == [False, True, True, True]


@on_ranks(1)
def test_training_and_validation_change_apart():
    bench = Bench()
    replayed = [
        bench.replayed(count, forward_only=forward_only)
        for microbatches in (2, 2, 3)
        for count, forward_only in ((2, False), (microbatches, True))
    ]
    assert replayed == [False, False, True, True, True, False]


@on_ranks(1)
def test_one_wrapper_runs_as_many_microbatches_as_it_is_given():
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
    from megatron.core.pipeline_parallel import get_forward_backward_func

    bench = Bench()
    wrapper = FullCudaGraphWrapper(get_forward_backward_func())
    counts = (4, 4, 4, 2, 2, 3)
    assert tuple(len(bench.run(n, wrapper=wrapper)[0]) for n in counts) == counts
    assert len(StaticBufferLoader.static_buffers["training"]) == 3


@on_ranks(1)
def test_a_method_is_the_same_step_function_each_time_and_another_object_has_another():
    bench = Bench()

    class Policy:
        def step(self, data_iterator, model):
            return bench.case.forward_step(data_iterator, model)

    policy, other = Policy(), Policy()
    same = [bench.replayed(2, forward_step_func=policy.step) for _ in range(3)]
    assert same == [False, True, True]
    assert not bench.replayed(2, forward_step_func=other.step)


@on_ranks(1)
def test_no_model_is_kept_and_none_inherits_the_graph_of_a_deleted_one():
    bench = Bench(overlap_grad_reduce=False)
    for _ in range(2):
        bench.run(2)
    gone = weakref.ref(bench.model.chunks[0])
    config = bench.model.config
    bench.model.chunks.clear()
    # What upstream itself keeps of a model, which is not at issue here.
    config.no_sync_func = config.finalize_model_grads_func = None
    gc.collect()
    replayed = bench.replayed(2, model=bench.case.build())
    assert (gone() is None, replayed) == (True, False)


@pytest.mark.parametrize("applied", [False, True])
@on_ranks(1)
def test_a_capture_that_fails_is_tried_again(applied):
    bench = Bench(applied=applied)
    calls = iter(range(10))

    def forward_step(data_iterator, model):
        if next(calls) == 1:
            raise OSError("in the call that captures")
        return bench.case.forward_step(data_iterator, model)

    results: list[object] = []
    for _ in range(4):
        try:
            results.append(bench.replayed(1, forward_step_func=forward_step))
        except (OSError, AssertionError) as error:
            results.append(type(error).__name__)
    stuck = [False, "OSError", "AssertionError", "AssertionError"]
    assert results == ([False, "OSError", False, True] if applied else stuck)
