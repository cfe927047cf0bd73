"""The engine over HTTP keeps the contract of all engines, against a server that keeps SGLang's."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from contract import EngineContract
from sglang_server import FakeSglang
from tiny import END

from megatron_idempotent.rl.engines.sglang import SglangEngine


class TestSglangEngine(EngineContract):
    @contextlib.asynccontextmanager
    async def serving(self, directory):
        # The model's own end tokens end a response in SGLang, whatever the request says.
        with (
            FakeSglang(directory, end_tokens=(END,)) as server,
            tempfile.TemporaryDirectory() as folder,
        ):
            engine = SglangEngine(server.url, checkpoint=directory, directory=Path(folder))
            try:
                yield engine
            finally:
                await engine.close()
            assert not server.died
