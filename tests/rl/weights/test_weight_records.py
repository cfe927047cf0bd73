"""Records of weights on their way: what they check when they are built, and their JSON."""

from __future__ import annotations

import json

import pytest
import torch

from megatron_idempotent.rl.weights import (
    Bucket,
    TensorInfo,
    UpdateDamaged,
    WeightUpdate,
    checksum,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(), (0, 5), (3,), (2, 3, 4)])
def test_a_tensor_info_survives_json_and_knows_the_bytes(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    info = TensorInfo.of("w", tensor)
    assert TensorInfo.from_json(json.loads(json.dumps(info.as_json()))) == info
    assert (info.shape, info.dtype, info.nbytes) == (shape, dtype, tensor.nbytes)


def test_a_tensor_info_describes_itself() -> None:
    info = TensorInfo(name="w", shape=(32000, 64), dtype=torch.bfloat16)
    assert info.describe() == "bfloat16 [32000, 64]"


@pytest.mark.parametrize("dtype", ["float33", "zeros", "nn", "quint8", "int4", "bit"])
def test_a_type_that_torch_lacks_is_refused(dtype: str) -> None:
    with pytest.raises(UpdateDamaged, match=f"w, has dtype '{dtype}', of which torch"):
        TensorInfo.from_json({"name": "w", "shape": [3], "dtype": dtype})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id": "", "version": 1}, "an empty id"),
        ({"id": "u", "version": -1}, "version=-1; allowed: 0 or more"),
        ({"id": "u", "version": 2, "base_version": 2}, "base_version=2 and version=2"),
        ({"id": "u", "version": 2, "base_version": 3}, "base_version=3 and version=2"),
    ],
)
def test_an_update_that_makes_no_sense_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightUpdate(**fields)


def test_an_update_may_be_the_first_and_may_build_on_the_one_before() -> None:
    assert WeightUpdate(id="u", version=0).base_version is None
    assert WeightUpdate(id="u", version=1, base_version=0).base_version == 0


def test_a_bucket_has_checksums_and_bytes_of_what_it_was_made_with() -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(2, 5, dtype=torch.bfloat16).t()}
    bucket = Bucket.of(3, tensors)
    tensors["c"] = torch.ones(1)
    assert list(bucket.tensors) == ["a", "b"]
    assert bucket.checksums == {name: checksum(bucket.tensors[name]) for name in ("a", "b")}
    assert (bucket.index, bucket.nbytes) == (3, 12 + 20)
