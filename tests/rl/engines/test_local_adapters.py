"""Updates of adapters alone, whole and as deltas, into a model that serves with its base."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training import Training
from transformers import AutoModelForCausalLM

from megatron_idempotent.rl.engines.transformers import TransformersEngine
from megatron_idempotent.rl.sync import SyncFailed, SyncSettings, WeightSync

SETTINGS = SyncSettings(bucket_bytes=1 << 16, retry_wait_s=0.001, attempts=2)
RANK = 4


class Adapted(torch.nn.Module):
    """A linear layer as PEFT wraps it, with PEFT's names."""

    def __init__(self, base: Any) -> None:
        super().__init__()

        def linear(*sizes: int) -> torch.nn.ModuleDict:
            layer = torch.nn.Linear(*sizes, bias=False, dtype=base.weight.dtype)
            return torch.nn.ModuleDict({"default": layer})

        self.base_layer = base
        self.lora_A, self.lora_B = linear(base.in_features, RANK), linear(RANK, base.out_features)
        torch.nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + 2 * self.lora_B["default"](self.lora_A["default"](x))


def adapted(folder: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name, layer in list(model.named_modules()):
        parent, _, own = name.rpartition(".")
        if own in ("q_proj", "v_proj", "down_proj"):
            setattr(model.get_submodule(parent), own, Adapted(layer))
    return model


class Factors(Training):
    """Adapters as a trainer has them; each step changes some elements."""

    def __init__(self, model: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        self._generator = generator
        self.weights = {}
        for name, tensor in model.state_dict().items():
            if "lora_" in name:
                drawn = 0.3 * torch.randn(tensor.shape, generator=generator)
                place = f"base_model.model.{name.replace('.default', '')}"
                self.weights[place] = drawn.to(tensor.dtype)


async def test_adapters_come_alone_whole_and_as_deltas_and_the_base_stays(make_model: Any) -> None:
    folder = make_model(seed=1, family="qwen2", dtype=torch.bfloat16)
    model = adapted(folder)
    base = {n: t.clone() for n, t in model.state_dict().items() if "lora_" not in n}
    engine, training = TransformersEngine(model, adapters=True), Factors(model)
    sync = WeightSync([engine], settings=SETTINGS)
    report = await sync.update(training, 1, deltas=True)
    size = sum(each.nbytes for each in training.weights.values())
    assert report.bytes_sent == report.bytes_whole == size
    for version in range(2, 6):
        training.step()
        report = await sync.update(training, version, deltas=True)
        assert report.bytes_sent < size / 3
        served = model.state_dict()
        for name, tensor in training.weights.items():
            place = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
            assert torch.equal(served[place], tensor), name
    training.weights["base_model.model.lm_head.lora_A.weight"] = torch.zeros(RANK, 64)
    with pytest.raises(SyncFailed, match=r"not fit the model: base_model.*lm_head.*such tensor"):
        await WeightSync([engine], settings=SETTINGS).update(training, 9)
    assert (await engine.health()).version == 5
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in base.items())


def test_a_model_without_adapters_is_refused(make_model: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_model(seed=1))
    with pytest.raises(ValueError, match="has no lora_A and lora_B; load its adapters"):
        TransformersEngine(model, adapters=True)
