"""The engines of an asynchronous run, in the controller's process or reached from it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from megatron_idempotent.rollout import RolloutEngine
from megatron_idempotent.trainer.config import Config
from megatron_idempotent.trainer.rollout.make import server_engines


async def make_engines(config: Config, checkpoint: Path, out: Path) -> Sequence[RolloutEngine]:
    """Makes the engines that the configuration names; they get the policy's weights first.

    `checkpoint` is the Hugging Face one that they are made from.
    """
    if config.rollout.engine != "transformers":
        return server_engines(config, checkpoint, out)
    names = [f"engine-{number}" for number in range(config.controller.engines)]
    if config.controller.cluster == "ray":
        from megatron_idempotent.rollout.ray import RayEngine

        factory = "megatron_idempotent.rollout.local:TransformersEngine"
        restarts = config.controller.restarts
        actors = [
            RayEngine(factory, checkpoint.absolute(), name=name, restarts=restarts)
            for name in names
        ]
        await asyncio.gather(*(actor.start() for actor in actors))
        return actors
    from transformers.utils import logging

    from megatron_idempotent.rollout.local import TransformersEngine

    # Of loading a checkpoint: it would be drawn into the middle of the live table.
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # No runtime is on in this process: "cuda" is a GPU.
    device = "cuda" if config.run.device == "cuda" else None
    return [
        await asyncio.to_thread(TransformersEngine, checkpoint, name=name, device=device)
        for name in names
    ]
