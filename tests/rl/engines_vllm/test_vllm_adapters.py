"""Updates of a LoRA adapter alone, into a real vLLM that samples with it over its base."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_base import ContractBase
from safetensors.torch import save_file
from served import ARGUMENTS, ONE_PROCESS, faulty_server
from tiny import read_weights
from training import Training

from megatron_idempotent.rl.engines import EngineUnsupported
from megatron_idempotent.rl.engines.vllm import VllmEngine, VllmServer
from megatron_idempotent.rl.sync import SyncSettings, WeightSync
from megatron_idempotent.rl.weights.transports import SharedMemorySender

RANK, SCALE = 4, 2
SETTINGS = SyncSettings(bucket_bytes=1 << 16, retry_wait_s=0.01, attempts=1)


class Factors(Training):
    """An adapter's factors as a trainer has them, by PEFT's names."""

    def __init__(self, base: dict[str, torch.Tensor], seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.weights = {}
        for name, tensor in base.items():
            if name.endswith("_proj.weight"):
                at, (outputs, inputs) = name.removesuffix("weight"), tensor.shape
                for factor, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                    drawn = 0.2 * torch.randn(shape, generator=self._generator)
                    self.weights[f"base_model.model.{at}lora_{factor}.weight"] = drawn

    def adapter(self, folder: Path) -> Path:
        """The factors in PEFT's form."""
        folder.mkdir()
        save_file(self.weights, folder / "adapter_model.safetensors")
        targets = sorted({name.split(".")[-3] for name in self.weights})
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "bias": "none"}
        (folder / "adapter_config.json").write_text(
            json.dumps(config | {"target_modules": targets})
        )
        return folder

    def merged(self, folder: Path, base: Path) -> Path:
        """A checkpoint with the factors' products in it."""
        folder.mkdir()
        weights = read_weights(base)
        for name in weights:
            at = f"base_model.model.{name.removesuffix('weight')}lora_"
            if f"{at}A.weight" in self.weights:
                product = self.weights[f"{at}B.weight"] @ self.weights[f"{at}A.weight"]
                weights[name] = weights[name] + SCALE * product
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_bytes((base / "config.json").read_bytes())
        return folder


class TestAdapters(ContractBase):
    def test_factors_come_alone_whole_and_as_deltas(
        self, old: Path, shared: Any, tmp_path: Path
    ) -> None:
        shared.server.stop()  # two engines would share two cores
        training = Factors(read_weights(old), 1)
        adapter = Factors(read_weights(old), 0).adapter(tmp_path / "first")
        lora = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"policy={adapter}")
        with faulty_server(old, *ARGUMENTS, *ONE_PROCESS, *lora) as server:
            asyncio.run(asyncio.wait_for(self.scenario(server, old, training, tmp_path), 200))

    async def scenario(
        self, server: VllmServer, old: Path, training: Factors, folder: Path
    ) -> None:
        engine = VllmEngine(server.url, adapter="policy", transport=SharedMemorySender)
        other = VllmEngine(server.url, adapter="another", transport=SharedMemorySender)
        sync = WeightSync([engine], settings=SETTINGS)
        try:
            first = Factors(read_weights(old), 0).merged(folder / "merged-0", old)
            await self.serves(engine, first, 0)
            for version in (1, 2, 3):
                report = await sync.update(training, version, deltas=True)
                assert (report.bytes_sent < report.bytes_whole / 5) == (version > 1)
                merged = training.merged(folder / f"merged-{version}", old)
                await self.serves(engine, merged, version)
                training.step()
            with pytest.raises(
                EngineUnsupported, match=r"has adapters \['policy'\], and 'another'"
            ):
                await self.update(other, old)
            await self.serves(engine, merged, 3)
        finally:
            await engine.close()
            await other.close()
