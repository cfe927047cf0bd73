"""Sends buckets as objects in a store that fsspec supports, such as S3 or a folder.

A store may return stale or wrong bytes. So the key of each object has the SHA-256 of its bytes,
which every read checks.
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
"""The environment variable with the URL below which vLLM's workers may read objects; none if
unset."""
#: Options of file systems whose values may appear in errors.
_PUBLIC = {"endpoint_url", "region_name", "host", "port", "protocol"}
_LEVEL, _THREADS = 1, 4  # bf16 weights shrink by a fifth; higher levels do not help
_FAILS = object()
_PARTIAL = ".partial"


class Objects:
    """Stores bytes by key, below a URL of an object store or in a folder; its errors show no access
    key, token or password.

    All methods block, and raise `TransportError` if the store fails.

    Example: `objects.get(objects.put("objects/", content))`.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        """Open the object store or folder at `url`, through fsspec.

        Args:
            url: a folder's path, or a URL of one of `urls.SCHEMES`.
            options: arguments of fsspec's file system, such as `key` and `secret` for S3; None for
                those of the environment.

        Raises:
            ModuleNotFoundError: fsspec, zstandard or the scheme's package is not installed.
            ValueError: the URL is not a store's, or fsspec rejects the options.
        """
        with naming_the_remedy("a bucket of objects"):
            import fsspec
            import zstandard  # noqa: F401 (if it is missing, fail before an update begins)
        self.address, self._secrets = split_secrets(url)
        """The URL without secrets."""
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
        except Exception as error:  # noqa: BLE001 (a file system's own error, which may show secrets)
            failure = ValueError(
                f"{self.address} cannot be opened: {self._without_secrets(error)}; give a URL that "
                "fsspec knows, and options of its file system"
            )
        else:
            self._root = root.rstrip("/")
            # Secrets from the environment, and those that the file system has parsed from the URL.
            self._secrets |= {*_values(self._store.storage_options)}
            return
        raise failure  # outside of the handler, else the original error would be its context

    def put(self, prefix: str, content: bytes) -> str:
        """Write `content` as an object; return its key, which is `prefix` and the SHA-256 of the
        content.
        """
        key = prefix + hashlib.sha256(content).hexdigest()
        self.write(key, content)
        return key

    def get(self, key: str, nbytes: int | None = None) -> bytes:
        """Read an object, check its bytes against the SHA-256 in the key, and return the bytes.

        `nbytes` is the announced size, which is checked and bounds the read.

        Raises:
            UpdateDamaged: the object is missing, has another size, or has other bytes than were
                written.
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
        digest = hashlib.sha256(content).hexdigest()
        if digest != expected[1] or nbytes not in (None, len(content)):
            raise UpdateDamaged(
                f"{self.address}: object {key} has {len(content)} bytes with SHA-256 {digest}"
                f"{'' if nbytes is None else f', and {nbytes} bytes were announced'}: it was cut "
                "short, damaged or exchanged; send everything"
            )
        return content

    def write(self, key: str, content: bytes) -> None:
        """Write `content` under a key atomically: readers get the old or the new content."""
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
        """Return the content under a key; None if there is no such key. With `nbytes`, read at most
        one byte more than `nbytes`, which shows the caller that the content is too long.
        """
        path = f"{self._root}/{key}"
        part = {} if nbytes is None else {"start": 0, "end": nbytes + 1}
        content: bytes | None = self._do(
            f"reading {key}", lambda: self._store.cat_file(path, **part), absent=None
        )
        return content

    def keys(self, folder: str) -> set[str]:
        """Return the keys of the objects in a folder of the store. The store may not list the
        newest objects yet.
        """

        def listed() -> Iterable[str]:
            self._store.invalidate_cache()
            names: Iterable[str] = self._store.find(f"{self._root}/{folder}")
            return names

        names = self._do(f"listing {folder}", listed, absent=())
        file_names = (pathlib.PurePosixPath(name).name for name in names)
        return {f"{folder}/{name}" for name in file_names if not name.endswith(_PARTIAL)}

    def remove(self, keys: Iterable[str]) -> None:
        """Remove the objects under these keys; missing keys are ignored."""
        for key in sorted(keys):
            remove = functools.partial(self._store.rm_file, f"{self._root}/{key}")
            self._do(f"removing {key}", remove, absent=None)

    def remove_partials(self) -> None:
        """Remove the partial files that writers left when they died, if the store is a local
        folder; otherwise a no-op.
        """
        if not getattr(self._store, "local_file", False):
            return
        for folder in ("", "objects", "manifests"):
            unique = "[0-9a-f]" * 8
            for partial in pathlib.Path(self._root, folder).glob(f"*.{unique}{_PARTIAL}"):
                # A file that is being written is locked. Without locks, none is removed.
                with contextlib.suppress(OSError), partial.open("r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    partial.unlink()

    def _do(self, doing: str, call: Callable[[], Any], *, absent: Any = _FAILS) -> Any:
        """Call `call`, which accesses the store, and return its result. With `absent`, return
        `absent` if the store does not have the key. Any other error becomes a `TransportError`
        without secrets.
        """
        try:
            return call()
        except Exception as error:  # noqa: BLE001 (a file system's own error, which may show secrets)
            if isinstance(error, FileNotFoundError) and absent is not _FAILS:
                return absent
            text = self._without_secrets(error)
        # Outside of the handler, else the store's error would be its context.
        raise TransportError(
            f"{self.address}: {doing} failed: {text}; check that the store answers, and that its "
            "keys may do that"
        )

    def _without_secrets(self, error: Exception) -> str:
        text = f"{type(error).__name__}: {error}"
        for secret in sorted(filter(None, self._secrets), key=len, reverse=True):
            for form in (secret, urllib.parse.quote(secret, ""), urllib.parse.unquote(secret)):
                text = text.replace(form, "***")
        return text


@contextlib.contextmanager
def _held(partial: pathlib.Path) -> Iterator[None]:
    """Create a file and keep it locked during the `with` block, so that `remove_partials` does not
    remove it.
    """
    while True:
        with partial.open("wb") as file:
            with contextlib.suppress(OSError):  # without locks, `remove_partials` removes nothing
                fcntl.flock(file, fcntl.LOCK_EX)
            if partial.exists():  # it may have been removed before it was locked
                yield
                return


def _values(options: Any) -> Iterator[str]:
    """Yield all strings in a file system's nested options, as possible secrets; options that are
    known to be public, such as `host`, are left out.
    """
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
    """Write a bucket as one compressed object; return the JSON with which `get_bucket` finds it."""
    import zstandard

    # Zeros, because the SHA-256 includes the gaps between tensors.
    flat_N = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.pack(bucket.tensors, flat_N)
    compressor = zstandard.ZstdCompressor(level=_LEVEL, threads=_THREADS)
    content = compressor.compress(memoryview(flat_N.numpy()))
    return {"object": objects.put(prefix, content), "object_bytes": len(content)}


def get_bucket(objects: Objects, layout: BucketLayout, announced: Mapping[str, Any]) -> Bucket:
    """Read and decompress the object of a bucket that `put_bucket` wrote, and return the bucket.

    Raises:
        UpdateDamaged: the object is missing or damaged, or differs from the announcement.
    """
    import zstandard

    subject = f"{objects.address}: a bucket"
    key: str = field(announced, "object", str, subject, REMEDY)
    size: int = field(announced, "object_bytes", int, subject, REMEDY)
    # zstandard never needs more than this bound, even for incompressible bytes.
    if size > (most := layout.nbytes + layout.nbytes // 128 + 1024):
        raise UpdateDamaged(
            f"{subject} of {layout.nbytes} bytes is announced with an object of {size}, and at "
            f"most {most} are needed; {REMEDY}"
        )
    content = objects.get(key, size)
    try:
        # Checked before allocating: the frame header has the decompressed size.
        size_in_object = zstandard.frame_content_size(content)
        if size_in_object == layout.nbytes:
            # Decompress no more than that, in case the header is wrong.
            flat_N = torch.empty(layout.nbytes, dtype=torch.uint8)
            memory = memoryview(flat_N.numpy())
            with zstandard.ZstdDecompressor().stream_reader(content) as reader:
                filled = 0
                while filled < len(memory) and (count := reader.readinto(memory[filled:])):
                    filled += count
                size_in_object = filled + len(reader.read(1))
    except zstandard.ZstdError as error:
        raise UpdateDamaged(
            f"{objects.address}: object {key} cannot be decompressed: {error}; send everything"
        ) from error
    if size_in_object != layout.nbytes:
        raise UpdateDamaged(
            f"{objects.address}: object {key} holds {size_in_object} bytes or more, and "
            f"{layout.nbytes} were announced; send everything"
        )
    return layout.unpack(flat_N)


class BucketSender(Sender):
    """Sends each bucket of an update as an object in a store such as S3, and removes the object
    once all workers have it.

    Credentials are never announced: workers use those of their own environment, in which
    `MEGATRON_IDEMPOTENT_BUCKET` must be this URL or a parent of it.

    Example: `VllmEngine(url, transport=lambda: BucketSender("s3://weights/run-7"))`.
    """

    kind = KIND

    def __init__(self, url: str, *, options: Mapping[str, Any] | None = None) -> None:
        """Open the store, given the URL and options of `Objects`.

        Raises:
            ValueError: as in `Objects`.
            ModuleNotFoundError: as in `Objects`.
        """
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
        self.release(layout.index)  # from an earlier attempt
        announced = put_bucket(self._objects, self._prefix, layout, bucket)
        self._keys[layout.index] = announced["object"]
        return announced

    def release(self, index: int) -> None:
        if key := self._keys.pop(index, ""):
            self._objects.remove([key])

    def close(self) -> None:
        self._objects.remove(self._keys.values())


class BucketReceiver(Receiver):
    """Reads in a worker the objects that a `BucketSender` wrote, with the credentials of the
    worker's environment.

    It opens only URLs below the one that its operator has allowed.
    """

    def __init__(self, opened: Announcement, allowed: str) -> None:
        """Open the store that an announcement names, if its URL is below `allowed`; an empty
        `allowed` rejects every URL.

        Raises:
            TransportError: the announced URL is not below the allowed one.
            ModuleNotFoundError: as in `Objects`.
            ValueError: as in `Objects`.
        """
        super().__init__(opened)
        url: str = opened_field(opened, "url", str)
        try:
            location, root = place_of(url), place_of(allowed) if allowed else ()
            foreign = not root or location[: len(root)] != root or bool(split_secrets(url)[1])
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
