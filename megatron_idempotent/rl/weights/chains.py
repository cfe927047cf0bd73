"""Lists the updates in a bucket of objects, and reads consecutive updates as one.

Keys below the bucket's URL:

| key | content |
|---|---|
| `objects/` and a SHA-256 | tensors and deltas, compressed |
| `manifests/` and a SHA-256 | an update as JSON: version, base, and the location of each tensor |
| `latest.json` | the run, and its available updates, oldest first |
| `writer` | a random token of the newest publisher |

An update's objects are written first, then its manifest, and finally `latest.json` in one write, so
that an update is published atomically. The names of objects and manifests contain their SHA-256,
which reveals stale or wrong bytes.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .deltas import CODEC, EncodedDelta, apply, join
from .records import DELTA, Bucket, UpdateDamaged, WeightUpdate, check_kv_scales, checksum, field
from .records import listed as joined
from .transports.bucket import Objects, get_bucket
from .transports.layout import BucketLayout

LATEST, _FORMAT = "latest.json", 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """The entry of one update in the index `latest.json` of a bucket of objects: its id, its
    versions, the key of its manifest, and its size.
    Example: `index.updates[-1].version`.
    """

    id: str
    version: int
    base_version: int | None
    """The version of the previous update, on which this one builds; None for an anchor, which has
    every tensor."""
    manifest: str
    """The key of the update's manifest."""
    nbytes: int
    """The number of bytes of the update's objects."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """The index `latest.json` of an object store's bucket: the run's name, and the entries of the
    updates in the bucket. Example: `Index.read(objects)`.
    """

    run: str
    updates: tuple[Listed, ...]

    @classmethod
    def read(cls, objects: Objects) -> Index | None:
        """Read the index `latest.json` of an object store's bucket; return None if nothing was ever
        published there.

        Raises:
            UpdateDamaged: the index is malformed, or its updates do not form a chain.
        """
        content = objects.read(LATEST)
        if content is None:
            return None
        subject, remedy = f"{objects.address}: {LATEST}", "publish again, into an empty bucket"
        content_fields = _parsed(content, subject, remedy)
        if (format_ := field(content_fields, "format", int, subject, remedy)) != _FORMAT:
            raise UpdateDamaged(
                f"{subject} has format {format_}, this release reads {_FORMAT}; {remedy}"
            )
        run = field(content_fields, "run", str, subject, remedy)
        updates = tuple(
            Listed(
                **_id_fields(entry, subject, remedy),
                manifest=field(entry, "manifest", str, subject, remedy),
                nbytes=field(entry, "nbytes", int, subject, remedy),
            )
            for entry in field(content_fields, "updates", list, subject, remedy)
        )
        previous = None
        for update in updates:
            late = previous is not None and update.version <= previous
            if late or update.base_version not in (None, previous):
                raise UpdateDamaged(
                    f"{subject} has version {update.version}, which builds on "
                    f"{update.base_version}, after {previous}; {remedy}"
                )
            previous = update.version
        if not updates:
            raise UpdateDamaged(f"{subject} lists no updates; {remedy}")
        return cls(run=run, updates=updates)

    def write(self, objects: Objects) -> None:
        """Replace the `latest.json` of the bucket `objects` by this index, in one write."""
        fields = {"format": _FORMAT, **dataclasses.asdict(self)}
        objects.write(LATEST, json.dumps(fields, indent=1).encode())

    @property
    def newest(self) -> Listed:
        """The index's entry for the newest update."""
        return self.updates[-1]

    @property
    def anchors(self) -> list[int]:
        """The positions in `updates` of the anchors, i.e. of the updates that have every tensor."""
        return [
            position for position, update in enumerate(self.updates) if update.base_version is None
        ]

    def chain(self, base: int | None) -> tuple[Listed, ...]:
        """Return the entries of the newest updates that bring weights of version `base` to the
        newest version: the updates after `base`, or those from the last anchor on (an update with
        every tensor) if these are fewer.
        """
        starts = (
            position
            for position, update in enumerate(self.updates)
            if update.base_version is None or update.base_version == base
        )
        return self.updates[max(starts) :]


