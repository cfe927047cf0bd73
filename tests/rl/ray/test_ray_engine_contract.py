"""An engine in a Ray actor keeps the contract of all engines."""

from __future__ import annotations

import contextlib

import pytest
from contract import EngineContract
from one_actor import engine_in_it


@pytest.mark.usefixtures("one_actor")
class TestRayEngine(EngineContract):
    deadline_s = 120.0

    @contextlib.asynccontextmanager
    async def serving(self, directory):
        engine = engine_in_it(directory)
        await engine.start()
        yield engine
        await engine.close()
