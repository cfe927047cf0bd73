"""Objects in a store: what is read is held to its name, and no error shows a secret."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import logging
import sys
import threading
import traceback
import tracemalloc
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("zstandard")

from megatron_idempotent.rl.weights import (
    Bucket,
    TensorInfo,
    UpdateDamaged,
    UpdateMismatch,
    WeightUpdate,
    urls,
)
from megatron_idempotent.rl.weights import transports as t
from megatron_idempotent.rl.weights.transports.bucket import VARIABLE, Objects
from megatron_idempotent.rl.weights.transports.layout import BucketLayout
from megatron_idempotent.rl.weights.urls import split_secrets

pytestmark = pytest.mark.full

UPDATE = WeightUpdate(id="run/1", version=1)
KEY, SECRET, TOKEN = "AKIA-fake-key", "fake/secret+of=nobody", "fake-token-0123"


@pytest.fixture(autouse=True)
def stores_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "SCHEMES", urls.SCHEMES | {"memory"})


def url() -> str:
    return f"memory://{uuid.uuid4().hex}/weights"


def test_an_object_that_is_not_what_was_written_is_refused() -> None:
    objects = Objects(url())
    key = objects.put("objects/", b"content")
    assert key == "objects/" + hashlib.sha256(b"content").hexdigest()
    assert objects.get(key) == b"content"
    objects.write(key, b"content"[:6])
    with pytest.raises(UpdateDamaged, match="6 bytes with SHA-256"):
        objects.get(key)
    objects.remove([key, key])
    with pytest.raises(UpdateDamaged, match="is missing"):
        objects.get(key)
    for wrong in ("latest.json", "../" + "0" * 64, "a/b/" + "0" * 64):
        with pytest.raises(UpdateDamaged, match=wrong):
            objects.get(wrong)


@pytest.mark.parametrize("content", [b"", b"no zstd at all", "shorter", "longer", "cut"])
async def test_an_object_that_holds_something_else_is_refused(content: bytes | str) -> None:
    import zstandard

    place = url()
    sender = t.BucketSender(place)
    bucket = Bucket.of(0, {"w": torch.arange(100.0)})
    receiver = t.receiver(await sender.open(UPDATE), bucket=place)
    announced = dict(await sender.announce(bucket))
    size = {"shorter": 399, "longer": 1 << 20, "cut": 400}.get(content, 0)
    stored = zstandard.compress(bytes(size)) if size else content
    if content == "cut":  # its head says 400 bytes
        stored = stored[:-1]
    announced["object"] = receiver._objects.put("transfer-0-", stored)
    announced["object_bytes"] = len(stored)
    with pytest.raises(UpdateDamaged, match=announced["object"]):
        receiver.receive(announced)
    await sender.close()


RUN = "s3://weights/run"
FOREIGN = [
    "s3://weights/run2",
    "s3://weights",
    "s3://other/run",
    "s3://weights/run/../x",
    "s3://weights/run/./x",
    "s3://weights/run//x",
    "s3://weights/run/%2e%2e/x",
    "s3://weights/run/x?versionId=1",
    "s3://weights/run/x#y",
    "s3://weights/run\\..\\x",
    "s3://weights/run/\n",
    "s3://key:secret@weights/run",
    "s3://key@weights/run",
    "S3://weights/run",
    "gs://weights/run",
    "http://169.254.169.254/weights/run",
    "reference://::data:,{}",
    "reference://::s3://weights/run",
    "simplecache::s3://weights/run",
    "s3://weights/run::reference://",
    "s3://weights/run/x::data:,{}",
    "data:,{}",
    "/etc",
    "file:///etc",
    "memory://weights/run",
    "",
]


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_url_that_no_operator_named_is_not_opened(
    foreign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the schemes are those that every program has
    opened = {"format": 1, "kind": "bucket", "update": "run/1", "url": foreign}
    for allowed, shown in ((RUN, RUN), ("", "no URL")):
        with pytest.raises(t.TransportError, match=f"this receiver opens {shown}") as caught:
            t.receiver(opened, bucket=allowed)
        assert repr(foreign)[1:-1].partition("?")[0] in str(caught.value) or "@" in foreign
        assert "secret" not in str(caught.value)


def test_what_lies_at_or_below_the_named_url_is_opened(tmp_path: Path) -> None:
    folder = str(tmp_path)
    for allowed, url in (
        (folder, folder),
        (f"{folder}/", f"file://{folder}/a"),
        (f"file://{folder}", f"{folder}/a/../b"),
        ("memory://weights/run", "memory://weights/run/a"),
        ("memory://weights/", "memory://weights"),
    ):
        opened = {"format": 1, "kind": "bucket", "update": "run/1", "url": url}
        assert t.receiver(opened, bucket=allowed)._objects.address == url
    # Below it by its text alone.
    opened["url"] = f"{folder}/../x"
    with pytest.raises(t.TransportError, match=VARIABLE):
        t.receiver(opened, bucket=folder)


@pytest.mark.parametrize("url", ["reference://::data:,{}", "ftp://a/b", "s3://a/../b", "s3://"])
def test_a_sender_refuses_what_no_receiver_would_open(url: str) -> None:
    with pytest.raises(ValueError, match="not the location of a store"):
        t.BucketSender(url)


async def test_what_does_not_fit_the_model_is_refused_before_there_is_memory_for_it(
    tmp_path: Path,
) -> None:
    sender = t.BucketSender(str(tmp_path))
    expected = [TensorInfo(name="w", shape=(100,), dtype=torch.float32)]
    opened = await sender.open(UPDATE)
    announced = dict(await sender.announce(Bucket.of(0, {"w": torch.arange(100.0)})))
    receiver = t.receiver(opened, expected=expected, bucket=str(tmp_path))
    assert receiver.receive(announced).index == 0
    # The object is exchanged for a larger one, of which no more is read than was announced.
    content = (tmp_path / announced["object"]).read_bytes()
    (tmp_path / announced["object"]).write_bytes(bytes(50 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(UpdateDamaged, match=announced["object"]):
            receiver.receive(announced)
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
    finally:
        tracemalloc.stop()
    (tmp_path / announced["object"]).write_bytes(content)
    size = announced["object_bytes"] - 1
    for change, named in (
        ({"object_bytes": 50 << 20}, "52428800, and at most 1427"),
        ({"object_bytes": size}, rf"{size + 1} bytes .*, and {size}"),
        ({"nbytes": 1 << 42}, f"{1 << 42} bytes, .* 448 at most"),
    ):
        with pytest.raises(UpdateDamaged, match=named):
            receiver.receive({**announced, **change})
    # Without a model to hold it to, the object's own head says what it has.
    (entry,) = announced["tensors"]
    large = {**announced, "tensors": [{**entry, "shape": [1 << 50]}], "nbytes": 1 << 52}
    with pytest.raises(UpdateDamaged, match=f"400 bytes or more, and {1 << 52}"):
        t.receiver(opened, bucket=str(tmp_path)).receive(large)
    delta = {"name": "w:delta", "dtype": "uint8", "shape": [1825]}
    for change, nbytes, named in (
        ({"shape": [1 << 40]}, 1 << 42, r"w: float32 \[1099511627776\]"),
        ({"name": "x", "shape": [1 << 40]}, 1 << 42, "x: the model has no such tensor"),
        (delta, 1825, "w: a delta of 1825 bytes, at most 1824"),
    ):
        large = {**announced, "tensors": [{**entry, **change}], "nbytes": nbytes}
        with pytest.raises(UpdateMismatch, match=named):
            receiver.receive(large)
    await sender.close()


def test_what_is_alike_has_one_name_whatever_was_in_memory_before() -> None:
    objects, names = Objects(url()), set()
    bucket = Bucket.of(0, {"a": torch.ones(3), "b": torch.ones(5)})
    for _ in range(5):
        torch.full((100,), 7.0)
        layout = BucketLayout.of("run/1", bucket)
        names.add(t.bucket.put_bucket(objects, "objects/", layout, bucket)["object"])
    assert len(names) == 1


def test_no_write_to_a_folder_fails_where_another_process_clears_up(tmp_path: Path) -> None:
    objects, ended = Objects(str(tmp_path)), threading.Event()
    (dead := tmp_path / "latest.json.01234567.partial").write_bytes(b"half")
    (mine := tmp_path / "film.partial").write_bytes(b"of somebody")

    def clear_up() -> None:
        while not ended.is_set():
            objects.remove_partials()

    clearing = threading.Thread(target=clear_up)
    clearing.start()
    try:
        for number in range(300):
            objects.write("latest.json", bytes([number % 256]))
    finally:
        ended.set()
        clearing.join()
    assert sorted(tmp_path.iterdir()) == [mine, tmp_path / "latest.json"]
    assert not dead.exists()


@pytest.fixture(scope="module")
def s3() -> Iterator[dict]:
    """The options of an S3 server in this process."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(
        "127.0.0.1", port=0, verbose=False
    )
    server.start()
    host, port = server.get_host_and_port()
    yield {"key": KEY, "secret": SECRET, "endpoint_url": f"http://{host}:{port}"}
    server.stop()


