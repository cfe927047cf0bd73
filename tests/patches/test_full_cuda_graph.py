"""Full-iteration CUDA graphs replay for their own model, with a stand-in for the graph on real
ranks."""

from __future__ import annotations

import pytest

from megatron_idempotent.patching.decide import installed

release = installed("megatron-core")
if release is None or release.release < (0, 14):
    pytest.skip("full-iteration graphs came with 0.14", allow_module_level=True)

ID = "full-cuda-graph-replayed"


class Bench:
    """Runs on a rank: a model, its schedule, and a new wrapper around it for each window."""

    def __init__(self, **layout):
        from megatron_idempotent.patches import full_cuda_graph_replayed as case

        import megatron_idempotent

        megatron_idempotent.apply(only=[ID])
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


def new_wrappers(layout: dict) -> list[bool]:
    bench = Bench(**layout)
    return [bench.run(2)[1] for _ in range(4)]


@pytest.mark.parametrize("layout", [{}, {"pp": 2}], ids=str)
def test_a_new_wrapper_alone_keeps_the_graph(layout, megatron_ranks):
    # One warm-up; the call that captures replays, too.
    assert megatron_ranks(2, new_wrappers, layout) == [[False, True, True, True]] * 2


def validation_between_windows() -> list[bool]:
    bench = Bench()
    replayed = []
    for microbatches in (2, 2, 3):
        replayed.append(bench.run(2)[1])
        replayed.append(bench.run(microbatches, forward_only=True)[1])
    return replayed


def test_training_and_validation_change_apart(megatron_ranks):
    expected = [False, False, True, True, True, False]
    assert megatron_ranks(1, validation_between_windows) == [expected]


def batch_ramp_up() -> list[int]:
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
    from megatron.core.pipeline_parallel import get_forward_backward_func

    bench = Bench()
    wrapper = FullCudaGraphWrapper(get_forward_backward_func())
    counts = [len(bench.run(n, wrapper=wrapper)[0]) for n in (4, 4, 4, 2, 2, 3)]
    return [*counts, len(StaticBufferLoader.static_buffers["training"])]


def test_one_wrapper_runs_as_many_microbatches_as_it_is_given(megatron_ranks):
    assert megatron_ranks(1, batch_ramp_up) == [[4, 4, 4, 2, 2, 3, 3]]


def step_functions() -> list[bool]:
    bench = Bench()

    class Policy:
        def step(self, data_iterator, model):
            return bench.case.forward_step(data_iterator, model)

    policy, other = Policy(), Policy()
    same = [bench.run(2, forward_step_func=policy.step)[1] for _ in range(3)]
    return [*same, bench.run(2, forward_step_func=other.step)[1]]


def test_a_method_is_the_same_step_function_each_time_and_another_object_has_another(
    megatron_ranks,
):
    assert megatron_ranks(1, step_functions) == [[False, True, True, False]]


def deleted_model() -> tuple[bool, bool]:
    import gc
    import weakref

    bench = Bench(overlap_grad_reduce=False)
    for _ in range(2):
        bench.run(2)
    gone = weakref.ref(bench.model.chunks[0])
    config = bench.model.config
    bench.model.chunks.clear()
    # What upstream itself keeps of a model, which is not at issue here.
    config.no_sync_func = config.finalize_model_grads_func = None
    gc.collect()
    replayed = bench.run(2, model=bench.case.build())[1]
    return gone() is None, replayed


def test_no_model_is_kept_and_none_inherits_the_graph_of_a_deleted_one(megatron_ranks):
    assert megatron_ranks(1, deleted_model) == [(True, False)]


def failing_capture(named: bool) -> list[object]:
    bench = Bench()
    if not named:
        import megatron_idempotent

        megatron_idempotent.revert()
    calls = iter(range(10))

    def forward_step(data_iterator, model):
        if next(calls) == 1:
            raise OSError("in the call that captures")
        return bench.case.forward_step(data_iterator, model)

    results: list[object] = []
    for _ in range(4):
        try:
            results.append(bench.run(1, forward_step_func=forward_step)[1])
        except (OSError, AssertionError) as error:
            results.append(type(error).__name__)
    return results


def test_a_capture_that_fails_is_tried_again(megatron_ranks):
    stuck = [False, "OSError", "AssertionError", "AssertionError"]
    assert megatron_ranks(1, failing_capture, False) == [stuck]
    assert megatron_ranks(1, failing_capture, True) == [[False, "OSError", False, True]]
