"""Sends buckets as objects of a store that fsspec reaches: S3 and its like, or a folder.

A store gives back what it was given, or something older, or something else. So each object is named
by the SHA-256 of its bytes, and is held to it whenever it is read.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import pathlib
import re
import secrets
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from megatron_idempotent.lazy import naming_the_remedy
from megatron_idempotent.rl.weights.records import Bucket, UpdateDamaged, WeightUpdate, field
from megatron_idempotent.rl.weights.safetensors_io import flush
from megatron_idempotent.rl.weights.urls import place_of, split_secrets

from .base import Announcement, Receiver, Sender, Session, TransportError, opened_field
from .layout import REMEDY, BucketLayout

KIND = "bucket"
VARIABLE = "MEGATRON_IDEMPOTENT_BUCKET"
"""The variable with the URL at or below which vLLM's workers read objects; unset, they read none.
"""
#: The options of file systems whose values errors may show.
_PUBLIC = {"endpoint_url", "region_name", "host", "port", "protocol"}
_LEVEL, _THREADS = 1, 4  # bf16 weights shrink by a fifth, and at higher levels by no more
_FAILS = object()
_PARTIAL = ".partial"


class Objects:
    """Keeps bytes below a URL by key; its errors show no key, token or password.

    All methods block, and raise `TransportError` if the store does not do as it is told.
    Example: `objects.get(objects.put("objects/", content))`.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            url: a folder's path, or a URL of one of `urls.SCHEMES`.
            options: arguments of fsspec's file system, such as `key` and `secret` for S3; None for
                those of the environment.

        Errors: `ModuleNotFoundError` without fsspec, zstandard or the package of the scheme;
            `ValueError` for a URL that is no place of a store, and for options that fsspec does not
            take.
        """
        with naming_the_remedy("a bucket of objects"):
            import fsspec
            import zstandard  # noqa: F401 (missing, it is to be said before an update begins)
        self.address, self._secrets = split_secrets(url)
        """The URL, less what is secret in it."""
        self._secrets |= {*_values(options or {})}
        scheme, *folders = place_of(url)
        if scheme == "file":
            url = "file:///" + "/".join(folders)
        failure: Exception
        try:
            self._store, root = fsspec.core.url_to_fs(url, **(options or {}))
        except ImportError as error:
            failure = ModuleNotFoundError(
                f"{self.address}: {error}; pip install 'megatron-idempotent[bucket]' brings s3fs"
            )
        except Exception as error:  # noqa: BLE001 (a file system's own, whose text is not shown)
            failure = ValueError(
                f"{self.address} cannot be opened: {self._told(error)}; give a URL that fsspec "
                "knows, and options of its file system"
            )
        else:
            self._root = root.rstrip("/")
            # Those of the environment, and what the file system has read in the URL.
            self._secrets |= {*_values(self._store.storage_options)}
            return
        raise failure  # outside of the handler: as its context, the error would be printed too

    def put(self, prefix: str, content: bytes) -> str:
        """Write an object; return its key, which is the prefix and the checksum."""
        key = prefix + hashlib.sha256(content).hexdigest()
        self.write(key, content)
        return key

    def get(self, key: str, nbytes: int | None = None) -> bytes:
        """Return an object, of which no more than its announced bytes and one are read.

        Errors: `UpdateDamaged` if it is absent, is not what was written, or has other bytes.
        """
        expected = re.fullmatch(r"(?:\w+/|transfer-\w+-)([0-9a-f]{64})", key)
        if expected is None:
            raise UpdateDamaged(f"{self.address}: {key!r} is no object's key; send everything")
        content = self.read(key, nbytes)
        if content is None:
            raise UpdateDamaged(
                f"{self.address}: object {key} is missing; it was removed, or never written: send "
                "everything"
            )
        found = hashlib.sha256(content).hexdigest()
        if found != expected[1] or nbytes not in (None, len(content)):
            raise UpdateDamaged(
                f"{self.address}: object {key} has {len(content)} bytes with SHA-256 {found}"
                f"{'' if nbytes is None else f', and {nbytes} bytes were announced'}: it was cut "
                "short, damaged or exchanged; send everything"
            )
        return content

    def write(self, key: str, content: bytes) -> None:
        """Write a key, whole or not at all."""
        path = f"{self._root}/{key}"
        if not getattr(self._store, "local_file", False):
            self._do(f"writing {key}", lambda: self._store.pipe_file(path, content))
            return

        def replace() -> None:
            partial = pathlib.Path(f"{path}.{secrets.token_hex(4)}{_PARTIAL}")
            partial.parent.mkdir(parents=True, exist_ok=True)
            with _held(partial):
                try:
                    partial.write_bytes(content)
                    flush(partial)
                    os.replace(partial, path)
                finally:
                    partial.unlink(missing_ok=True)

        self._do(f"writing {key}", replace)

    def read(self, key: str, nbytes: int | None = None) -> bytes | None:
        """Return what a key has, no more than so many bytes and one; None if it is absent."""
        path = f"{self._root}/{key}"
        part = {} if nbytes is None else {"start": 0, "end": nbytes + 1}
        found: bytes | None = self._do(
            f"reading {key}", lambda: self._store.cat_file(path, **part), absent=None
        )
        return found

    def keys(self, folder: str) -> set[str]:
        """Return the keys in a folder, as the store lists them, which may be late."""

        def listed() -> Iterable[str]:
            self._store.invalidate_cache()
            names: Iterable[str] = self._store.find(f"{self._root}/{folder}")
            return names

        names = self._do(f"listing {folder}", listed, absent=())
        found = (pathlib.PurePosixPath(name).name for name in names)
        return {f"{folder}/{name}" for name in found if not name.endswith(_PARTIAL)}

    def remove(self, keys: Iterable[str]) -> None:
        """Remove keys; those that are absent already: no-op."""
        for key in sorted(keys):
            remove = functools.partial(self._store.rm_file, f"{self._root}/{key}")
            self._do(f"removing {key}", remove, absent=None)

    def remove_partials(self) -> None:
        """Remove what writers to a folder left that died within a write; other stores: no-op."""
        if not getattr(self._store, "local_file", False):
            return
        for folder in ("", "objects", "manifests"):
            unique = "[0-9a-f]" * 8
            for partial in pathlib.Path(self._root, folder).glob(f"*.{unique}{_PARTIAL}"):
                # One that is being written is locked, as may be all where there are no locks.
                with contextlib.suppress(OSError), partial.open("r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    partial.unlink()

    def _do(self, doing: str, call: Callable[[], Any], *, absent: Any = _FAILS) -> Any:
        """Return what the call does, or `absent` if there is no such key."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 (a file system's own, whose text is not shown)
            if isinstance(error, FileNotFoundError) and absent is not _FAILS:
                return absent
            told = self._told(error)
        # Outside of the handler: as its context, the store's own error would be printed too.
        raise TransportError(
            f"{self.address}: {doing} failed: {told}; check that the store answers, and that its "
            "keys may do that"
        )

    def _told(self, error: Exception) -> str:
        told = f"{type(error).__name__}: {error}"
        for secret in sorted(filter(None, self._secrets), key=len, reverse=True):
            for form in (secret, urllib.parse.quote(secret, ""), urllib.parse.unquote(secret)):
                told = told.replace(form, "***")
        return told


