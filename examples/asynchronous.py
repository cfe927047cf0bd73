"""Train while an engine samples: the asynchronous controller with a task of your own.

    python examples/asynchronous.py

Two CPU ranks (`policy_worker.py`) train a small Qwen3 to repeat its prompt. An engine samples at
the same time, with weights that are at most one optimizer step older than the trained weights.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import torch
from policy_worker import MODEL, Policy
from transformers import AutoModelForCausalLM

import megatron_idempotent.rl.controller as mc
from megatron_idempotent.rl import sync, workers
from megatron_idempotent.rl.engines import Request
from megatron_idempotent.rl.engines.transformers import TransformersEngine

GROUPS, SAMPLES, TOKENS, STEPS = 8, 8, 4, 16  # groups per step, samples per group, …
SHOWN = ("train/reward", "train/staleness_mean", "train/staleness_max", "rollouts/inflight_mean")


def requests(group: int, prompt: Any) -> list[Request]:
    sizes = {"prompt": prompt, "max_tokens": TOKENS}
    return [Request(id=f"{group}/{n}", seed=group * SAMPLES + n, **sizes) for n in range(SAMPLES)]


async def score(group: int, prompt: Any, samples: Any) -> list[float]:
    return [sample.tokens.count(prompt[0]) / TOKENS for sample in samples]


class Recipe:
    """Converts groups to training batches, and rewards to advantages."""

    def rejects(self, group: Any) -> str:
        return ""  # a non-empty reason would reject the group, and another one would start

    def inputs(self, groups: Any) -> None: ...

    def batch(self, groups: Any, inputs: None, logprobs: Any) -> dict[str, Any]:
        rows = [[*group.prompt, *each.tokens] for group in groups for each in group.samples]
        drawn = torch.tensor([each.logprobs for group in groups for each in group.samples])
        rewards = torch.tensor([group.rewards for group in groups]).T
        advantages = ((rewards - rewards.mean(0)) / (rewards.std(0) + 1e-6)).T.reshape(-1, 1)
        return {"input_ids": torch.tensor(rows), "logprobs": drawn, "advantages": advantages}

    def metrics(self, groups: Any, version: int) -> dict[str, float]:
        return {"reward": sum(sum(group.rewards) for group in groups) / (SAMPLES * len(groups))}


def show(row: Any, *, step: int) -> None:
    print(f"version {step}", *(f"{name} {row[name]:.2f}" for name in SHOWN), sep="  ")


async def main(pool: Any = None) -> None:
    spec = workers.WorkerSpec(factory="policy_worker:Worker", argument=GROUPS * SAMPLES)
    ranks = workers.EmbeddedRanks(spec, 2, pool=pool)
    await ranks.start()
    engine = TransformersEngine(AutoModelForCausalLM.from_config(MODEL))
    source = sync.RemoteWeights(ranks, asyncio.get_running_loop())
    fleet = mc.Fleet([engine], source=source, requests=requests, score=score)
    await mc.Controller(
        settings=mc.ControllerSettings(target_groups=GROUPS, group_size=SAMPLES, groups_per_call=4),
        sampler=mc.WindowedSampler(max_staleness=1),
        prompts=SimpleNamespace(prompt=lambda index: (index % 4,), epoch=lambda index: 0),
        generator=fleet,
        policy=Policy(ranks),
        recipe=Recipe(),
        loggers=[SimpleNamespace(log=show, close=lambda: None)],
    ).run(until=STEPS)
    await asyncio.gather(fleet.close(), ranks.close())


if __name__ == "__main__":
    asyncio.run(main())
