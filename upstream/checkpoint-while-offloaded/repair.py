"""`dist_checkpointing.save` refuses tensors whose memory is released."""

from upstream.edits import Repair, before, replace

SERIALIZATION = "megatron.core.dist_checkpointing.serialization"

REPAIR = Repair(
    edits=(
        replace(
            SERIALIZATION,
            "from .dict_utils import merge",
            "from .dict_utils import merge, nested_values",
        ),
        before(
            f"{SERIALIZATION}:save",
            "if content_metadata is not None",
            """
            for item in nested_values(sharded_state_dict):
                tensor = getattr(item, 'data', item)
                # Subclasses of tensors, such as FP8 ones, can keep their values elsewhere.
                if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
                    continue
                if tensor.numel() > 0 and tensor.untyped_storage().size() == 0:
                    raise RuntimeError(
                        f"{getattr(item, 'key', 'A tensor')} has no memory: its buffer is "
                        "offloaded. Reload it before saving."
                    )

            """,
        ),
    ),
    unit_tests=("dist_checkpointing/test_serialization.py",),
    rereads=("failed-dist-save-hangs",),
)
