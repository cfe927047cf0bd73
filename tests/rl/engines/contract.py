"""The contract of every engine: a class of tests to inherit, sentence by sentence of `protocol.py`.

    class TestMyEngine(EngineContract):
        waits = False  # what it cannot do; see ContractBase

        @contextlib.asynccontextmanager
        async def serving(self, directory):
            engine = MyEngine(directory)
            yield engine
            await engine.close()

`serving` gives an engine that serves the checkpoint in `directory` and is not paused. Its version
may be any, so one server can serve all tests, if `serving` brings the weights back. Tests use the
protocol alone: weights come in buckets, and what they did is seen in samples. The engine has to run
9 requests at once.
"""

from __future__ import annotations

from contract_generate import GenerateContract
from contract_refusals import RefusalsContract


class EngineContract(GenerateContract, RefusalsContract):
    """Override `serving`, and the flags of `ContractBase` for what the engine cannot do."""
