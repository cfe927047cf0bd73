"""Syncs a trainer's ranks with engines that serve meanwhile: the collective survives their
faults."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ranks import on_ranks

from megatron_idempotent.rl.sync import SyncFailed, SyncSettings, WeightSync, follow

TOKENS = 24


async def serve_and_update(folder: Any, source: Any, settings: Any) -> None:
    from transformers import AutoModelForCausalLM

    from megatron_idempotent.rl.engines.transformers import TransformersEngine

    class Failing(TransformersEngine):
        fails = False

        async def stage(self, update: Any, buckets: Any) -> None:
            async def cut() -> Any:
                yield await anext(buckets)
                raise ConnectionError("the link is down")

            await super().stage(update, cut() if self.fails else buckets)

    models = [AutoModelForCausalLM.from_pretrained(folder) for _ in range(3)]
    before = {name: tensor.clone() for name, tensor in models[0].state_dict().items()}
    engines = [Failing(model, name=name) for model, name in zip(models, "abc", strict=True)]
    engines[1].fails = True
    sync = WeightSync(engines, settings=settings)

    running = [
        asyncio.ensure_future(engine.generate(request(n))) for n, engine in enumerate(engines)
    ]
    while not all([(await engine.health()).running for engine in engines]):
        await asyncio.sleep(0)
    report = await sync.update(source, 1)
    assert report.named("committed") == ("a", "c"), report.describe()
    assert report.engines["b"].outcome == "behind"
    for model, factor in zip(models, (0.5, 1.0, 0.5), strict=True):
        for name, tensor in model.state_dict().items():
            assert tensor.equal(before[name] * factor), name
    for engine, sample in zip(engines, await asyncio.gather(*running), strict=True):
        assert len(sample.tokens) == TOKENS
        assert list(sample.versions) == sorted(sample.versions)
        assert set(sample.versions) <= ({0} if engine is engines[1] else {0, 1})

    for engine in engines:
        engine.fails = True
    with pytest.raises(
        SyncFailed, match="b is behind at version 0: staging failed: the link is down"
    ):
        await sync.update(source, 2)
    assert [(await engine.health()).version for engine in engines] == [1, 0, 1]
    after = await asyncio.gather(*(engine.generate(request(9)) for engine in engines))
    assert [set(sample.versions) for sample in after] == [{1}, {0}, {1}]
    assert after[0].tokens == after[2].tokens
    for engine in engines:
        await engine.close()


def request(number: int) -> Any:
    from megatron_idempotent.rl.engines import Request

    return Request(id=str(number), prompt=(5, 3, 7 + number), max_tokens=TOKENS, seed=number)


@pytest.mark.parametrize(
    ("axis", "name"),
    [
        ("tp", "qwen3"),
        pytest.param("pp", "qwen2", marks=pytest.mark.exhaustive),
        pytest.param("ep", "moe", marks=pytest.mark.exhaustive),
    ],
)
@on_ranks(2)
def test_engines_that_fail_do_not_keep_the_trainers_ranks(
    checkpoints: Any, axis: str, name: str
) -> None:
    """Two updates; in the first one engine fails, in the second all."""
    import hf_programs
    import torch
    import torch.distributed as dist

    from megatron_idempotent.rl.hf import MegatronWeights

    settings = SyncSettings(bucket_bytes=10_000, retry_wait_s=0.001)
    hf_programs.parallel(**{axis: 2})
    arch, _, chunks = hf_programs.loaded(checkpoints / name, params_dtype=torch.float32)
    source = MegatronWeights(chunks, arch)
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.mul_(0.5)
    if dist.get_rank() == 0:
        asyncio.run(serve_and_update(checkpoints / name, source, settings))
    else:
        follow(source, settings=settings)
        follow(source, settings=settings)
    # Were a rank still in an export, or ahead of the other, this would not add up.
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == 2
