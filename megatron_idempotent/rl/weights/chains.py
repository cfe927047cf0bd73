"""Lists the updates in a bucket of objects, and reads several in a row as one.

Keys below the bucket's URL:

| key | content |
|---|---|
| `objects/` and a SHA-256 | tensors and deltas, compressed |
| `manifests/` and a SHA-256 | an update as JSON: its version and base, each tensor's place |
| `latest.json` | the run, and the updates that can be had, oldest first |
| `writer` | a random name of the publisher that began last |

An update's objects are written first, then its manifest, and `latest.json` last, in one write: the
update is there whole or not at all. All but `latest.json` are named by what they hold, so that a
store that gives back something else is found out.
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
    """Names an update in a bucket. Example: `index.updates[-1].version`."""

    id: str
    version: int
    base_version: int | None
    """The version of the update before it, on which it builds; None for an anchor, which has
    everything."""
    manifest: str
    """The key of its manifest."""
    nbytes: int
    """The number of bytes of its objects."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """Lists the updates of a bucket, as `latest.json` does. Example: `Index.read(objects)`."""

    run: str
    updates: tuple[Listed, ...]

    @classmethod
    def read(cls, objects: Objects) -> Index | None:
        """Return what a bucket has; None if nothing was ever published.

        Errors: `UpdateDamaged` for a list that cannot be read, or is not a chain.
        """
        content = objects.read(LATEST)
        if content is None:
            return None
        where, remedy = f"{objects.address}: {LATEST}", "publish again, into an empty bucket"
        found = _parsed(content, where, remedy)
        if (format_ := field(found, "format", int, where, remedy)) != _FORMAT:
            raise UpdateDamaged(
                f"{where} has format {format_}, this release reads {_FORMAT}; {remedy}"
            )
        run = field(found, "run", str, where, remedy)
        updates = tuple(
            Listed(
                **_named(each, where, remedy),
                manifest=field(each, "manifest", str, where, remedy),
                nbytes=field(each, "nbytes", int, where, remedy),
            )
            for each in field(found, "updates", list, where, remedy)
        )
        before = None
        for each in updates:
            late = before is not None and each.version <= before
            if late or each.base_version not in (None, before):
                raise UpdateDamaged(
                    f"{where} has version {each.version}, which builds on {each.base_version}, "
                    f"after {before}; {remedy}"
                )
            before = each.version
        if not updates:
            raise UpdateDamaged(f"{where} lists no updates; {remedy}")
        return cls(run=run, updates=updates)

    def write(self, objects: Objects) -> None:
        """Make this what the bucket has, at once."""
        fields = {"format": _FORMAT, **dataclasses.asdict(self)}
        objects.write(LATEST, json.dumps(fields, indent=1).encode())

    @property
    def newest(self) -> Listed:
        """The last update."""
        return self.updates[-1]

    @property
    def anchors(self) -> list[int]:
        """The places of the anchors in the list."""
        return [place for place, each in enumerate(self.updates) if each.base_version is None]

    def chain(self, base: int | None) -> tuple[Listed, ...]:
        """Return the updates after a version or, if an anchor is nearer, from the last one on."""
        starts = (
            place
            for place, each in enumerate(self.updates)
            if each.base_version is None or each.base_version == base
        )
        return self.updates[max(starts) :]


def _parsed(content: bytes, where: str, remedy: str) -> Any:
    """Return JSON. Errors: `UpdateDamaged` naming what it is of."""
    try:
        return json.loads(content)
    except (RecursionError, ValueError) as error:
        told = f"{type(error).__name__}: {error}"
        raise UpdateDamaged(f"{where} cannot be read: {told}; {remedy}") from error


def _named(fields: Any, where: str, remedy: str) -> dict[str, Any]:
    """Return the id, version and base version of an update. Errors: `UpdateDamaged`."""
    kinds: dict[str, Any] = {"id": str, "version": int, "base_version": (int, type(None))}
    return {key: field(fields, key, kind, where, remedy) for key, kind in kinds.items()}


def write_manifest(
    objects: Objects, run: str, update: WeightUpdate, buckets: Sequence[Mapping[str, Any]]
) -> Listed:
    """Write the manifest of an update whose buckets were written; return it as it is listed.

    Args:
        objects: the bucket of objects.
        run: the name of the run.
        update: the update.
        buckets: for each bucket its layout as JSON, and what `put_bucket` returned.
    """
    names = [each["name"] for bucket in buckets for each in bucket["tensors"]]
    fields = {"run": run, "codec": CODEC, "update": dataclasses.asdict(update), "tensors": names}
    content = json.dumps({**fields, "buckets": buckets}, indent=1).encode()
    return Listed(
        id=update.id,
        version=update.version,
        base_version=update.base_version,
        manifest=objects.put("manifests/", content),
        nbytes=sum(each["object_bytes"] for each in buckets),
    )


class Manifest:
    """Reads the tensors of one update; each object is fetched once if they are asked for in order.

    Example: `Manifest(objects, index.run, index.newest).bucket("lm_head.weight")`.
    """

    def __init__(self, objects: Objects, run: str, listed: Listed) -> None:
        """Fetch the manifest. Errors: `UpdateDamaged` if it is another's, or cannot be read."""
        self._objects, self._listed = objects, listed
        where, remedy = f"{objects.address}: {listed.manifest}", "publish everything"
        found = _parsed(objects.get(listed.manifest), where, remedy)
        update = field(found, "update", dict, where, remedy)
        told = [field(found, key, str, where, remedy) for key in ("codec", "run")]
        says = *told, *_named(update, where, remedy).values()
        said = CODEC, run, listed.id, listed.version, listed.base_version
        if says != said:
            raise UpdateDamaged(
                f"{where} is of codec, run, id, version and base {says}, listed as {said}: it was "
                f"exchanged; {remedy}"
            )
        self.kv_scales: Mapping[str, float] | None = field(
            update, "kv_scales", (dict, type(None)), where, remedy
        )
        if self.kv_scales is not None:
            try:
                check_kv_scales(self.kv_scales)
            except ValueError as error:
                raise UpdateDamaged(f"{where}: {error}; {remedy}") from error
        self._buckets: list[Any] = field(found, "buckets", list, where, remedy)
        self.keys = {listed.manifest}
        """The keys of all that belongs to the update."""
        self.places: dict[str, int] = {}
        """The number of the bucket of each tensor, in the model's order."""
        names = []
        for number, announced in enumerate(self._buckets):
            self.keys.add(field(announced, "object", str, where, remedy))
            for each in field(announced, "tensors", list, where, remedy):
                names.append(field(each, "name", str, where, remedy))
                field(each, "checksum", str, where, remedy)
                self.places[names[-1]] = number
        if names != (tensors := field(found, "tensors", list, where, remedy)):
            gone = (each for each in tensors if isinstance(each, str) and each not in self.places)
            lacks = joined([reprlib.repr(name) for name in gone], ", ")
            raise UpdateDamaged(
                f"{where} names {len(tensors)} tensors, and its buckets have {len(names)}"
                f"{lacks and ', without '}{lacks or ', not the same in the same order'}; {remedy}"
            )
        self.bytes_read = 0
        self._held: tuple[int, Bucket | None] = -1, None

    def bucket(self, name: str) -> Bucket:
        """Return the bucket that has a tensor. Errors: `UpdateDamaged`."""
        number, bucket = self._held
        if bucket is None or number != self.places[name]:
            self._held = -1, None  # not two at once
            announced = self._buckets[self.places[name]]
            layout = BucketLayout.from_json(announced, update_id=self._listed.id)
            number, bucket = self.places[name], get_bucket(self._objects, layout, announced)
            self._held = number, bucket
            self.bytes_read += announced["object_bytes"]
        return bucket