def _parsed(content: bytes, subject: str, remedy: str) -> Any:
    """Parse the JSON of an index or a manifest. Raise `UpdateDamaged`, with `subject` as the
    content's name, if the JSON is invalid.

    Raises:
        UpdateDamaged: the content is not JSON.
    """
    try:
        return json.loads(content)
    except (RecursionError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
        raise UpdateDamaged(f"{subject} cannot be read: {text}; {remedy}") from error


def _id_fields(fields: Any, subject: str, remedy: str) -> dict[str, Any]:
    """Check and return the fields `id`, `version` and `base_version` of an update's JSON.

    Raises:
        UpdateDamaged: a field is missing or malformed.
    """
    kinds: dict[str, Any] = {"id": str, "version": int, "base_version": (int, type(None))}
    return {key: field(fields, key, kind, subject, remedy) for key, kind in kinds.items()}


def write_manifest(
    objects: Objects, run: str, update: WeightUpdate, buckets: Sequence[Mapping[str, Any]]
) -> Listed:
    """Write the manifest of an update whose buckets are already written as objects; return the
    update's entry for the index.

    Args:
        objects: the bucket of objects.
        run: the name of the run.
        update: the update.
        buckets: for each bucket its layout as JSON, merged with the result of `put_bucket`.
    """
    names = [tensor["name"] for bucket in buckets for tensor in bucket["tensors"]]
    fields = {"run": run, "codec": CODEC, "update": dataclasses.asdict(update), "tensors": names}
    content = json.dumps({**fields, "buckets": buckets}, indent=1).encode()
    return Listed(
        id=update.id,
        version=update.version,
        base_version=update.base_version,
        manifest=objects.put("manifests/", content),
        nbytes=sum(bucket["object_bytes"] for bucket in buckets),
    )


class Manifest:
    """Reads the tensors of one update from the objects that its manifest lists. Reading the tensors
    in the manifest's order fetches each object once.

    Example: `Manifest(objects, index.run, index.newest).bucket("lm_head.weight")`.
    """

    def __init__(self, objects: Objects, run: str, listed: Listed) -> None:
        """Fetch the manifest of the update `listed`, and check its fields.

        Raises:
            UpdateDamaged: it cannot be read, or belongs to another update.
        """
        self._objects, self._listed = objects, listed
        subject, remedy = f"{objects.address}: {listed.manifest}", "publish everything"
        content = _parsed(objects.get(listed.manifest), subject, remedy)
        update = field(content, "update", dict, subject, remedy)
        codec_and_run = [field(content, key, str, subject, remedy) for key in ("codec", "run")]
        in_manifest = *codec_and_run, *_id_fields(update, subject, remedy).values()
        in_index = CODEC, run, listed.id, listed.version, listed.base_version
        if in_manifest != in_index:
            raise UpdateDamaged(
                f"{subject} is of codec, run, id, version and base {in_manifest}, listed as "
                f"{in_index}: it was exchanged; {remedy}"
            )
        self.kv_scales: Mapping[str, float] | None = field(
            update, "kv_scales", (dict, type(None)), subject, remedy
        )
        if self.kv_scales is not None:
            try:
                check_kv_scales(self.kv_scales)
            except ValueError as error:
                raise UpdateDamaged(f"{subject}: {error}; {remedy}") from error
        self._buckets: list[Any] = field(content, "buckets", list, subject, remedy)
        self.keys = {listed.manifest}
        """The keys of the manifest and all objects of the update."""
        self.places: dict[str, int] = {}
        """The bucket's number for each tensor, in the model's order."""
        names = []
        for number, announced in enumerate(self._buckets):
            self.keys.add(field(announced, "object", str, subject, remedy))
            for entry in field(announced, "tensors", list, subject, remedy):
                names.append(field(entry, "name", str, subject, remedy))
                field(entry, "checksum", str, subject, remedy)
                self.places[names[-1]] = number
        if names != (tensors := field(content, "tensors", list, subject, remedy)):
            absent = (
                tensor
                for tensor in tensors
                if isinstance(tensor, str) and tensor not in self.places
            )
            lacks = joined([reprlib.repr(name) for name in absent], ", ")
            raise UpdateDamaged(
                f"{subject} names {len(tensors)} tensors, and its buckets have {len(names)}"
                f"{lacks and ', without '}{lacks or ', not the same in the same order'}; {remedy}"
            )
        self.bytes_read = 0
        self._cached: tuple[int, Bucket | None] = -1, None

    def bucket(self, name: str) -> Bucket:
        """Fetch and return the bucket of weights that contains the tensor or delta `name`; the last
        fetched bucket is kept for the next call.

        Raises:
            UpdateDamaged: its object is missing or damaged.
        """
        number, bucket = self._cached
        if bucket is None or number != self.places[name]:
            self._cached = -1, None  # frees the old bucket first
            announced = self._buckets[self.places[name]]
            layout = BucketLayout.from_json(announced, update_id=self._listed.id)
            number, bucket = self.places[name], get_bucket(self._objects, layout, announced)
            self._cached = number, bucket
            self.bytes_read += announced["object_bytes"]
        return bucket


class Chain:
    """Reads consecutive updates from an object store's bucket, each building on the previous one,
    as one merged update.

    Tensors are in the model's order in all updates, so each object is fetched once, and one object
    per update is in memory.

    Example: `for bucket in Chain(objects, index.run, index.chain(7)).buckets(1 << 28): …`
    """

    def __init__(self, objects: Objects, run: str, chain: Sequence[Listed]) -> None:
        """Fetch the manifests of all updates in `chain`.

        Raises:
            UpdateDamaged: as in `Manifest`.
        """
        self._manifests = [Manifest(objects, run, listed) for listed in chain]
        scales = [
            manifest.kv_scales for manifest in self._manifests if manifest.kv_scales is not None
        ]
        self.update = WeightUpdate(
            id=chain[-1].id,
            version=chain[-1].version,
            base_version=chain[0].base_version,
            kv_scales=scales[-1] if scales else None,
        )

    @property
    def bytes_read(self) -> int:
        """The number of bytes in the objects that were fetched so far."""
        return sum(manifest.bytes_read for manifest in self._manifests)

    def buckets(self, bucket_bytes: int) -> Iterator[Bucket]:
        """Yield the tensors that the updates change, each in its newest version or as one merged
        delta, in buckets of up to `bucket_bytes`.

        Raises:
            UpdateDamaged: an object is missing or damaged.
        """
        names = [name for manifest in self._manifests for name in manifest.places]
        index, size = 0, 0
        tensors: dict[str, torch.Tensor] = {}
        checksums: dict[str, int] = {}
        for name in dict.fromkeys(name.removesuffix(DELTA) for name in names):
            sent, tensor, value = self._newest(name)
            if tensors and size + tensor.nbytes > bucket_bytes:
                yield Bucket(index=index, tensors=tensors, checksums=checksums)
                index, size, tensors, checksums = index + 1, 0, {}, {}
            tensors[sent], checksums[sent] = tensor, value
            size += tensor.nbytes
        yield Bucket(index=index, tensors=tensors, checksums=checksums)

    def _newest(self, name: str) -> tuple[str, torch.Tensor, int]:
        """Return the tensor `name` as it is after the last update of the chain: complete if an
        update of the chain has the complete tensor, otherwise as one delta, joined from the
        updates' deltas. The result is the name for a bucket (a delta's ends in `DELTA`), the tensor
        or the delta's bytes, and the checksum.
        """
        deltas: list[EncodedDelta] = []
        for manifest in reversed(self._manifests):
            if name + DELTA in manifest.places:
                encoded = manifest.bucket(name + DELTA).tensors[name + DELTA]
                deltas.insert(0, EncodedDelta(encoded))
            elif name in manifest.places:
                bucket = manifest.bucket(name)
                tensor, value = bucket.tensors[name], bucket.checksums[name]
                if deltas:
                    delta = join(deltas)
                    apply(delta, tensor)
                    value = delta.after
                return name, tensor, value
        delta = join(deltas)
        return name + DELTA, delta.data, checksum(delta.data)
