"""Deltas in the parameters of a model that fuses, shards, pads and transposes what it loads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_idempotent.rl.engines.vllm_inbox import NotInPlace, Patched, Places
from megatron_idempotent.rl.weights.deltas import encode, verify


class Sharded(torch.nn.Module):
    """The second of two tensor-parallel ranks; it loads as vLLM's layers do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()

        def empty(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)

        self.gate_up, self.down, self.norm = empty(2 * 6, 5), empty(5, 6), empty(5)
        self.experts, self.vocabulary = empty(2, 7, 10), empty(8, 5)
        self.twice = empty(2, 3, 4)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.load(name, tensor)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name in ("gate", "up"):
            start = 6 * (name == "up")
            self.gate_up.data.narrow(0, start, 6).copy_(tensor.narrow(0, 6, 6))
        elif name == "down":  # by columns
            self.down.data.copy_(tensor.narrow(1, 6, 6))
        elif name == "norm":
            self.norm.data.copy_(tensor)
        elif name == "vocabulary":  # seven rows, padded
            self.vocabulary[:3].data.copy_(tensor[4:])
            self.vocabulary[3:].data.fill_(0)
        elif name == "twice":  # heads of keys that two ranks share
            for copy in self.twice.data:
                copy.copy_(tensor[3:6])
        elif name == "expert.1":
            self.experts.data[1].copy_(tensor.t())


SHAPES: dict[str, tuple[int, ...]] = {
    "gate": (12, 5),
    "up": (12, 5),
    "down": (5, 12),
    "norm": (5,),
    "vocabulary": (7, 5),
    "expert.0": (10, 7),
    "expert.1": (10, 7),
    "twice": (6, 4),
}


def drawn(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_ten_deltas_in_place_are_the_bits_of_one_load(dtype: torch.dtype) -> None:
    served, model, loaded = drawn(0, dtype), Sharded(dtype), Sharded(dtype)
    model.load_weights(served.items())
    places = Places(model, served)
    generator = torch.Generator().manual_seed(2)
    for step in range(10):
        new = {}
        for name, tensor in drawn(step + 1, dtype).items():
            chosen = torch.rand(tensor.shape, generator=generator) < 0.2
            new[name] = torch.where(chosen, tensor, served[name])
        new["norm"][0] = float("nan")  # a value like any other
        came: dict[str, Any] = {
            name: verify(encode(new[name], tensor), tensor)
            for name, tensor in served.items()
            if name != ("down", "gate")[step % 2]
        }
        came |= {"down": new["down"], "gate": new["gate"]}  # these come whole
        update = Patched(served, came)
        assert all(torch.equal(bits(update[name]), bits(new[name])) for name in new)
        places.write(update)
        served = update.kept()
    loaded.load_weights(served.items())
    for name, parameter in model.named_parameters():
        assert torch.equal(bits(parameter), bits(loaded.get_parameter(name))), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


class Converts(Sharded):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        self.norm.data.copy_(tensor + 1) if name == "norm" else super().load(name, tensor)


class Adds(Sharded):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        self.norm.data.add_(1) if name == "norm" else super().load(name, tensor)


class Reads(Sharded):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, tensor) if tensor.sum().item() else None


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Converts, "converted as it is loaded"),
        (Adds, "writes by aten.add_"),
        (Reads, "wants more than to copy"),
    ],
)
def test_a_loader_that_does_more_than_copy_is_found_and_writes_nothing(
    made: type[Sharded], message: str
) -> None:
    model, served = made(torch.float32), drawn(0, torch.float32)
    loaded = Sharded(torch.float32)
    loaded.load_weights(served.items())
    model.load_state_dict(loaded.state_dict())
    with pytest.raises(NotInPlace, match=message):
        Places(model, served)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name))


def test_a_model_that_moves_elements_after_it_is_loaded_is_found() -> None:
    model, served = Sharded(torch.float32), drawn(0, torch.float32)
    model.load_weights(served.items())
    model.experts.data[1].copy_(model.experts.data[1].flip(0))
    with pytest.raises(NotInPlace, match=r"expert\.1 is in another layout"):
        Places(model, served)
