"""Makes a vLLM in this process an engine."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from megatron_idempotent.rl.engines.protocol import (
    EngineDead,
    EngineError,
    EngineTimeout,
    EngineUnsupported,
    PauseMode,
    Request,
    Sample,
)
from megatron_idempotent.rl.vllm_plugin import BACKEND, EXTENSION
from megatron_idempotent.rl.weights.transports.base import Sender

from .control import Timeouts
from .engine import StagedEngine, check_request, sampling_params, to_sample

_T = TypeVar("_T")


class VllmLocalEngine(StagedEngine):
    """Implements `ColocatedEngine` with vLLM's own `AsyncLLM`, which it starts and ends.

    vLLM's workers are child processes, so a script needs `if __name__ == "__main__"`. They find
    this package through its entry point. Sleep and wake need a build of vLLM that has sleep mode
    (none for CPUs does) and `enable_sleep_mode=True`; they have not been run on a GPU.
    Example: `VllmLocalEngine("/models/Qwen3-0.6B", transport=SharedMemorySender)`
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        *,
        name: str = "vllm",
        transport: Callable[[], Sender] | None = None,
        timeouts: Timeouts | None = None,
        initial_version: int = 0,
        keep_copy: bool = True,
        extension: str = EXTENSION,
        **settings: Any,
    ) -> None:
        """Start vLLM; blocks until it is ready.

        Args:
            checkpoint: a directory, or a model's name in Hugging Face's hub.
            extension: a subclass of `StagingExtension`, by its qualified name.
            settings: more of vLLM's `AsyncEngineArgs`, such as `dtype="float32"`.

        The other arguments are as in `VllmEngine`. Errors: `ImportError` without vLLM; vLLM's own.
        """
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        defaults = {
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
            "worker_extension_cls": extension,
        }
        self._sleeps = bool(settings.get("enable_sleep_mode"))
        llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(model=os.fspath(checkpoint), **(defaults | settings))
        )
        timeouts = Timeouts() if timeouts is None else timeouts
        self._local = _LocalControl(llm, timeouts, engine=name)
        super().__init__(
            self._local,
            name=name,
            transport=transport,
            timeouts=timeouts,
            initial_version=initial_version,
            keep_copy=keep_copy,
        )

    async def sleep(self) -> None:
        """See `ColocatedEngine.sleep`. Weights go to the host's memory."""
        self._must_sleep()
        await self._local.guard("sleep", self._local.llm.sleep(1, "abort"), self._timeouts.commit_s)

    async def wake(self, tags: Sequence[str]) -> None:
        """See `ColocatedEngine.wake`; once all of it is awake, the engine is paused."""
        self._must_sleep()
        limit_s = self._timeouts.commit_s
        if await self._local.guard("wake_up", self._local.llm.wake_up(list(tags)), limit_s):
            await self._control.pause("keep")  # vLLM serves at once; here `resume` says when

    async def _draw(self, sent_id: str, request: Request) -> Sample:
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        check_request(request, longest=self._local.llm.model_config.max_model_len)
        parameters = SamplingParams(
            **sampling_params(request), output_kind=RequestOutputKind.FINAL_ONLY
        )
        prompt = {"prompt_token_ids": list(request.prompt)}
        drawing = _last(self._local.llm.generate(prompt, parameters, sent_id))
        try:
            answer = await self._local.guard("generate", drawing, self._timeouts.generate_s)
        except VLLMClientError as error:
            raise ValueError(f"request {request.id!r}: {error}") from error
        output = answer.outputs[0]
        tokens = list(output.token_ids)
        found = zip(tokens, output.logprobs or [], strict=True)
        return to_sample(
            request,
            tokens=tokens,
            logprobs=[at[token].logprob for token, at in found],
            spans=[
                {"version": span.version, "start": span.start, "end": span.end}
                for span in output.weight_versions or ()
            ],
            finish_reason=output.finish_reason,
            version_of=self._updates.version_of,
            engine=self._name,
        )

    async def _abort(self, sent_ids: Sequence[str]) -> None:
        await self._local.guard("abort", self._local.llm.abort(sent_ids), self._timeouts.health_s)

    async def _release(self) -> None:
        await asyncio.to_thread(self._local.llm.shutdown)
        self._local.let_go()

    def _must_sleep(self) -> None:
        from vllm.platforms import current_platform

        if not current_platform.is_sleep_mode_available():
            raise EngineUnsupported(
                f"engine {self._name}: this build of vLLM has no sleep mode, as on CPUs; use one "
                "for GPUs, or leave the engine awake"
            )
        if not self._sleeps:
            raise EngineUnsupported(
                f"engine {self._name} was started without sleep mode; construct it with "
                "enable_sleep_mode=True"
            )


