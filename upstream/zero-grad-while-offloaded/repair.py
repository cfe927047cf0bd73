"""`zero_grad_buffer()` leaves a gradient buffer alone whose memory is offloaded."""

from upstream.edits import Repair, wrap

REPAIR = Repair(
    edits=(
        wrap(
            "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.reset",
            "self.grad_data.zero_()",
            """
            # An offloaded buffer has no memory, and is zeroed when it is reloaded.
            if self.grad_data.untyped_storage().size() > 0:
            """,
        ),
    ),
    unit_tests=("distributed/test_param_and_grad_buffer.py",),
    rereads=("offload-drops-gradients",),
)
