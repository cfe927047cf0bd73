"""`dist_checkpointing.load()` looks at all files before it reads, and raises on all ranks."""

from upstream.edits import Repair, after, before, replace, substitute, wrap

PACKAGE = "megatron.core.dist_checkpointing"
MODULE = f"{PACKAGE}.serialization"
LOAD = f"{MODULE}:load"
HELPER = f"{PACKAGE}.utils:raise_on_all_ranks"
FULLY_PARALLEL = f"{PACKAGE}.strategies.fully_parallel"
WRAPPER = f"{FULLY_PARALLEL}:FullyParallelLoadStrategyWrapper.load"

REPAIR = Repair(
    edits=(
        after(
            f"{PACKAGE}.utils",
            "import torch",
            "from torch.distributed.checkpoint import CheckpointException",
        ),
        replace(
            f"{PACKAGE}.utils",
            "def raise_on_all_ranks",
            '''
            @contextmanager
            def raise_on_all_ranks(group=None):
                """Raises on all ranks if the block raises on one, which others would wait for."""
                error = None
                try:
                    yield
                except (Exception, CheckpointException) as e:
                    error = e
                errors = [None] * torch.distributed.get_world_size(group)
                torch.distributed.all_gather_object(errors, error and repr(error), group)
                if error is not None:
                    raise error
                for rank, text in enumerate(errors):
                    if text is not None:
                        raise CheckpointingException(f'rank {rank} failed: {text}')
            ''',
        ),
        after(
            MODULE,
            "import os",
            "from contextlib import nullcontext",
        ),
        replace(
            MODULE,
            "from megatron.core.msc_utils import maybe_msc",
            "from megatron.core.msc_utils import MultiStorageClientFeature, maybe_msc",
        ),
        replace(
            MODULE,
            "from .core import",
            "from .core import CheckpointingConfig, CheckpointingException, save_config",
        ),
        before(
            LOAD,
            "verify_checkpoint(checkpoint_dir)",
            """
            # A load without validation can be that of a single rank.
            on_all_ranks = raise_on_all_ranks if validate_access_integrity else nullcontext

            """,
        ),
        wrap(LOAD, "verify_checkpoint(checkpoint_dir)", "with on_all_ranks(process_group):"),
        wrap(
            LOAD,
            "common_state_dict = load_common_state_dict(checkpoint_dir)",
            "with on_all_ranks(process_group):",
        ),
        after(
            LOAD,
            "validate_integrity_and_strict_load(",
            """
            if validate_access_integrity and torch.distributed.get_rank(process_group) == 0:
                _verify_files(checkpoint_dir, global_metadata)
            """,
        ),
        wrap(
            LOAD,
            "validate_integrity_and_strict_load(",
            "with on_all_ranks(process_group):",
            until="if validate_access_integrity and torch.distributed.get_rank(process_group) == 0",
        ),
        substitute(
            LOAD,
            "sharded_strategy.load(sharded_state_dict, checkpoint_dir, async_strategy)",
            "sharded_strategy.load(\n"
            "        sharded_state_dict, checkpoint_dir, async_strategy\n    )",
        ),
        wrap(
            LOAD, "loaded_state_dict = sharded_strategy.load(", "with on_all_ranks(process_group):"
        ),
        before(
            MODULE,
            "def _legacy_common_state_exists",
            '''
            def _verify_files(checkpoint_dir: str, global_metadata: list) -> None:
                """Raises if a file with something that a rank loads is missing or truncated."""
                if MultiStorageClientFeature.is_enabled():
                    return
                keys = {getattr(item, "unique_key", item.key) for items in global_metadata for item in items}
                ends = {}
                metadata = _get_filesystem_reader(checkpoint_dir).read_metadata()
                for index, stored in metadata.storage_data.items():
                    if index.fqn in keys:
                        end = stored.offset + stored.length
                        ends[stored.relative_path] = max(end, ends.get(stored.relative_path, 0))
                for name, end in ends.items():
                    size = os.path.getsize(os.path.join(checkpoint_dir, name))
                    if size < end:
                        raise CheckpointingException(f"{name} has only {size} of {end} bytes")


            ''',  # noqa: E501
        ),
        substitute(
            FULLY_PARALLEL,
            "    debug_time,\n",
            "    debug_time,\n    raise_on_all_ranks,\n",
        ),
        before(
            WRAPPER,
            'debug_time("base_load_ShardedTensorsAndObjects", logger)',
            "pg = self.parallelization_group",
        ),
        substitute(
            WRAPPER,
            'debug_time("base_load_ShardedTensorsAndObjects", logger)',
            'debug_time("base_load_ShardedTensorsAndObjects", logger), raise_on_all_ranks(pg)',
        ),
        substitute(
            WRAPPER,
            'debug_time("base_load_ShardedObjects", logger)',
            'debug_time("base_load_ShardedObjects", logger), raise_on_all_ranks()',
        ),
        substitute(
            WRAPPER,
            'debug_time("base_load_ShardedTensors", logger)',
            'debug_time("base_load_ShardedTensors", logger), raise_on_all_ranks()',
        ),
    ),
    unit_tests=(
        "dist_checkpointing/test_serialization.py",
        "dist_checkpointing/test_fully_parallel.py",
        "dist_checkpointing/test_strict.py",
    ),
    after=("failed-dist-save-hangs",),
    ranks=2,
)
