"""Runs each main flow of the package on a rank, and tells in which files code ran.

A file counts if one of its functions ran; what importing it runs does not count, nor does the
runtime that emulates CUDA.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import megatron_idempotent

TESTS = Path(__file__).parents[1]
PACKAGE = Path(megatron_idempotent.__file__).parent
#: Of the tests' runtime, not of the package's flows.
APART = ("proof/cpu/",)
_FUNCTION = 0x1  # CO_OPTIMIZED: neither a module nor the body of a class


@contextmanager
def traced() -> Iterator[set[str]]:
    """Collect the files of the package in which functions run, in any thread."""
    found: set[str] = set()
    monitoring = sys.monitoring
    tool, starts = monitoring.PROFILER_ID, monitoring.events.PY_START

    def started(code: CodeType, _: int) -> object:
        path = Path(code.co_filename)
        if code.co_flags & _FUNCTION and path.is_relative_to(PACKAGE):
            found.add(path.relative_to(PACKAGE).as_posix())
        return monitoring.DISABLE

    monitoring.use_tool_id(tool, "flows")
    monitoring.register_callback(tool, starts, started)
    monitoring.restart_events()
    monitoring.set_events(tool, starts)
    try:
        yield found
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, starts, None)
        monitoring.free_tool_id(tool)
        found -= {name for name in found if name.startswith(APART)}


def applied() -> list[str]:
    """apply(), where Megatron is imported, and a call of a function that it has patched.

    Looking up its name is none: that goes through the stub of the package.
    """
    from megatron.core.tensor_parallel import random

    from megatron_idempotent.patching.catalog import hazards
    from megatron_idempotent.proof.cpu import tiny

    tiny.build(with_optimizer=False)  # the function wants process groups
    hazards()  # what importing case files runs is no part of the flow
    apply = megatron_idempotent.apply
    with traced() as found:
        apply()
        random.model_parallel_cuda_manual_seed(1)
    assert megatron_idempotent.report()["pipeline-seed-offset"].status == "applied"
    return sorted(found)


def stepped() -> list[str]:
    """A step of TrainStep: begin, microbatches, finish."""
    sys.path.insert(0, str(TESTS))
    import torch
    from scenario import build, data
    from torch.nn.functional import cross_entropy

    from megatron_idempotent import TrainStep

    class NextToken:
        kind, normalizers = "token", {"nll": "tokens"}

        def __call__(self, logits_BTV: Any, microbatch: Any) -> tuple[Any, dict[str, Any]]:
            labels_BT, mask_BT = microbatch["labels"], microbatch["token_mask"]
            nll_BT = cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="none")
            nll = (nll_BT * mask_BT.flatten()).sum()
            return nll, {"nll": nll}

    model, scheduler, replica = build()
    step = TrainStep(model.chunks, model.optimizer, scheduler, deadline_s=60)
    for number in range(2):  # the first one imports
        batch = data(number, 4, replica)
        length = batch["input_ids"].shape[1]
        hidden_TT = torch.ones(length, length, device=batch["input_ids"].device).tril() < 0.5
        batch["labels"] = batch["input_ids"].roll(-1, 1)
        batch["attention_mask"] = hidden_TT.expand(4, 1, length, length)
        with traced() as found:
            step_id = step.begin(NextToken(), global_batch_size=4, micro_batch_size=2)
            step.microbatch(step_id, batch)
            result = step.finish(step_id)
        assert result.updated
        assert result.microbatches == 2
    return sorted(found)


def sampled(folder: str) -> list[str]:
    """A group of one sample: started by the controller, drawn by the engine, put away."""
    sys.path[:0] = [str(TESTS / "rl" / "controller")]
    from toy import Toy
    from transformers import AutoModelForCausalLM

    from megatron_idempotent.rl.controller import Fleet
    from megatron_idempotent.rl.engines import Request
    from megatron_idempotent.rl.engines.transformers import TransformersEngine

    async def flow() -> set[str]:
        engine = TransformersEngine(AutoModelForCausalLM.from_pretrained(folder), name="a")

        def requests(group: int, prompt: Any) -> list[Request]:
            return [Request(id=str(group), prompt=(5, 3, 7), max_tokens=4, seed=1)]

        async def score(group: int, prompt: Any, samples: Any) -> list[float]:
            return [1.0]

        class Nothing:
            pass

        fleet = Fleet(
            [engine],
            source=Nothing(),  # type: ignore[arg-type]  # nothing is published
            requests=requests,
            score=score,
        )
        fleet._versions[0] = 0
        controller = Toy(seconds=0.0).controller
        shared = controller._shared
        shared.generator = fleet
        shared.permitted, shared.state = True, "running"
        with traced() as found:
            run = asyncio.ensure_future(controller._rollouts.run())
            while not shared.buffer.ready:
                await asyncio.sleep(0.01)
                assert not run.done() or run.result()
            run.cancel()
        await controller._rollouts.stop()
        await engine.close()
        return found

    return sorted(asyncio.run(flow()))


def published(folder: str) -> list[str]:
    """An update of the transformers engine from Megatron's weights."""
    sys.path[:0] = [str(TESTS / "rl" / "hf")]
    import hf_programs
    import torch
    from transformers import AutoModelForCausalLM

    from megatron_idempotent.rl.engines.transformers import TransformersEngine
    from megatron_idempotent.rl.hf import MegatronWeights
    from megatron_idempotent.rl.sync import WeightSync

    hf_programs.parallel()
    arch, _, chunks = hf_programs.loaded(Path(folder), params_dtype=torch.float32)
    source = MegatronWeights(chunks, arch)

    async def flow() -> set[str]:
        engine = TransformersEngine(AutoModelForCausalLM.from_pretrained(folder), name="a")
        sync = WeightSync([engine])
        for version in (1, 2):
            with traced() as found:
                report = await sync.update(source, version)
            assert report.named("committed") == ("a",), report.describe()
        await engine.close()
        return found

    return sorted(asyncio.run(flow()))


def streamed() -> list[str]:
    """An asynchronous step in the controller: log-probs, microbatch, finish, publish."""
    sys.path[:0] = [str(TESTS / "rl" / "controller")]
    from toy import Toy, run_virtually

    toy = Toy(groups=2)
    toy.run(1)
    controller = toy.controller
    with traced() as found:
        run_virtually(controller.run(until=2))
    return sorted(found)
