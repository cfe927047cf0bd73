"""The engine in this process keeps the contract of all engines."""

import contextlib

from contract import EngineContract

from megatron_idempotent.rl.engines.transformers import TransformersEngine


class TestTransformersEngine(EngineContract):
    @contextlib.asynccontextmanager
    async def serving(self, directory):
        engine = TransformersEngine(directory)
        yield engine
        await engine.close()
