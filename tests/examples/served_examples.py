"""Run the examples that need an engine, a fleet or a checkpoint, on a rank: with small ones."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from short_examples import names_of
from test_examples import _examples

WAIT_S = 60.0
CHECKPOINT = "checkpoint"
TESTS = Path(__file__).parents[1]


async def _run(file: str, *, instead: dict[str, str] | None = None, **given: Any) -> dict[str, Any]:
    """Run the examples of a file, some of their texts replaced; return their variables."""
    names = {**names_of(file), **given}
    await _run_in(names, file, instead or {})
    return names


async def _run_in(names: dict[str, Any], file: str, instead: dict[str, str]) -> None:
    for example in _examples(file):
        text = str(example.parsed)
        for old, new in instead.items():
            assert old in text, f"{file} does not say {old}"
            text = text.replace(old, new)
        where = f"{file}:{example.line}"
        ran = eval(compile(text, where, "exec", PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if inspect.isawaitable(ran):
            await ran


async def _has(names: dict[str, Any], name: str, example: asyncio.Future[None]) -> None:
    """Wait until a running example has made something."""
    while name not in names:
        if example.done():
            await example
        await asyncio.sleep(0)


def _finish(main: Coroutine[Any, Any, Any]) -> None:
    asyncio.run(asyncio.wait_for(main, WAIT_S))


def _helpers(*folders: str) -> None:
    """Let what other tests serve with be imported here."""
    sys.path[:0] = [str(TESTS / "rl" / folder) for folder in folders]


def on_one_rank(folder: Path) -> None:
    """Runs with engines in memory and over HTTP, a fleet of toys, and weights of a few bytes."""
    _helpers("engines", "sync", "controller")
    tiny = importlib.import_module("tiny")
    checkpoint = tiny.make_checkpoint(folder / CHECKPOINT, vocabulary=128)
    for file, example in SERVED.items():
        example(file, folder, checkpoint)


def _controller(file: str, folder: Path, checkpoint: Path) -> None:
    from toy import Toy, ToyPrompts

    from megatron_idempotent.rl.controller import ControllerSettings, WindowedSampler
    from megatron_idempotent.rl.simulator.clock import run as run_virtually

    toy = Toy()
    main = _run(
        file,
        instead={"600": "6"},
        WindowedSampler=WindowedSampler,
        settings=ControllerSettings(target_groups=2, group_size=2, train_global_batch_size=4),
        prompts=ToyPrompts(),
        fleet=toy.generator,
        policy=toy.policy,
        recipe=toy.recipe,
    )
    run_virtually(main, limit_s=10_000)
    assert len(toy.policy.steps) == 6


def _local_engine(file: str, folder: Path, checkpoint: Path) -> None:
    from megatron_idempotent.rl.engines import Request

    async def main() -> None:
        left = await _run(file, instead={"Qwen/Qwen3-0.6B": str(checkpoint)}, Request=Request)
        assert left["sample"].tokens
        await left["engine"].close()

    _finish(main())


def _update() -> dict[str, Any]:
    from memory_engine import INFOS, Source

    from megatron_idempotent.rl.weights import WeightUpdate

    buckets = list(Source(1).buckets(bucket_bytes=1))
    return {"update": WeightUpdate(id="u", version=1), "infos": INFOS, "buckets": buckets}


def _staging(file: str, folder: Path, checkpoint: Path) -> None:
    async def main() -> None:
        given = _update()
        left = await _run(file, **given)
        assert len(left["weights"]) == len(given["infos"])

    _finish(main())


def _inbox(file: str, folder: Path, checkpoint: Path) -> None:
    from memory_engine import INFOS, tensors_of

    _finish(_run(file, infos=INFOS, tensors=tensors_of(0)))


def _fan_out(file: str, folder: Path, checkpoint: Path) -> None:
    from memory_engine import INFOS, Source

    async def main() -> None:
        names = {**names_of(file), "source": Source(1), "engines": ["a", "b"]}
        example = asyncio.ensure_future(_run_in(names, file, {}))
        await _has(names, "readers", example)

        async def read(reader: Any) -> int:
            return len([bucket async for bucket in reader])

        _, *read_by_each = await asyncio.gather(example, *map(read, names["readers"]))
        assert read_by_each == [len(INFOS)] * 2

    _finish(main())


def _weight_sync(file: str, folder: Path, checkpoint: Path) -> None:
    from memory_engine import MemoryEngine, Source

    async def main() -> None:
        engines, served = [MemoryEngine("a"), MemoryEngine("b")], [0]
        left = await _run(file, engines=engines, served=served, source=Source(12))
        assert ([engine.version for engine in engines], served) == ([12, 12], [0, 12])
        assert left["report"].engines.keys() == {"a", "b"}

    _finish(main())


#: Each is called with its file, a folder, and a checkpoint.
SERVED = {
    "rl/controller/controller.py": _controller,
    "rl/engines/transformers.py": _local_engine,
    "rl/engines/vllm_inbox.py:Inbox": _inbox,
    "rl/sync/fan_out.py": _fan_out,
    "rl/sync/weight_sync.py": _weight_sync,
    "rl/weights/staging.py:Staging": _staging,
}


def on_two_ranks(folder: Path) -> set[str]:
    """Runs with the checkpoint that `on_one_rank` wrote in the folder, sharded over both."""
    import torch

    _helpers("hf")
    import hf_programs
    import test_hf_fsdp

    from megatron_idempotent.rl import hf

    directory, done = folder / CHECKPOINT, set()

    def run(file: str, **given: Any) -> dict[str, Any]:
        done.add(file)
        public = {name: getattr(hf, name) for name in hf.__all__}
        return asyncio.run(_run(file, **{**public, "torch": torch, **given}))

    run("rl/weights/safetensors_io.py:Checkpoint", directory=directory)
    hf_programs.parallel(tp=2)
    left = run("rl/hf/config.py", instead={"/models/qwen3-8b": str(directory)})
    arch = left["arch"]
    run("rl/hf/names.py", arch=arch)
    source = run("rl/hf/export.py", chunks=[left["model"]], directory=directory)["source"]
    sent: list[Any] = []
    run("rl/hf/buckets.py", source=source, send=sent.append)
    if torch.distributed.get_rank() == 0:
        assert sum(len(bucket.tensors) for bucket in sent) == len(source.tensors())
    model = test_hf_fsdp.sharded(folder, directory.name)
    assert run("rl/hf/fsdp.py", model=model)["source"].tensors()
    return done
