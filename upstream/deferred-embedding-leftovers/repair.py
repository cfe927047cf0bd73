"""The output layer keeps inputs only for a backward, and a window begins with both lists empty."""

from upstream.edits import Repair, after, substitute

REPAIR = Repair(
    edits=(
        substitute(
            "megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward",
            "if self.config.defer_embedding_wgrad_compute:",
            "if self.config.defer_embedding_wgrad_compute and torch.is_grad_enabled():",
        ),
        after(
            "megatron.core.pipeline_parallel.schedules:clear_embedding_activation_buffer",
            "embedding_module.embedding_activation_buffer.clear()",
            """
            # Nor output gradients of a window that was interrupted
            embedding_module.grad_output_buffer.clear()
            """,
        ),
    ),
    unit_tests=("tensor_parallel/test_layers.py", "pipeline_parallel/test_schedules.py"),
)
