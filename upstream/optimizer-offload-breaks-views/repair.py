"""`offload_to_cpu()` leaves alone the parameters that are views of the model's buffers."""

from upstream.edits import Repair, before, substitute

OFFLOAD = "megatron.core.optimizer.optimizer:MegatronOptimizer.offload_to_cpu"

REPAIR = Repair(
    edits=(
        before(
            OFFLOAD,
            "for param_group in self.optimizer.param_groups",
            """
            # Not views of the model's param buffers, which stay on the device.
            buffer_ptrs = {
                buffer.param_data.untyped_storage().data_ptr()
                for buffer in getattr(self, 'buffers', ())
                if buffer.param_data is not None
            }
            """,
        ),
        substitute(
            OFFLOAD,
            "isinstance(p, torch.Tensor) and p.is_cuda",
            "p.is_cuda and p.untyped_storage().data_ptr() not in buffer_ptrs",
        ),
    ),
    unit_tests=("test_optimizer.py",),
)
