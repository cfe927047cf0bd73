"""The reduction of the output layer's bucket waits for the deferred gradient."""

from upstream.edits import Repair, after, first, last

REPAIR = Repair(
    edits=(
        after(
            "megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward",
            "self.embedding_activation_buffer.append(input_parallel)",
            "weight.wgrad_deferred = True",
        ),
        first(
            "megatron.core.distributed.param_and_grad_buffer"
            ":_ParamAndGradBucketGroup.start_grad_sync",
            """
            # drain_embedding_wgrad_compute() adds a deferred gradient later, and then reduces it.
            for param in self.params:
                if getattr(param, 'wgrad_deferred', False):
                    param.start_deferred_grad_sync = partial(self.start_grad_sync, force_all_reduce)
                    return

            """,
        ),
        last(
            "megatron.core.utils:drain_embedding_wgrad_compute",
            """
            weight.wgrad_deferred = False
            start_deferred_grad_sync = weight.__dict__.pop('start_deferred_grad_sync', None)
            if start_deferred_grad_sync is not None:
                start_deferred_grad_sync()
            """,
        ),
    ),
    unit_tests=(
        "distributed/test_param_and_grad_buffer.py",
        "pipeline_parallel/test_schedules.py",
        "tensor_parallel/test_layers.py",
        "test_utils.py",
    ),
    # They know these functions by their hash.
    rereads=(
        "deferred-embedding-mispaired",
        "deferred-embedding-one-microbatch",
        "deferred-reduction-refused",
        "finish-grad-sync-twice",
        "frozen-parameters-refused",
        "gradient-after-reduction",
        "second-window-not-reduced",
    ),
)
