"""The half of the fake SGLang server that has the model: one loop that reads messages in order.

Its rules, and the files of sglang 0.5.23 (python/sglang/srt/) that they were read in:

managers/scheduler.py
- All messages that came are handled in order before each step; none is drawn while paused.
- pause "in_place" leaves running requests and their cache as they are. "retract" puts them back
  into the queue, without a cache. Twice is once.
- flush_cache does nothing and says False while a request runs, or waits without the scheduler being
  paused; up to 0.5.20 also where one waits in a pause.
- abort matches ids by prefix. A waiting request comes back at once, a running one after its next
  token.
- An exception in the loop ends the server.
managers/scheduler_components/weight_updater.py
- A version is taken once its weights are loaded, and only if one came with them.
- "Weights were updated, but the cache was not flushed": fails after the load. Up to 0.5.21 that is
  an assertion, so the server ends.
- Freeing memory asserts that nothing runs; taking what was not freed is a KeyError. Without
  --enable-weights-cpu-backup weights come back undefined; without --enable-memory-saver nothing is
  freed.
model_executor/model_runner_components/weight_updater.py
- A folder that is not there fails before anything is changed. Tensors that a folder lacks stay as
  they are, silently. One that does not fit fails half-way, and the "rollback" loads the new folder
  again: the server ends if that fails too, and has the new weights under its old version if not.
managers/schedule_batch.py
- Ends at stop_token_ids and at the model's own end tokens, unless ignore_eos, which switches off
  both. The length is looked at after that.
utils/weight_versions.py
- Spans of versions over a request's tokens, for those that had any when the version changed.
managers/scheduler_components/output_streamer.py
- What a waiting request that is aborted brings back are its tokens up to a multiple of 50.
layers/sampler.py, sampling/sampling_batch_info.py
- Log-probs are of logits / temperature, or of the logits with SGLANG_RETURN_ORIGINAL_LOGPROB.
- Seeds are used with --enable-deterministic-inference only, by place in the sequence; 42 for none.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron_idempotent.rl.engines.transformers.batch import cache_argument


@dataclasses.dataclass(kw_only=True)
class Flags:
    """Flags that a server was started with, and its release."""

    spans: bool = True
    flushes_waiting: bool = True
    deterministic: bool = True
    original_logprobs: bool = False
    memory_saver: bool = True
    weights_backup: bool = False
    quantization: str | None = None
    weight_version: str = "default"
    end_tokens: tuple[int, ...] = ()
    missing: tuple[str, ...] = ()
    openapi: bool = True
    api_key: str | None = None
    sent_every: int = 50


@dataclasses.dataclass(eq=False)
class Job:
    rid: str
    prompt: list[int]
    params: dict[str, Any]
    answer: asyncio.Future[dict[str, Any]]
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    likeliest: list[float] = dataclasses.field(default_factory=list)
    changes: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    cache: Any = None
    aborted: bool = False


class Scheduler:
    """Runs in the event loop that it is started in. `die` is called where SGLang would end."""

    def __init__(self, checkpoint: Path, flags: Flags, die: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
        self.flags = flags
        self.version = flags.weight_version
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self.paused = False
        self.fail_load = ""
        self.loads = 0
        self.drawn = 0
        self.steps_per_read = 1
        self.hold_at: int | None = None
        self.held = asyncio.Event()
        self._die = die
        self.inbox: list[tuple[str, Any, asyncio.Future[Any] | None]] = []
        self._news = asyncio.Event()
        self._prefixes: dict[tuple[int, ...], Any] = {}
        self._freed: set[str] = set()
        self._backup: dict[str, torch.Tensor] = {}

    def send(self, kind: str, message: Any = None) -> asyncio.Future[Any]:
        """Put a message after all others; the future has its answer."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.inbox.append((kind, message, answer))
        self._news.set()
        return answer

    async def run(self) -> None:
        try:
            while True:
                self._news.clear()
                inbox, self.inbox = self.inbox, []
                for kind, message, answer in inbox:
                    if kind == "update" and self.fail_load == "hangs":
                        await asyncio.Event().wait()
                    result = getattr(self, f"_{kind}")(message)
                    if answer is not None and not answer.done():
                        answer.set_result(result)
                if self.paused or not self._may_step():
                    await self._news.wait()
                for _ in range(self.steps_per_read):
                    if self.paused or not self._may_step():
                        break
                    self._step()
                    await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 (as in SGLang: whatever it is)
            self._die(repr(error))

    def release(self) -> None:
        """End a hold."""
        self.hold_at = None
        self.held.clear()
        self._news.set()

    def poke(self) -> None:
        """Have the loop look at what has changed."""
        self._news.set()

    def _idle(self) -> bool:
        ignored = self.paused and self.flags.flushes_waiting
        return not self.running and (ignored or not self.waiting)

    def _may_step(self) -> bool:
        if not self.running and not self.waiting:
            return False
        if self.hold_at is None:
            return True
        jobs = self.running + self.waiting
        if any(len(job.tokens) < self.hold_at or job.aborted for job in jobs):
            return True
        self.held.set()
        return False

    @torch.no_grad()
    def _step(self) -> None:
        if self._freed:
            raise RuntimeError(f"an access to memory that was freed: {self._freed}")
        self.running += self.waiting
        self.waiting = []
        for job in list(self.running):
            if self.hold_at is not None and len(job.tokens) >= self.hold_at and not job.aborted:
                continue
            self._draw(job)
            if reason := self._finish_reason(job):
                self.running.remove(job)
                self._keep_prefix(job)
                self._answer(job, reason, len(job.tokens))

    def _draw(self, job: Job) -> None:
        from transformers import DynamicCache

        sequence = [*job.prompt, *job.tokens]
        if job.cache is None:
            job.cache = self._cached(sequence) or DynamicCache()
        new = torch.tensor([sequence[job.cache.get_seq_length() :]])
        given = {cache_argument(self.model): job.cache}
        logits_V = self.model(new, use_cache=True, **given).logits[0, -1].double()
        temperature = job.params.get("temperature", 1.0)
        logprobs_V = (logits_V / temperature).log_softmax(-1)
        place = torch.rand((), generator=self._generator(job, len(sequence)), dtype=torch.float64)
        cumulative_V = logprobs_V.exp().cumsum(-1)
        token = int(torch.searchsorted(cumulative_V, place * cumulative_V[-1]))
        reported_V = logits_V.log_softmax(-1) if self.flags.original_logprobs else logprobs_V
        job.tokens.append(min(token, len(logits_V) - 1))
        job.logprobs.append(float(reported_V[job.tokens[-1]]))
        job.likeliest.append(float(reported_V.max()))
        self.drawn += 1

    def _generator(self, job: Job, place: int) -> torch.Generator:
        seed = job.params.get("sampling_seed")
        if not self.flags.deterministic:
            seed = random.getrandbits(40)
        elif seed is None:
            seed = 42
        return torch.Generator().manual_seed(hash((seed, place)))

    def _cached(self, sequence: list[int]) -> Any:
        """A cache of the longest known beginning, without the last token, which is computed."""
        longest, cache = 0, None
        for key, each in self._prefixes.items():
            common = _common(sequence[:-1], key)
            if common > longest:
                longest, cache = common, each
        if cache is not None:
            cache = copy.deepcopy(cache)
            if too_many := cache.get_seq_length() - longest:
                cache.crop(-too_many)
        return cache

    def _keep_prefix(self, job: Job) -> None:
        if job.cache is not None:
            length = job.cache.get_seq_length()
            self._prefixes[tuple([*job.prompt, *job.tokens][:length])] = job.cache

    def _finish_reason(self, job: Job) -> dict[str, Any] | None:
        last, params = job.tokens[-1], job.params
        if job.aborted:
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        if not params.get("ignore_eos"):
            stops = {*(params.get("stop_token_ids") or ()), *self.flags.end_tokens}
            if last in stops:
                return {"type": "stop", "matched": last}
        if len(job.tokens) >= params["max_new_tokens"]:
            return {"type": "length", "length": params["max_new_tokens"]}
        return None

    def _answer(self, job: Job, reason: dict[str, Any], sent: int) -> None:
        meta: dict[str, Any] = {
            "id": job.rid,
            "finish_reason": reason,
            "prompt_tokens": len(job.prompt),
            "completion_tokens": sent,
            "weight_version": self.version,
            "output_token_logprobs": [
                [logprob, token, None]
                for logprob, token in zip(job.logprobs[:sent], job.tokens[:sent], strict=True)
            ],
            "output_top_logprobs": [[[value, 0, None]] for value in job.likeliest[:sent]],
        }
        if self.flags.spans:
            meta["weight_versions"] = self._spans(job, sent)
        if not job.answer.done():
            job.answer.set_result({"text": "", "output_ids": job.tokens[:sent], "meta_info": meta})

    def _spans(self, job: Job, sent: int) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for version, end in [*job.changes, (self.version, len(job.tokens))]:
            start = spans[-1]["end"] if spans else 0
            if spans and end <= start:
                continue
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = end
            else:
                spans.append({"version": version, "start": start, "end": end})
        seen = [span for span in spans if span["start"] < sent or span["start"] == 0]
        return [span | {"end": min(span["end"], sent)} for span in seen]

    def _generate(self, job: Job) -> None:
        self.waiting.append(job)

    def _abort(self, rid: str) -> None:
        for job in [job for job in self.waiting if job.rid.startswith(rid)]:
            self.waiting.remove(job)
            sent = len(job.tokens) // self.flags.sent_every * self.flags.sent_every
            self._answer(job, {"type": "abort", "message": "Abort in waiting queue"}, sent)
        for job in self.running:
            if job.rid.startswith(rid):
                job.aborted = True

    def _pause(self, mode: str) -> None:
        assert mode in ("in_place", "retract"), mode
        self.paused = True
        if mode == "retract":
            for job in self.running:
                self._keep_prefix(job)
                job.cache = None
            self.waiting += self.running
            self.running = []

    def _continue(self, _: Any) -> None:
        self.paused = False

    def _flush(self, _: Any) -> bool:
        if not self._idle():
            return False
        self._prefixes = {}
        return True

    def _state(self, _: Any) -> list[dict[str, Any]]:
        return [{"last_gen_throughput": 0.0}]

    def _rename(self, version: str) -> None:
        if version != self.version:
            for job in self.running + self.waiting:
                if job.tokens:
                    job.changes.append((self.version, len(job.tokens)))
            self.version = version

    def _update(self, body: dict[str, Any]) -> tuple[bool, str]:
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if not files:
            return False, f"Failed to get weights iterator: no weights in {body['model_path']}."
        try:
            self._load(files)
        except Exception as error:  # noqa: BLE001 (as in SGLang)
            self.fail_load = ""
            self._load(files)
            return False, f"Failed to update weights: {error}.\nRolling back to original weights."
        if (version := body.get("weight_version")) is not None:
            self._rename(version)
        if body.get("flush_cache", True) and not self._flush(None):
            assert self.flags.flushes_waiting, "Cache flush failed after updating weights"
            return False, "Weights were updated, but the cache was not flushed because …"
        self.loads += 1
        return True, "Succeeded to update model weights."

    @torch.no_grad()
    def _load(self, files: list[Path]) -> None:
        parameters = dict(self.model.named_parameters())
        weights = {name: each for file in files for name, each in load_file(file).items()}
        for place, (name, tensor) in enumerate(weights.items()):
            if self.fail_load and place == len(weights) // 2:
                if self.fail_load == "dies":
                    raise KeyboardInterrupt("killed half-way")
                raise OSError("a read failed")
            if parameters[name].shape != tensor.shape:
                raise ValueError(f"{name}: {parameters[name].shape} and {tensor.shape}")
            parameters[name].copy_(tensor)

    @torch.no_grad()
    def _free(self, tags: list[str]) -> None:
        assert self._idle(), "release_memory_occupation should be called only when server is idle."
        self._freed |= set(tags) if self.flags.memory_saver else set()
        if "weights" in self._freed:
            for name, parameter in self.model.named_parameters():
                if self.flags.weights_backup:
                    self._backup[name] = parameter.clone()
                parameter.zero_()
        self._flush(None)

    @torch.no_grad()
    def _take(self, tags: list[str]) -> None:
        for tag in tags:
            self._freed.remove(tag)
        if "weights" in tags:
            for name, parameter in self.model.named_parameters():
                if name in self._backup:
                    parameter.copy_(self._backup[name])


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Counts how many of their first tokens are the same."""
    both = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(both) if a != b), min(len(one), len(other)))
