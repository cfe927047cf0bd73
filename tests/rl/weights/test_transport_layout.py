"""A bucket's metadata, and what is refused of it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_peer import described
from weight_peers import every_kind_of_tensor

from megatron_idempotent.rl.weights import Bucket, TensorInfo, UpdateDamaged
from megatron_idempotent.rl.weights.transports.layout import BucketLayout, read_tensor

BUCKET = Bucket.of(4, {"a": torch.ones(3), "b": torch.zeros(2, 5, dtype=torch.float16)})


def announced(bucket: Bucket = BUCKET) -> dict[str, Any]:
    return json.loads(json.dumps(BucketLayout.of("u", bucket).as_json()))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from(sorted(every_kind_of_tensor())), unique=True))
def test_any_selection_of_tensors_survives_json_and_bytes(names: list[str]) -> None:
    tensors = every_kind_of_tensor()
    bucket = Bucket.of(2, {name: tensors[name] for name in names})
    layout = BucketLayout.from_json(announced(bucket), update_id="u")
    assert layout == BucketLayout.of("u", bucket)
    flat_N = torch.full((layout.nbytes + 5,), 77, dtype=torch.uint8)
    layout.pack(bucket.tensors, flat_N)
    assert flat_N[layout.nbytes :].tolist() == [77] * 5
    unpacked = layout.unpack(flat_N)
    assert not any(tensor.requires_grad for tensor in unpacked.tensors.values())
    flat_N.zero_()  # what came out does not depend on it
    expected = described(bucket)
    assert described(unpacked) == {
        **expected,
        "tensors": [[*entry[:4], True] for entry in expected["tensors"]],
    }


def test_tensors_begin_at_multiples_of_64_bytes() -> None:
    layout = BucketLayout.of("u", BUCKET)
    assert (layout.offsets, layout.nbytes) == ((0, 64), 84)


def test_a_tensor_without_a_checksum_stays_without_one() -> None:
    bucket = Bucket(index=0, tensors={"a": torch.ones(3)}, checksums={})
    assert BucketLayout.from_json(announced(bucket), update_id="u").checksums == {}


def test_checksums_of_all_sizes_survive_json() -> None:
    checksums = {"a": 2**64 - 1, "b": 0}
    bucket = Bucket(index=0, tensors=BUCKET.tensors, checksums=checksums)
    assert BucketLayout.from_json(announced(bucket), update_id="u").checksums == checksums


@pytest.mark.parametrize("key", ["index", "nbytes", "tensors"])
def test_metadata_that_lacks_something_is_refused(key: str) -> None:
    fields = announced()
    del fields[key]
    with pytest.raises(UpdateDamaged, match=f"lacks '{key}'"):
        BucketLayout.from_json(fields, update_id="u")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "b"}, "twice, among b, b"),
        ({"dtype": "float33"}, "a, has dtype 'float33'"),
        ({"checksum": "xyz"}, "a with checksum 'xyz'"),
        ({"shape": None}, "a, has None as 'shape'"),
        ({"shape": [-3]}, "a, has -3 as 'size'"),
        ({"shape": ["3"]}, "a, has '3' as 'size'"),
        ({"shape": [22]}, "a at bytes 0 to 88"),
        ({"shape": [0, 2**60, 2**60]}, r"a, has the shape \[0, \d{19}, \d{19}\]"),
        ({"shape": [1] * 33}, r"a, has the shape \[1, 1, 1, 1, 1, 1, "),
        ({"name": "a:delta"}, r"a:delta as float32 \[3\]"),
        ({"offset": -64}, "-64 as 'offset'"),
        ({"offset": True}, "True as 'offset'"),
        ({"offset": 0.0}, "0.0 as 'offset'"),
        ({"offset": 4}, "a at bytes 4 to 16"),
        ({"offset": 128}, "a at bytes 128 to 140"),
    ],
)
def test_metadata_that_makes_no_sense_is_refused(change: dict, message: str) -> None:
    fields = announced()
    fields["tensors"][0].update(change)
    with pytest.raises(UpdateDamaged, match=message):
        BucketLayout.from_json(fields, update_id="u")


def test_a_tensor_is_read_from_its_place_in_a_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(40)))
    info = TensorInfo(name="w", shape=(2, 3), dtype=torch.uint8)
    with open(path, "rb") as file:
        found = read_tensor(file.fileno(), info, 30)
        assert found.tolist() == [[30, 31, 32], [33, 34, 35]]
        with pytest.raises(EOFError, match="it ends at byte 40, within w"):
            read_tensor(file.fileno(), info, 35)
