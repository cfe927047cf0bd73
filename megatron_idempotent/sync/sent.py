"""Which bytes the engines have already, so that an update may leave them out."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping

from megatron_idempotent.rollout import EngineHealth
from megatron_idempotent.weights import Bucket
from megatron_idempotent.weights.records import end_export


class Passing:
    """The buckets of one update on their way: counted, and without what the engines have.

    Example: `for bucket in passing.buckets(): …` and then `passing.bytes_sent`.
    """

    def __init__(
        self, version: int, buckets: Iterator[Bucket], known: Mapping[str, int] | None
    ) -> None:
        self.version = version
        self.bytes_sent = 0
        self.tensors_sent = 0
        self.tensors_unchanged = 0
        self.checksums: dict[str, int] = {}
        self._buckets = buckets
        self._known = known or {}

    def buckets(self) -> Generator[Bucket, None, None]:
        """Once; closing it closes the source."""
        try:
            for bucket in self._buckets:
                self.checksums.update(bucket.checksums)
                yield self._sent_of(bucket)
        finally:
            end_export(self._buckets)

    def _sent_of(self, bucket: Bucket) -> Bucket:
        changed = {
            name: tensor
            for name, tensor in bucket.tensors.items()
            if self._known.get(name) != bucket.checksums[name]
        }
        sent = Bucket(
            index=bucket.index,
            tensors=changed,
            checksums={name: bucket.checksums[name] for name in changed},
        )
        self.bytes_sent += sent.nbytes
        self.tensors_sent += len(changed)
        self.tensors_unchanged += len(bucket.tensors) - len(changed)
        return sent


class Sent:
    """The checksums of the last update, to be built on where all engines have it."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._checksums: Mapping[str, int] = {}

    def base(self, healths: Iterable[EngineHealth]) -> int | None:
        """The version to build on, if every engine has just that one; None to send everything."""
        if all(health.version == self._version for health in healths):
            return self._version
        return None

    def passing(self, version: int, buckets: Iterator[Bucket], base: int | None) -> Passing:
        """The buckets of an update that builds on `base`, or on nothing."""
        return Passing(version, buckets, None if base is None else self._checksums)

    def took(self, passing: Passing) -> None:
        """The buckets of this update have all passed, and who has it says its health."""
        self._version, self._checksums = passing.version, passing.checksums

    def forget(self) -> None:
        """An update has begun, and may be interrupted: then the next one sends everything."""
        self._version, self._checksums = None, {}