@pytest.fixture(scope="module")
def made(s3: dict) -> str:
    """A bucket on it."""
    import fsspec

    fsspec.filesystem("s3", **s3).mkdir("weights")
    return "s3://weights/run-7"


def test_objects_lie_on_an_s3_server(s3: dict, made: str) -> None:
    objects = Objects(made, s3)
    assert objects.read("latest.json") is None
    keys = {objects.put("objects/", bytes([number])) for number in range(3)}
    assert objects.keys("objects") == keys
    objects.remove(sorted(keys)[:1])
    assert objects.keys("objects") == set(sorted(keys)[1:])
    assert objects.keys("manifests") == set()
    with pytest.raises(UpdateDamaged, match="is missing"):
        objects.get(min(keys))
    with pytest.raises(t.TransportError, match=r"s3://absent: writing latest\.json"):
        Objects("s3://absent", s3).write("latest.json", b"")


async def test_a_worker_has_the_credentials_of_its_own_environment(
    s3: dict, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = t.BucketSender(made, options=s3)
    bucket = Bucket.of(0, {"w": torch.arange(100.0)})
    opened = await sender.open(UPDATE)
    announced = await sender.announce(bucket)
    assert not any(word in str((opened, announced)) for word in (KEY, SECRET))
    for name, value in (
        ("AWS_ACCESS_KEY_ID", KEY),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_ENDPOINT_URL", s3["endpoint_url"]),
    ):
        monkeypatch.setenv(name, value)
    inbound = t.receiver(opened, bucket="s3://weights")
    received = await asyncio.to_thread(lambda: inbound.receive(announced))
    assert torch.equal(received.tensors["w"], bucket.tensors["w"])
    await sender.close()
    left = sender._objects._store.find("weights")
    assert not any("transfer" in name for name in left)


def test_no_error_log_or_announcement_shows_a_key_or_a_token(
    s3: dict, made: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    caplog.set_level(logging.DEBUG, "megatron_idempotent")
    private = {**s3, "token": TOKEN, "client_kwargs": {"aws_session_token": TOKEN}}
    places = [
        (made, private),
        (f"s3://{KEY}:{TOKEN}@weights", {"endpoint_url": "http://127.0.0.1:9"}),
        (f"ftp://{KEY}:{SECRET}@127.0.0.1:9/weights", {}),  # with a slash that nobody quoted
        (f"s3://weights/run?signature={TOKEN}", {}),
        (f"pigeon://{KEY}:{TOKEN}@coop", {"secret": SECRET}),
        (made, {**s3, "wrong": [TOKEN], "config_kwargs": {TOKEN: TOKEN}}),
    ]
    for place, options in places:
        try:
            objects = Objects(place, options)
            said.append(repr(vars(objects)["address"]) + repr(objects))

            def fails(*_: object, **__: object) -> None:
                raise OSError(f"{KEY} {SECRET} {TOKEN} fake%2Fsecret%2Bof%3Dnobody")

            if place == made:
                monkeypatch.setattr(objects._store, "pipe_file", fails)
            objects.write("latest.json", b"")
        except (t.TransportError, ValueError) as error:
            said.append("".join(traceback.format_exception(error)) + repr(error.__context__))
        else:
            raise AssertionError(place)
    found = caplog.text + "".join(said)
    for word in (KEY, SECRET, TOKEN, "fake%2Fsecret", "secret+of"):
        assert word not in found, found
    assert "OSError: *** *** *** ***" in found


@pytest.mark.parametrize(
    ("url", "secret", "address"),
    [
        ("s3://key:pass@weights/run@3", "pass", "s3://weights/run@3"),
        ("s3://key:p@ss@weights/run@3", "p@ss", "s3://weights/run@3"),
        ("s3://key:pa/ss@weights/run", "pa/ss", "s3://weights/run"),
        ("s3://key:pa?ss@weights/run", "pa?ss", "s3://weights/run"),
        ("ftp://a@b:pass@host:21/run", "pass", "ftp://host:21/run"),
        ("HTTPS://pass@host/run?a=b@c#d", "pass", "HTTPS://host/run"),
        ("http://host:90?a=pass@b", "pass@b", "http://host:90"),
        ("simplecache::s3://key:pass@weights", "pass", "simplecache::s3://weights"),
        *(
            (url, "", url)
            for url in (
                *("abfs://box@account.host:443/run@3", "ftp://me@host/run", "http://host:90/a@b"),
                *("x::s3://weights/a@b", "http://[::1]:90/a@b", "s3://run/a:3@x", "/a:b@c", "/a?b"),
            )
        ),
    ],
)
def test_an_address_is_the_url_less_its_secrets(url: str, secret: str, address: str) -> None:
    found, secrets = split_secrets(url)
    assert (found, secret in (secrets or {""})) == (address, True)


@pytest.mark.parametrize("module", ["fsspec", "zstandard"])
def test_what_is_missing_is_said_with_the_extra_that_brings_it(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=rf"{module}.*megatron-idempotent\[bucket\]"):
        t.BucketSender("memory://weights")


def test_a_scheme_whose_package_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = importlib.import_module("fsspec.registry")
    monkeypatch.setitem(registry._registry, "s3", None)
    monkeypatch.delitem(registry._registry, "s3")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ModuleNotFoundError, match=r"s3fs.*megatron-idempotent\[bucket\]"):
        t.BucketSender("s3://weights")