class Chain:
    """Reads updates of which each builds on the one before, as one update.

    Tensors are in the model's order in all of them, so each object is fetched once, and of each
    update one is in memory.
    Example: `for bucket in Chain(objects, index.run, index.chain(7)).buckets(1 << 28): …`
    """

    def __init__(self, objects: Objects, run: str, chain: Sequence[Listed]) -> None:
        """Fetch the manifests. Errors: those of `Manifest`."""
        self._manifests = [Manifest(objects, run, listed) for listed in chain]
        scales = [each.kv_scales for each in self._manifests if each.kv_scales is not None]
        self.update = WeightUpdate(
            id=chain[-1].id,
            version=chain[-1].version,
            base_version=chain[0].base_version,
            kv_scales=scales[-1] if scales else None,
        )

    @property
    def bytes_read(self) -> int:
        """The number of bytes of the objects that were fetched."""
        return sum(each.bytes_read for each in self._manifests)

    def buckets(self, bucket_bytes: int) -> Iterator[Bucket]:
        """Yield the tensors, in buckets of up to that size. Errors: `UpdateDamaged`."""
        places = [name for each in self._manifests for name in each.places]
        index, size = 0, 0
        tensors: dict[str, torch.Tensor] = {}
        checksums: dict[str, int] = {}
        for name in dict.fromkeys(name.removesuffix(DELTA) for name in places):
            sent, tensor, found = self._newest(name)
            if tensors and size + tensor.nbytes > bucket_bytes:
                yield Bucket(index=index, tensors=tensors, checksums=checksums)
                index, size, tensors, checksums = index + 1, 0, {}, {}
            tensors[sent], checksums[sent] = tensor, found
            size += tensor.nbytes
        yield Bucket(index=index, tensors=tensors, checksums=checksums)

    def _newest(self, name: str) -> tuple[str, torch.Tensor, int]:
        """Return the tensor and its checksum, or its delta, under the name that it is sent with."""
        deltas: list[EncodedDelta] = []
        for manifest in reversed(self._manifests):
            if name + DELTA in manifest.places:
                encoded = manifest.bucket(name + DELTA).tensors[name + DELTA]
                deltas.insert(0, EncodedDelta(encoded))
            elif name in manifest.places:
                bucket = manifest.bucket(name)
                tensor, found = bucket.tensors[name], bucket.checksums[name]
                if deltas:
                    delta = join(deltas)
                    apply(delta, tensor)
                    found = delta.after
                return name, tensor, found
        delta = join(deltas)
        return name + DELTA, delta.data, checksum(delta.data)