@contextlib.contextmanager
def _held(partial: pathlib.Path) -> Iterator[None]:
    """Make a file, and keep it locked, so that `remove_partials` leaves it alone."""
    while True:
        with partial.open("wb") as file:
            with contextlib.suppress(OSError):  # without locks nobody removes it, either
                fcntl.flock(file, fcntl.LOCK_EX)
            if partial.exists():  # else it was removed before it was locked
                yield
                return


def _values(options: Any) -> Iterator[str]:
    """Yield all texts in options, as far down as they go, except those that anyone may see."""
    if isinstance(options, str):
        yield options
    elif isinstance(options, Mapping):
        for key, value in options.items():
            if key not in _PUBLIC:
                yield from _values(value)
    elif isinstance(options, (list, tuple)):
        for value in options:
            yield from _values(value)


def put_bucket(
    objects: Objects, prefix: str, layout: BucketLayout, bucket: Bucket
) -> Mapping[str, Any]:
    """Write a bucket as one object; return the JSON with which `get_bucket` finds it."""
    import zstandard

    # Zeros: the gaps between tensors are part of the checksum.
    flat_N = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.pack(bucket.tensors, flat_N)
    compressor = zstandard.ZstdCompressor(level=_LEVEL, threads=_THREADS)
    content = compressor.compress(memoryview(flat_N.numpy()))
    return {"object": objects.put(prefix, content), "object_bytes": len(content)}


