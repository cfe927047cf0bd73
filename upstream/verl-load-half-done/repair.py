"""verl checks the files of all folders, on all ranks, before a load changes anything."""

from upstream.edits import Repair, after, before

_MANAGER = "verl.utils.checkpoint.megatron_checkpoint_manager"
_CLASS = f"{_MANAGER}:MegatronCheckpointManager"

REPAIR = Repair(
    edits=(
        after(
            _MANAGER,
            "from packaging import version",
            "from torch.distributed.checkpoint import FileSystemReader",
        ),
        after(
            f"{_CLASS}.load_checkpoint",
            "self._raise_for_unsupported_peft_checkpoint_layout(local_path, model_dist_path)",
            """

            # A load that has begun cannot be undone, so check all files first.
            has_model = self.should_load_dist_ckpt_model or (self.should_load_hf_model and self.peft_cls is not None)
            to_load = (
                (has_model, model_dist_path),
                (self.should_load_optimizer, optim_dist_path),
                (self.should_load_extra, extra_dist_path),
            )
            self._check_dist_checkpoints([path for is_loaded, path in to_load if is_loaded])
            """,  # noqa: E501
        ),
        before(
            _CLASS,
            "def load_checkpoint",
            '''
            def _check_dist_checkpoints(self, paths: list[str]):
                """Raise on all ranks if a file is missing, truncated or unreadable; each rank checks a part."""
                error = None
                try:
                    for path in paths:
                        ends = {}
                        for item in FileSystemReader(path).read_metadata().storage_data.values():
                            file = os.path.join(path, item.relative_path)
                            ends[file] = max(ends.get(file, 0), item.offset + item.length)
                        for file in sorted(ends)[torch.distributed.get_rank() :: torch.distributed.get_world_size()]:
                            if os.path.getsize(file) < ends[file]:
                                raise ValueError(f"{file} is truncated")
                except Exception as exc:
                    error = exc
                errors = [None] * torch.distributed.get_world_size()
                torch.distributed.all_gather_object(errors, error and repr(error))
                if any(errors):
                    raise RuntimeError(f"Checkpoint cannot be loaded: {[e for e in errors if e]}") from error

            ''',  # noqa: E501
        ),
    ),
    ranks=2,
)
