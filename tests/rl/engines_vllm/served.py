"""A real vLLM server, shared by tests that update its weights, kill it and leave it paused."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from contract_base import ContractBase, buckets
from tiny import read_weights

from megatron_idempotent.rl.engines import Request
from megatron_idempotent.rl.engines.vllm import CPU_ENVIRONMENT, Timeouts, VllmEngine, VllmServer
from megatron_idempotent.rl.weights import WeightUpdate
from megatron_idempotent.rl.weights.transports import SharedMemorySender

HERE = Path(__file__).parent
ARGUMENTS = ("--dtype", "float32", "--enforce-eager")
#: Of a server that does not live long: without a process for its one worker.
ONE_PROCESS = ("--distributed-executor-backend", "uni")
#: As vLLM asks for it: it packs experts beside their weights with it and in their place without,
#: and has no FP8 cache without.
AVX512 = torch.cpu._is_avx512_supported()


class Served:
    """`async with served.engine(directory) as engine`: it serves that checkpoint, unpaused.

    The server is started again where a test has killed it.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.server = faulty_server(checkpoint, *ARGUMENTS)
        self._weights: tuple[Path, int] | None = None

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()

    @contextlib.asynccontextmanager
    async def engine(self, directory: Path, **settings: object) -> AsyncIterator[VllmEngine]:
        """Another client of it for each test; it has been started."""
        await self._clean(directory)
        settings = {"transport": SharedMemorySender, **settings}
        engine = VllmEngine(self.server.url, name="shared", **settings)
        try:
            await engine.generate(Request(id="first", prompt=(3,), max_tokens=1))
            yield engine
        finally:
            await engine.close()

    def start(self) -> None:
        """Start it where it is not running."""
        if not self.server.running:
            self.server.stop()
            self.server.__enter__()
            self._weights = (self.checkpoint, 0)

    async def _clean(self, directory: Path) -> None:
        """No requests, no pause, nothing staged, and the weights of the checkpoint."""
        engine = VllmEngine(self.server.url, name="clean", transport=SharedMemorySender)
        try:
            await engine._control.post("/abort_requests", {})
            await slow(engine, 0.0)
            state = await engine._state()
            if state.staging:
                await engine.rollback(state.staging)
            if state.dirty or self._weights != (directory, state.version):
                update = WeightUpdate(id=f"clean-{state.version}", version=state.version + 1000)
                await engine.stage(update, buckets(read_weights(directory)))
                await engine.pause()
                await engine.commit(update.id)
                self._weights = (directory, update.version)
            await engine.resume()
            assert (await engine.health()).status == "SERVING"
        finally:
            await engine.close()


class OnServer(ContractBase):
    """Tests on the shared server, whose steps are slow from a `start` on."""

    #: Limits of calls; None for the defaults.
    limits: Timeouts | None = None

    @pytest.fixture(autouse=True)
    def server(self, shared):
        self.shared = shared
        shared.start()

    def serving(self, directory):
        return self.shared.engine(directory, timeouts=self.limits)

    async def start(self, engine, requests):
        await slow(engine)
        return await super().start(engine, requests)


async def slow(engine: VllmEngine, sleep_s: float = 0.02) -> None:
    """Let a step take so much longer, so that responses live through a few commands."""
    await engine._control.rpc({"do": "fault", "at": "step", "sleep_s": sleep_s})


def fast(**seconds: float) -> Timeouts:
    """Timeouts for faults."""
    return Timeouts(**{"control_s": 20.0, "commit_s": 20.0, "bucket_s": 20.0, **seconds})


def faulty_server(checkpoint: Path, *arguments: str, **environment: str) -> VllmServer:
    """A server on the CPU whose workers take faults from tests; its log in $VLLM_TEST_LOG."""
    path = filter(None, [str(HERE), os.environ.get("PYTHONPATH")])
    return VllmServer(
        checkpoint,
        arguments=arguments,
        environment={**CPU_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path), **environment},
        extension="faults.FaultyWorker",
        log=os.environ.get("VLLM_TEST_LOG"),
    )
