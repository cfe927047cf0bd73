"""Remembers which tensors the engines have, so that an update may leave them out."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping

from megatron_idempotent.rollout import EngineHealth
from megatron_idempotent.weights import Bucket
from megatron_idempotent.weights.records import end_export


class Passing:
    """Passes the buckets of one update on: counts them, and drops tensors that the engines have.

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
        """Yields the buckets, once. Closing the generator closes the source."""
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
    """Keeps the last update's checksums; the next may build on it if all engines have it."""

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
        """Keeps an update's checksums once all of its buckets have passed."""
        self._version, self._checksums = passing.version, passing.checksums

    def forget(self) -> None:
        """Drops the checksums while an update is under way: after an interruption all is sent."""
        self._version, self._checksums = None, {}
