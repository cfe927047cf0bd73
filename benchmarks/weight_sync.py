"""Measures how long requests wait for new weights: the pause ÷ the whole sync, staged and inline.

    python -m benchmarks.weight_sync [--rounds 20] [--hidden 768] [--streams 8] [--json]
                                     [--vllm-python .nox/vllm/bin/python]
                                     [--device cuda [--seconds 60]]

A Megatron model of about 100 MB is on a CPU rank, and an engine samples all the time: in the same
process, or as a vLLM server that is started with `--vllm-python`. In a staged sync, weights arrive
while the engine samples, and requests wait only for the switch. In an inline sync, as in most
frameworks, the engine is paused before the first byte is sent. The third kind is a staged sync of
deltas, with 2.2 % of the elements changed. The three alternate, and results are medians over
rounds. Requested and sampled tokens are counted, because no token may be lost.

With `--device cuda` model and engine share a GPU (hidden 4096 by default), and the rate of a sync
is compared with that of a copy within the device's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._device import add_device, add_seconds, aim, fast_kernels, rounds_within
from benchmarks._gpu import copied_bytes_per_s
from benchmarks._record import options, tell
from megatron_idempotent.proof import cpu

TOKENS = 64
#: The target of: seconds that requests wait for new weights ÷ seconds of the sync.
AIM = 0.15
SIDES = ("staged", "inline", "deltas")
#: The fraction of the elements that changes before a sync of deltas.
CHANGED = 0.022


def measure(
    rounds: int, hidden: int, streams: int, vllm_python: str, device: str, limit_s: float | None
) -> dict[str, Any]:
    """Measure weight syncs from a rank to an engine, while requests run on the engine.

    Returns:
        By name: the model's megabytes; the seconds of each pause and of each whole sync, for each
        way of syncing ("staged", "inline", "deltas"); the numbers of requested and sampled tokens;
        the most weight versions in one response; on a GPU, the GB/s of a copy within its memory.
    """
    if device == "cuda":
        fast_kernels()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = _model(folder, hidden)
        make = _vllm(folder, vllm_python, stack) if vllm_python else _local(folder, device)
        found = asyncio.run(_measure(model, make, rounds, streams, limit_s))
        if device == "cuda":
            found["copy_gb_per_s"] = copied_bytes_per_s() / 2e9  # reads + writes
        return found


def _local(folder: Path, device: str) -> Callable[[], Any]:
    from megatron_idempotent.rl.engines.transformers import TransformersEngine

    where = None if device == "cpu" else "cuda"
    return lambda: TransformersEngine(folder, name="engine", device=where)


def _vllm(folder: Path, python: str, stack: contextlib.ExitStack) -> Callable[[], Any]:
    from megatron_idempotent.rl.engines.vllm import CPU_ENVIRONMENT, VllmEngine, VllmServer
    from megatron_idempotent.rl.weights.transports import SharedMemorySender

    arguments = ("--dtype", "float32", "--enforce-eager")
    server = VllmServer(folder, python=python, arguments=arguments, environment=CPU_ENVIRONMENT)
    stack.enter_context(server)
    return lambda: VllmEngine(server.url, transport=SharedMemorySender)


async def _measure(
    model: tuple[list[Any], Any],
    make: Callable[[], Any],
    rounds: int,
    streams: int,
    limit_s: float | None,
) -> dict[str, Any]:
    from megatron_idempotent.rl.hf import MegatronWeights
    from megatron_idempotent.rl.sync import SyncSettings, WeightSync

    chunks, arch = model
    engine = make()
    source = MegatronWeights(chunks, arch)
    settings = SyncSettings(bucket_bytes=32 << 20)
    sync = WeightSync([engine], settings=settings)
    running = Streams(engine, streams)
    pauses: dict[str, list[float]] = {side: [] for side in SIDES}
    totals: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in rounds_within(3 * rounds, limit_s):
        version, side = 2 * number + 2, SIDES[number % 3]
        if side == "deltas":  # first send the version that the deltas build on
            await sync.update(source, version - 1, deltas=True)
        _train(chunks, CHANGED if side == "deltas" else 1.0)
        started = time.perf_counter()
        if side == "inline":
            await engine.pause("keep")
        report = await sync.update(source, version, deltas=side == "deltas")
        total = time.perf_counter() - started
        pauses[side].append(total if side == "inline" else report.pause_s)
        totals[side].append(total)
    asked, given, versions = await running.stop()
    await engine.close()
    return {
        "mb": sum(info.nbytes for info in source.tensors()) / 1e6,
        "pauses": pauses,
        "totals": totals,
        "tokens": [asked, given],
        "versions_in_one_response": versions,
    }


class Streams:
    """Keeps a constant number of requests running on an engine, until it is stopped."""

    def __init__(self, engine: Any, count: int) -> None:
        self._engine = engine
        self._on = True
        self._samples: list[Any] = []
        self._tasks = [asyncio.ensure_future(self._stream(index)) for index in range(count)]

    async def _stream(self, index: int) -> None:
        from megatron_idempotent.rl.engines import Request

        number = 0
        while self._on:
            number += 1
            prompt = tuple(range(1, 9 + index))
            request = Request(id=f"{index}/{number}", prompt=prompt, max_tokens=TOKENS, seed=number)
            self._samples.append(await self._engine.generate(request))

    async def stop(self) -> tuple[int, int, int]:
        """Start no further requests, and wait until the running ones end. Return how many tokens
        were requested, how many were sampled, and the most weight versions within one response.

        Returns:
            The numbers of requested and sampled tokens, and the most versions in one response.
        """
        self._on = False
        await asyncio.gather(*self._tasks)
        given = sum(len(sample.tokens) for sample in self._samples)
        most = max(len(set(sample.versions)) for sample in self._samples)
        return len(self._samples) * TOKENS, given, most


def _model(folder: Path, hidden: int) -> tuple[list[Any], Any]:
    """Write a checkpoint with random weights to the folder, and load it into a Megatron model;
    return the model's chunks and its `Architecture`.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from megatron_idempotent.rl.hf import Architecture, build_gpt, load_hf

    torch.manual_seed(0)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=4096,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=4,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 128,
            head_dim=64,
            max_position_embeddings=512,
            eos_token_id=None,
            tie_word_embeddings=False,
        )
    ).save_pretrained(folder)
    arch = Architecture.read(folder)
    config = arch.transformer_config(use_cpu_initialization=True)
    chunks = [build_gpt(arch, config).cuda()]
    load_hf(folder, chunks)
    return chunks, arch