def get_bucket(objects: Objects, layout: BucketLayout, announced: Mapping[str, Any]) -> Bucket:
    """Return the bucket that `put_bucket` wrote. Errors: `UpdateDamaged`."""
    import zstandard

    where = f"{objects.address}: a bucket"
    key: str = field(announced, "object", str, where, REMEDY)
    size: int = field(announced, "object_bytes", int, where, REMEDY)
    # More than what zstandard makes of bytes that do not shrink.
    if size > (most := layout.nbytes + layout.nbytes // 128 + 1024):
        raise UpdateDamaged(
            f"{where} of {layout.nbytes} bytes is announced with an object of {size}, and at most "
            f"{most} are needed; {REMEDY}"
        )
    content = objects.get(key, size)
    try:
        # Before there is memory for it; the sender writes its size into its head.
        found = zstandard.frame_content_size(content)
        if found == layout.nbytes:
            # Never more than that, whatever comes after the head.
            flat_N = torch.empty(layout.nbytes, dtype=torch.uint8)
            memory = memoryview(flat_N.numpy())
            with zstandard.ZstdDecompressor().stream_reader(content) as reader:
                done = 0
                while done < len(memory) and (count := reader.readinto(memory[done:])):
                    done += count
                found = done + len(reader.read(1))
    except zstandard.ZstdError as error:
        raise UpdateDamaged(
            f"{objects.address}: object {key} cannot be decompressed: {error}; send everything"
        ) from error
    if found != layout.nbytes:
        raise UpdateDamaged(
            f"{objects.address}: object {key} holds {found} bytes or more, and {layout.nbytes} "
            "were announced; send everything"
        )
    return layout.unpack(flat_N)


class BucketSender(Sender):
    """Writes each bucket of an update as an object, and removes it once all workers have it.

    Credentials are never announced: workers take those of their own environment, in which
    `MEGATRON_IDEMPOTENT_BUCKET` names the URL, or one above it.
    Example: `VllmEngine(url, transport=lambda: BucketSender("s3://weights/run-7"))`.
    """

    kind = KIND

    def __init__(self, url: str, *, options: Mapping[str, Any] | None = None) -> None:
        """Take a place and its options. Errors: those of `Objects`."""
        super().__init__()
        self._objects = Objects(url, options)

    def _begin(self, update: WeightUpdate) -> tuple[_Objects, Mapping[str, Any]]:
        # Random, because an update may be sent again, and to several engines at once.
        prefix = f"transfer-{secrets.token_hex(4)}-"
        return _Objects(self._objects, prefix), {"url": self._objects.address}


class _Objects(Session):
    def __init__(self, objects: Objects, prefix: str) -> None:
        self._objects, self._prefix = objects, prefix
        self._keys: dict[int, str] = {}

    def announce(self, layout: BucketLayout, bucket: Bucket) -> Mapping[str, Any]:
        self.release(layout.index)  # of a first try
        announced = put_bucket(self._objects, self._prefix, layout, bucket)
        self._keys[layout.index] = announced["object"]
        return announced

    def release(self, index: int) -> None:
        if key := self._keys.pop(index, ""):
            self._objects.remove([key])

    def close(self) -> None:
        self._objects.remove(self._keys.values())


class BucketReceiver(Receiver):
    """Reads what a `BucketSender` writes, with the credentials of its own environment.

    It opens no other URL than what its operator has named, and what is below that.
    """

    def __init__(self, opened: Announcement, allowed: str) -> None:
        """Take an announcement, and the URL that was named; empty for none.

        Errors: `TransportError` for any other URL; those of `Objects`.
        """
        super().__init__(opened)
        url: str = opened_field(opened, "url", str)
        try:
            place, root = place_of(url), place_of(allowed) if allowed else ()
            foreign = not root or place[: len(root)] != root or bool(split_secrets(url)[1])
        except ValueError as error:
            raise TransportError(f"this receiver opens {allowed or 'no URL'}: {error}") from error
        if foreign:
            raise TransportError(
                f"the sender has its objects at {split_secrets(url)[0]}, and this receiver opens "
                f"{allowed or 'no URL'}; if it is to read there, start it with {VARIABLE} set to "
                "that URL, else correct the sender's"
            )
        self._objects = Objects(url)

    def _receive(self, layout: BucketLayout, announced: Announcement) -> Bucket:
        return get_bucket(self._objects, layout, announced)
