"""The engine in this process keeps the contract of all engines with experts, too."""

import contextlib

import pytest
from contract import EngineContract

from megatron_idempotent.rl.engines.transformers import TransformersEngine

pytestmark = pytest.mark.full


class TestMixtureOfExperts(EngineContract):
    """Checkpoints name each expert's matrices; the model holds all experts in two tensors."""

    family = "qwen3_moe"

    @contextlib.asynccontextmanager
    async def serving(self, directory):
        # Few rows and short forwards, so that requests wait and join in pieces.
        engine = TransformersEngine(directory, version=7, max_running=9, prefill_tokens=64)
        yield engine
        await engine.close()