def _train(chunks: list[Any], changed: float = 1.0) -> None:
    """Multiply a random fraction of the weights by 1.0001, instead of an optimizer step; `changed`
    is the fraction.
    """
    import torch

    with torch.no_grad():
        for parameter in chunks[0].parameters():
            chosen = torch.rand(parameter.shape, device=parameter.device) < changed
            parameter.copy_(torch.where(chosen, parameter * 1.0001, parameter))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--vllm-python", default="", help="of an environment with vLLM")
    add_device(parser)
    add_seconds(parser)
    asked = parser.parse_args()
    hidden = asked.hidden or (4096 if asked.device == "cuda" else 768)
    (found,) = cpu.run_ranks(
        1,
        measure,
        *(asked.rounds, hidden, asked.streams, asked.vllm_python, asked.device, asked.seconds),
        timeout_s=900.0,
        device=asked.device,
    )
    staged = zip(found["pauses"]["staged"], found["totals"]["staged"], strict=True)
    share = statistics.median(pause / total for pause, total in staged)
    found["pause/sync"] = aim(share, AIM) if asked.device == "cuda" else share
    found["pause of deltas/pause"] = statistics.median(found["pauses"]["deltas"]) / (
        statistics.median(found["pauses"]["staged"])
    )
    rate = found["mb"] / 1e3 / statistics.median(found["totals"]["staged"])
    found["sync_gb_per_s"] = rate
    tell(found, asked.json)


if __name__ == "__main__":
    main()
