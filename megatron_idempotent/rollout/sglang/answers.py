"""A request in SGLang's terms, and its answer in ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_idempotent.rollout.errors import EngineError
from megatron_idempotent.rollout.records import FinishReason, Request, Sample


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The tokens that one call of /generate sampled; a response may take several."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason


def generate_body(
    request: Request, drawn: Sequence[int], *, rid: str, seed: int | None
) -> dict[str, Any]:
    """Makes the body of /generate that goes on after the tokens that were drawn.

    Everything that a server may have other defaults for (--preferred-sampling-params) is named.
    `ignore_eos` also switches stop_token_ids off, so it is set only where there are none.
    """
    params: dict[str, Any] = {
        "max_new_tokens": request.max_tokens - len(drawn),
        "min_new_tokens": 0,
        "temperature": request.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "stop": None,
        "stop_token_ids": sorted(request.stop_tokens) or None,
        "ignore_eos": not request.stop_tokens,
        "n": 1,
    }
    if seed is not None:
        params["sampling_seed"] = seed
    return {
        "rid": rid,
        "input_ids": [*request.prompt, *drawn],
        "sampling_params": params,
        "return_logprob": True,
        "stream": False,
    }


def read_part(body: Any, *, engine: str) -> Part:
    """The tokens of an answer with their log-probs and versions.

    Errors: `EngineError` for an answer that does not say what it must.
    """
    try:
        meta: Mapping[str, Any] = body["meta_info"]
        tokens = tuple(int(token) for token in body["output_ids"])
        finish = meta["finish_reason"]
        scored = [(float(each[0]), int(each[1])) for each in meta.get("output_token_logprobs", ())]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"engine {engine}: /generate answered {str(body)[:500]}") from error
    if tuple(token for _, token in scored) != tokens:
        raise EngineError(
            f"engine {engine}: {len(tokens)} tokens came with log-probs of {len(scored)}, not of "
            "the same ones; speculative decoding that reports none of its own?"
        )
    return Part(
        tokens=tokens,
        logprobs=tuple(logprob for logprob, _ in scored),
        versions=_versions(meta, len(tokens), engine),
        finish_reason=_finish_reason(finish, engine),
    )


def joined(request: Request, parts: Sequence[Part]) -> Sample:
    """One sample of all parts, in order."""
    tokens = tuple(token for part in parts for token in part.tokens)
    finish_reason = parts[-1].finish_reason
    if finish_reason == "stop" and tokens[-1] not in request.stop_tokens:
        finish_reason = "length"  # an end token of the model's own, at the last place
    return Sample(
        request_id=request.id,
        tokens=tokens,
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
        versions=tuple(version for part in parts for version in part.versions),
        finish_reason=finish_reason,
    )


def goes_on(request: Request, parts: Sequence[Part]) -> bool:
    """Returns whether the server stopped unasked, at an end token of the model's own.

    SGLang has no way to stop at the request's tokens and not at those of the model's config.
    """
    last = parts[-1]
    drawn = sum(len(part.tokens) for part in parts)
    return (
        last.finish_reason == "stop"
        and last.tokens[-1:] != ()
        and last.tokens[-1] not in request.stop_tokens
        and drawn < request.max_tokens
    )


def parsed_version(text: Any) -> int | None:
    """The version that a server's string names; None for one of somebody else, as "default"."""
    return int(text) if isinstance(text, str) and text.isdecimal() else None


def _versions(meta: Mapping[str, Any], tokens: int, engine: str) -> tuple[int, ...]:
    # Without spans all of an answer is of one version: that at its end. No request of such a server
    # is kept across a commit (see `SglangEngine.pause`).
    whole = {"version": meta.get("weight_version"), "start": 0, "end": tokens}
    spans = meta.get("weight_versions", [whole]) if tokens else []
    versions: list[int] = []
    for span in spans:
        version = parsed_version(span["version"])
        if version is None or span["start"] != len(versions):
            raise EngineError(
                f"engine {engine}: tokens of versions {spans}: are its weights loaded by somebody "
                "else too?"
            )
        versions += [version] * (span["end"] - span["start"])
    if len(versions) != tokens:
        raise EngineError(f"engine {engine}: {tokens} tokens came with versions {spans}")
    return tuple(versions)


def _finish_reason(finish: Any, engine: str) -> FinishReason:
    kind = finish.get("type") if isinstance(finish, dict) else finish
    if kind == "stop":
        # "NaN happened": the server drew an id outside of the vocabulary and put another there.
        if isinstance(finish, dict) and isinstance(finish.get("matched"), str):
            raise EngineError(
                f"engine {engine}: a response ended with {finish['matched']!r}: the logits are not "
                "finite, so are the weights what they should be?"
            )
        return "stop"
    if kind == "length":
        return "length"
    if kind == "abort":
        return "abort"
    raise EngineError(f"engine {engine}: a response ended with {finish!r}: stop, length or abort")
