"""Defines the engine that runs in this process, on a transformers model."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal

from megatron_idempotent.rl.engines.protocol import (
    EngineDead,
    EngineError,
    EngineHealth,
    PauseMode,
    Request,
    Sample,
)
from megatron_idempotent.rl.weights import Bucket, WeightUpdate

from .batch import DecodeBatch
from .scheduler import Scheduler
from .weights import ServedWeights, WeightVersions

_TAGS = ("weights", "kv_cache")


class TransformersEngine:
    """Implements `RolloutEngine` and `ColocatedEngine` with a causal model of transformers.

    Requests share forwards and join and leave between them; those that arrive together with one
    prompt share its computation. Forwards run in a thread, so the event loop stays free. A sample
    depends on its seed and the weights, and on the rest of its batch by rounding only. After a
    commit the cache of running requests is computed again before their next token.

    Staged tensors are copies, and become the model's own at the commit: an update needs a second
    set of weights from `stage` to `commit`, and no time in between. Matrices may come in FP8 with
    their scales; they are served in the model's type. The model has to attend to all positions in
    every layer (no sliding windows, no linear attention), as Llama, Qwen2, Qwen3 and Qwen3-MoE do.

    Example:
        engine = TransformersEngine("Qwen/Qwen3-0.6B")
        sample = await engine.generate(Request(id="0", prompt=(7, 3), max_tokens=8, seed=1))
    """

    def __init__(
        self,
        model: Any | str | os.PathLike[str],
        *,
        name: str = "local",
        version: int = 0,
        max_running: int = 256,
        max_positions: int | None = None,
        prefill_tokens: int = 8192,
        device: str | None = None,
    ) -> None:
        """
        Args:
            model: a transformers causal language model, which is the engine's from then on; or a
                directory with a checkpoint, which is loaded in the type that it has.
            name: the engine's name, unique in a run.
            version: the version of the weights that the model has.
            max_running: the most requests that share a forward; more wait.
            max_positions: the most tokens of prompt and response together; None for the model's
                own limit.
            prefill_tokens: the most positions that one forward computes for requests that join.
            device: the device that a checkpoint is loaded to; None for the CPU. A model stays where
                it is.

        Errors: `ValueError` for a model with layers that this engine cannot serve.
        """
        if max_running < 1 or prefill_tokens < 1:
            raise ValueError(
                f"TransformersEngine() got max_running={max_running} and "
                f"prefill_tokens={prefill_tokens}; allowed: 1 or more"
            )
        if isinstance(model, (str, os.PathLike)):
            model = _load(Path(model), device)
        _check_layers(model.config)
        self._name = name
        self._vocabulary: int = model.config.vocab_size
        self._max_positions: int = max_positions or model.config.max_position_embeddings
        model.eval()
        self._updates = WeightVersions(ServedWeights(model), name=name, version=version)
        self._serving = Scheduler(
            lambda: DecodeBatch(model),
            name=name,
            version=version,
            max_running=max_running,
            prefill_tokens=prefill_tokens,
        )
        self._asleep: set[str] = set()
        self._closed = False

    @property
    def name(self) -> str:
        """See `RolloutEngine.name`."""
        return self._name

    async def generate(self, request: Request) -> Sample:
        """See `RolloutEngine.generate`.

        Errors: `EngineError` if a forward with the request failed; `EngineDead` after `close()`.
        """
        self._check_open()
        self._check_answerable(request)
        return await self._serving.answer(request)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See `RolloutEngine.pause`. With "wait", requests that come later wait too.

        A cancelled call still pauses; a second one with "abort" cuts a "wait" short.
        Errors: `EngineError` if the engine is resumed meanwhile.
        """
        self._check_open()
        await self._serving.pause(mode)

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        self._check_open()
        if self._trouble:
            raise EngineError(f"{self._name} cannot resume: {self._trouble}")
        self._serving.open()

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """See `RolloutEngine.stage`. Errors: `EngineError` while weights are asleep."""
        self._check_open()
        if "weights" in self._asleep:
            raise EngineError(f"{self._name} is asleep; wake its weights before update {update.id}")
        await self._updates.stage(update, buckets)

    async def commit(self, update_id: str) -> int:
        """See `RolloutEngine.commit`. It exchanges pointers; the cache is computed later."""
        self._check_open()
        version = self._updates.committed(update_id)
        if version is not None:
            return version
        if not self._serving.shut:
            raise EngineError(
                f"{self._name} was to commit update {update_id} and is not paused; pause it first"
            )
        version = self._updates.commit(update_id)
        self._serving.version = version
        self._serving.recompute()
        return version

    async def rollback(self, update_id: str) -> None:
        """See `RolloutEngine.rollback`. It gives up an update that is being staged, too.

        Errors: `EngineError` if weights cannot be restored.
        """
        self._check_open()
        await self._updates.rollback(update_id)

    async def health(self) -> EngineHealth:
        """See `RolloutEngine.health`. Asleep, or awake without weights, it is DIRTY."""
        status: Literal["SERVING", "PAUSED", "DIRTY", "DEAD"] = "SERVING"
        detail = ""
        if self._closed:
            status, detail = "DEAD", "closed"
        elif self._updates.version is None:
            status, detail = "DIRTY", self._trouble
        elif self._serving.shut:
            status, detail = "PAUSED", self._trouble
        return EngineHealth(
            status=status,
            version=self._updates.version,
            detail=detail,
            running=self._serving.running,
        )

    async def close(self) -> None:
        """See `RolloutEngine.close`."""
        if self._closed:
            return
        self._closed = True
        await self._stop()
        await self._updates.free("closed")
        self._serving.close()

    async def sleep(self) -> None:
        """See `ColocatedEngine.sleep`. What is staged is given up as well."""
        self._check_open()
        if self._asleep:
            return
        self._asleep.update(_TAGS)
        await self._stop()
        await self._updates.free("its weights were freed; wake them, then stage and commit all")

    async def wake(self, tags: Sequence[str]) -> None:
        """See `ColocatedEngine.wake`; the engine stays paused.

        Memory is taken when it is used: there are no weights until an update is staged.
        Errors: `ValueError` for other tags; `EngineError` for the cache before the weights.
        """
        self._check_open()
        unknown = sorted(set(tags) - set(_TAGS))
        if unknown:
            raise ValueError(f"wake() got {unknown}; allowed: {list(_TAGS)}")
        left = self._asleep - set(tags)
        if left == {"weights"}:
            raise EngineError(
                f'{self._name} was to wake its cache while its weights sleep; wake "weights" first'
            )
        self._asleep = left

    @property
    def _trouble(self) -> str:
        """The reason why the engine cannot serve; empty if it can."""
        if self._updates.trouble:
            return self._updates.trouble
        return 'its cache is asleep; wake "kv_cache"' if self._asleep else ""

    async def _stop(self) -> None:
        await self._serving.pause("keep")
        self._serving.give_back()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead(f"{self._name} was closed; make a new engine")

    def _check_answerable(self, request: Request) -> None:
        lowest, highest = min(request.prompt), max(request.prompt)
        if lowest < 0 or highest >= self._vocabulary:
            raise ValueError(
                f"request {request.id!r} has token {lowest if lowest < 0 else highest}; "
                f"{self._name} has tokens 0 to {self._vocabulary - 1}"
            )
        positions = len(request.prompt) + request.max_tokens
        if positions > self._max_positions:
            raise ValueError(
                f"request {request.id!r} has a prompt of {len(request.prompt)} tokens and "
                f"max_tokens={request.max_tokens}, {positions} together; {self._name} has "
                f"{self._max_positions} positions: ask for fewer tokens"
            )


def _load(directory: Path, device: str | None) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    return model if device is None else model.to(device)


def _check_layers(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"the {config.model_type} model has layers of {sorted(kinds)}: TransformersEngine "
            "serves full attention only; serve it with vLLM"
        )
