"""The reader uses cached metadata only for the file that they were read from."""

from upstream.edits import Repair, after, first

READER = (
    "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader"
    ":CachedMetadataFileSystemReader"
)

REPAIR = Repair(
    edits=(
        after(
            READER,
            "_metadata_cache: Dict[str, Metadata] = {}",
            "_metadata_files: Dict[str, tuple] = {}",
        ),
        first(
            f"{READER}.read_metadata",
            """
            # A later save into the same directory writes another file.
            stat = os.stat(os.path.join(self.path, ".metadata"))
            file = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if self._metadata_files.get(self._cache_key) != file:
                self._metadata_cache.pop(self._cache_key, None)
                self._metadata_files[self._cache_key] = file
            """,
        ),
    ),
    unit_tests=("dist_checkpointing/test_pipeline_parallel_layout.py",),
)
