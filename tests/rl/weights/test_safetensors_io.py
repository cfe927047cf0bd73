"""Files of safetensors: contents of a checkpoint by its headers, and files that are written."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from megatron_idempotent.rl.weights import TensorInfo, WeightsError
from megatron_idempotent.rl.weights.safetensors_io import DTYPES, INDEX, Checkpoint, SafetensorsFile


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A file as the format says, without the library."""
    words = {dtype: word for word, dtype in DTYPES.items()}
    entries, at = {}, 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        entries[name] = {"dtype": words[tensor.dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(at))


def infos(tensors: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
    return {name: TensorInfo.of(name, tensor) for name, tensor in tensors.items()}


def tensor_infos(directory: Path) -> dict[str, TensorInfo]:
    with Checkpoint(directory) as checkpoint:
        return dict(checkpoint.tensors)


def test_every_type_is_read_by_its_name(tmp_path):
    tensors = {str(dtype): torch.empty(2, 3, dtype=dtype) for dtype in DTYPES.values()}
    write(tmp_path / "model.safetensors", tensors)
    assert tensor_infos(tmp_path) == infos(tensors)
    safetensors = pytest.importorskip("safetensors.torch")
    assert safetensors.load_file(tmp_path / "model.safetensors").keys() == tensors.keys()


def test_the_files_are_those_of_the_index(tmp_path):
    a, b, other = ({name: torch.ones(size)} for size, name in enumerate("abc", 1))
    write(tmp_path / "one.safetensors", a)
    write(tmp_path / "two.safetensors", b)
    write(tmp_path / "left-over.safetensors", other)
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert tensor_infos(tmp_path) == infos(a | b)


def test_the_same_weights_in_another_format_are_left_out(tmp_path):
    write(tmp_path / "consolidated.safetensors", {"w": torch.ones(1)})
    with pytest.raises(WeightsError, match=r"has no \*\.safetensors"):
        tensor_infos(tmp_path)
    write(tmp_path / "model.safetensors", {"v": torch.ones(2)})
    assert tensor_infos(tmp_path) == infos({"v": torch.ones(2)})


@pytest.mark.parametrize("left", [0, 7, 20])
def test_a_file_that_is_cut_short_is_named(tmp_path, left):
    path = tmp_path / "model.safetensors"
    write(path, {"w": torch.ones(1)})
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        tensor_infos(tmp_path)


def test_a_type_that_torch_lacks_is_named(tmp_path):
    header = json.dumps({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    content = struct.pack("<Q", len(header)) + header + b"0"
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match="F4"):
        tensor_infos(tmp_path)


def test_tensors_that_are_not_those_announced_are_refused(tmp_path):
    one = TensorInfo(name="a", shape=(2, 3), dtype=torch.float32)
    file = SafetensorsFile(tmp_path / "x", [one])
    for name, tensor in (("a", torch.zeros(3, 2)), ("b", torch.zeros(2, 3))):
        with pytest.raises(ValueError, match=r"it has to be|or unknown"):
            file.write(name, tensor)
    file.abandon()
    with pytest.raises(ValueError, match="complex64"):
        SafetensorsFile(tmp_path / "y", [TensorInfo(name="c", shape=(1,), dtype=torch.complex64)])


def test_types_of_several_widths_are_written_as_safetensors_aligns_them(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {
        "odd": torch.randn(3, 5).to(torch.float8_e4m3fn),
        "scale": torch.randn(2, 2),
        "b": torch.randn(7).bfloat16(),
        "é": torch.randn(3, 2).T,
    }
    file = SafetensorsFile(tmp_path / "x", [TensorInfo.of(n, t) for n, t in tensors.items()])
    for name, tensor in tensors.items():
        file.write(name, tensor)
    file.close()
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.save_file(whole, tmp_path / "y", metadata={"format": "pt"})
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()
    assert safetensors.load_file(tmp_path / "x").keys() == tensors.keys()