class _LocalControl:
    def __init__(self, llm: Any, timeouts: Timeouts, *, engine: str) -> None:
        self._llm, self._timeouts, self._engine = llm, timeouts, engine

    @property
    def llm(self) -> Any:
        """vLLM's engine. Errors: `EngineDead` after `let_go`."""
        if self._llm is None:
            raise EngineDead(f"engine {self._engine} was closed; make a new engine")
        return self._llm

    def let_go(self) -> None:
        """Drops vLLM for good: it ends its processes when its garbage is collected."""
        self._llm = None

    async def guard(self, what: str, call: Awaitable[_T], limit_s: float | None) -> _T:
        """Await a call into vLLM, and turn its errors into those of engines.

        Errors that vLLM blames on the caller's input stay as they are.
        """
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await asyncio.wait_for(call, limit_s)
        except asyncio.TimeoutError as error:
            raise EngineTimeout(
                f"engine {self._engine} has not finished {what} in {limit_s} s; ask its health"
            ) from error
        except EngineDeadError as error:
            raise EngineDead(f"engine {self._engine} died: {error}") from error
        except (ValueError, VLLMClientError):
            raise
        except Exception as error:
            raise EngineError(f"engine {self._engine}: {what} failed: {error}") from error

    async def rpc(self, command: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        asked = self.llm.collective_rpc("megatron_idempotent", args=(json.dumps(command),))
        answers: list[Mapping[str, Any]] = await self._short(
            f"{command['do']} in its workers", asked
        )
        return answers

    async def alive(self) -> None:
        await self._short("check_health", self.llm.check_health())

    async def pause(self, mode: PauseMode) -> None:
        limit_s = self._timeouts.wait_s if mode == "wait" else self._timeouts.control_s
        pausing = self.llm.pause_generation(mode=mode, clear_cache=False)
        await self.guard("pause", pausing, limit_s)

    async def resume(self) -> None:
        await self._short("resume", self.llm.resume_generation())

    async def is_paused(self) -> bool:
        return bool(await self._short("is_paused", self.llm.is_paused()))

    async def reset_caches(self) -> None:
        resetting = self.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        if not await self._short("reset_prefix_cache", resetting):
            raise EngineError(
                f"engine {self._engine} could not clear its key-value cache, which the old "
                "weights computed; try again"
            )
        await self._short("reset_encoder_cache", self.llm.reset_encoder_cache())

    async def start_update(self) -> None:
        await self._short("start_weight_update", self.llm.start_weight_update())

    async def update(self, info: Mapping[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(update_info=dict(info))
        await self.guard(
            "update_weights", self.llm.update_weights(request), self._timeouts.commit_s
        )

    async def finish_update(self, stamp: str) -> None:
        finishing = self.llm.finish_weight_update(stamp)
        await self.guard("finish_weight_update", finishing, self._timeouts.commit_s)

    async def stamp(self) -> str:
        return str(await self._short("get_weight_version", self.llm.get_weight_version()))

    async def set_stamp(self, stamp: str) -> None:
        await self._short("update_weight_version", self.llm.update_weight_version(stamp))

    async def _short(self, what: str, call: Awaitable[_T]) -> _T:
        return await self.guard(what, call, self._timeouts.control_s)


async def _last(answers: Any) -> Any:
    found = None
    async for answer in answers:
        found = answer
    return found
