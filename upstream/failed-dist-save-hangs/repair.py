"""All ranks raise if rank 0 cannot do what it does alone in a `torch_dist` save."""

from upstream.edits import Repair, after, before, replace, wrap

PACKAGE = "megatron.core.dist_checkpointing"
SAVE = f"{PACKAGE}.serialization:save"
SAVER = f"{PACKAGE}.strategies.state_dict_saver"

REPAIR = Repair(
    edits=(
        after(
            f"{PACKAGE}.utils",
            "from typing import Dict, Optional, Tuple",
            """

            import torch
            """,
        ),
        before(
            f"{PACKAGE}.utils",
            "from .dict_utils import",
            "from .core import CheckpointingException",
        ),
        after(
            f"{PACKAGE}.utils",
            "def zip_strict",
            '''


            @contextmanager
            def raise_on_all_ranks():
                """Raises on all ranks if the block raises on one, which others would wait for."""
                error = None
                try:
                    yield
                except Exception as e:
                    error = e
                errors = [None] * torch.distributed.get_world_size()
                torch.distributed.all_gather_object(errors, error and repr(error))
                if error is not None:
                    raise error
                for rank, text in enumerate(errors):
                    if text is not None:
                        raise CheckpointingException(f'rank {rank} failed: {text}')
            ''',
        ),
        replace(
            f"{PACKAGE}.serialization",
            "from .utils import extract_sharded_base",
            "from .utils import extract_sharded_base, force_all_tensors_to_non_fp8, "
            "raise_on_all_ranks",
        ),
        wrap(
            SAVE,
            "if torch.distributed.get_rank() == 0:\n    checkpoint_dir_path = "
            "maybe_msc.Path(str(checkpoint_dir))",
            "with raise_on_all_ranks():",
        ),
        wrap(
            f"{SAVE}.metadata_finalize_fn",
            "if torch.distributed.get_rank() == 0:",
            "with raise_on_all_ranks():",
        ),
        replace(f"{SAVE}.metadata_finalize_fn", "torch.distributed.barrier()", ""),
        wrap(
            f"{SAVE}.integrity_finalize_fn",
            "if torch.distributed.get_rank() == 0:",
            "with raise_on_all_ranks():",
        ),
        replace(f"{SAVE}.integrity_finalize_fn", "torch.distributed.barrier()", ""),
        before(
            SAVER,
            "from torch.distributed.checkpoint.default_planner",
            "from torch.distributed.checkpoint.api import _wrap_exception",
        ),
        wrap(
            f"{SAVER}:save_state_dict_async_finalize",
            "storage_writer.finish(global_metadata, all_results)",
            "try:",
            """
            except Exception as e:
                node_failures[dist_wrapper.coordinator_rank] = _wrap_exception(e)
            """,
        ),
    ),
    unit_tests=(
        "dist_checkpointing/test_serialization.py",
        "dist_checkpointing/test_async_save.py",
        "dist_checkpointing/test_integrity.py",
    ),
    ranks=2,
)
