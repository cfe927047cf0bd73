"""The transfer engine in a vLLM worker, on stand-ins of the parts of vLLM that it is built on."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_idempotent.rl.weights import Bucket, WeightUpdate
from megatron_idempotent.rl.weights.deltas import encode
from megatron_idempotent.rl.weights.records import DELTA
from megatron_idempotent.rl.weights.transports import DiskSender

pytestmark = pytest.mark.full

OLD = {name: torch.full((3, 2), value) for name, value in (("a", 1.0), ("b", 2.0))}
NEW = {name: tensor + 10 for name, tensor in OLD.items()}


class TransferEngine:
    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        self.model, self.model_config = model, vllm_config.model_config

    def parse_update_info(self, fields: dict[str, Any]) -> Any:
        return self.update_info_cls(**fields)  # type: ignore[attr-defined]


class Fused(torch.nn.Module):
    """Has both tensors of a checkpoint in one parameter, and fails to load `fails_at`."""

    def __init__(self) -> None:
        super().__init__()
        self.both = torch.nn.Parameter(torch.zeros(6, 2), requires_grad=False)
        self.fails_at = ""
        self.reloads: list[str] = []

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name == self.fails_at:
                raise MemoryError(f"no room for {name}")
            self.both.data.narrow(0, 3 * (name == "b"), 3).copy_(tensor)


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker of vLLM that serves `OLD`, with the extension and the transfer engine in it."""
    model = Fused()
    model.load_weights(OLD.items())
    fakes: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": TransferEngine,
            "WeightTransferInitInfo": object,
            "WeightTransferUpdateInfo": object,
        },
        "vllm.lora.request": {"LoRARequest": None},
        "vllm.model_executor.model_loader.reload.layerwise": {
            "initialize_layerwise_reload": lambda model: model.reloads.append("apart"),
            "finalize_layerwise_reload": lambda model, config: model.reloads.append("together"),
        },
        "vllm.platforms": {
            "current_platform": types.SimpleNamespace(
                is_cpu=lambda: True, is_fp8_fnuz=lambda: False
            )
        },
    }
    for name, content in fakes.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    name = "megatron_idempotent.rl.engines.vllm_worker"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    save_file(OLD, tmp_path / "model.safetensors")
    config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(
            model=str(tmp_path),
            dtype=torch.float32,
            use_mla=False,
            hf_text_config=types.SimpleNamespace(),
        ),
        parallel_config=types.SimpleNamespace(rank=0, pipeline_parallel_size=1),
    )

    class Worker(module.StagingExtension):  # type: ignore[name-defined, misc]
        weight_transfer_engine = module.StagedTransfer(None, config, torch.device("cpu"), model)
        _weight_update_active = False

        def finish_weight_update(self) -> None:
            self._weight_update_active = False
            self.weight_transfer_engine.finish_weight_update()

        def tell(self, do: str, **command: Any) -> dict[str, Any]:
            return self.megatron_idempotent(json.dumps({"do": do, **command}))

        def stage(self, update: WeightUpdate, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
            sender = DiskSender(tmp_path / "sync")
            opened, bucket = dict(asyncio.run(sender.open(update))), Bucket.of(0, tensors)
            settings = {"serving": 0, "keep": True, "silence_s": 30.0, "adapter": None}
            self.tell("open", update=dataclasses.asdict(update), opened=opened, **settings)
            announced = dict(asyncio.run(sender.announce(bucket)))
            self.tell("bucket", id=update.id, announced=announced)
            deadline = time.monotonic() + 30
            while not ((state := self.tell("state"))["received"] or state["failed"]):
                assert time.monotonic() < deadline
            asyncio.run(sender.close())
            return self.tell("complete", id=update.id, buckets=1)

        def load(self, **info: Any) -> dict[str, Any]:
            """Do what vLLM does when a client commits or rolls back."""
            self.tell("settle")
            self._weight_update_active = True
            self.weight_transfer_engine.start_weight_update()
            self.weight_transfer_engine.update_weights(info)
            if not (state := self.tell("state"))["updating"]:
                return state
            self.finish_weight_update()
            return self.tell("state")

        def serves(self, tensors: dict[str, torch.Tensor]) -> bool:
            return torch.equal(model.both, torch.cat([*tensors.values()]))

    return Worker()


def test_an_update_is_loaded_whole_and_its_deltas_in_place(worker: Any) -> None:
    model = worker.weight_transfer_engine.model
    worker.stage(WeightUpdate(id="u", version=1), NEW)
    state = worker.load(update_id="u")
    assert (state["version"], state["dirty"], worker.serves(NEW)) == (1, "", True)
    assert model.reloads == ["apart", "together"]
    newest = {"a": NEW["a"].clone(), "b": NEW["b"]}
    newest["a"][1, 1] = 7.0
    delta = {"a" + DELTA: encode(newest["a"], NEW["a"]).data}
    worker.stage(WeightUpdate(id="v", version=2, base_version=1), delta)
    assert worker.load(update_id="v")["version"] == 2
    assert worker.serves(newest)
    assert len(model.reloads) == 2, "no layer was taken apart"


@pytest.mark.parametrize("then", ["commit", "rollback"])
def test_a_load_that_fails_leaves_the_worker_dirty_until_it_has_one_version(
    worker: Any, then: str
) -> None:
    model = worker.weight_transfer_engine.model
    worker.stage(WeightUpdate(id="u", version=1), NEW)
    model.fails_at = "b"
    state = worker.load(update_id="u")
    assert "no room for b" in state["dirty"]
    assert (state["half"], worker.serves(OLD), worker.serves(NEW)) == ("u", False, False)
    model.fails_at = ""
    state = worker.load(**({"update_id": "u"} if then == "commit" else {"restore": True}))
    assert (state["dirty"], state["version"]) == ("", 1 if then == "commit" else None)
    assert worker.serves(NEW if then == "commit" else OLD)
    assert model.reloads == ["apart", "together"] * 2


def test_a_worker_of_another_backend_and_one_without_sleep_say_so(worker: Any) -> None:
    worker.vllm_config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(enable_sleep_mode=False)
    )
    assert worker.tell("sleeps") == {"sleeps": False}
    worker.weight_transfer_engine = object()
    assert worker.tell("state")["error"]["kind"] == "EngineUnsupported"
