"""Combines the states of an engine's workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_idempotent.rollout.errors import EngineError, EngineUnsupported
from megatron_idempotent.weights import UpdateDamaged, UpdateMismatch, UpdateRefused, WeightsError
from megatron_idempotent.weights.transports import TransportError, TransportTimeout

_KINDS: dict[str, type[Exception]] = {
    each.__name__: each
    for each in (
        EngineUnsupported,
        TransportError,
        TransportTimeout,
        UpdateDamaged,
        UpdateMismatch,
        UpdateRefused,
        WeightsError,
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkersState:
    """The state of an engine's workers. Example: `WorkersState.of(answers, engine="a").version`."""

    version: int | None
    """The version of the last commit; None if there was none, or if workers differ."""
    committed: str
    """Id of the last commit, where all workers have it."""
    holds: Mapping[str, int]
    """Versions of the updates that all workers can load, by id: staged, or committed."""
    staging: str
    """Id of an update that one of them is still receiving."""
    received: int
    """Buckets of it that all of them have."""
    dirty: str
    """Why weights may be of more than one version; empty where they are not."""
    half: str
    """Id of the update whose commit failed half-way; empty where that is not known."""
    disagree: bool
    """They have committed different versions."""
    updating: bool
    """A commit was begun in one of them, and neither ended nor failed."""

    @classmethod
    def of(cls, answers: Sequence[Mapping[str, Any]], *, engine: str) -> WorkersState:
        """Errors: the first worker's error, with the engine's name before its message."""
        for answer in answers:
            for error in (answer.get("error"), answer.get("failed")):
                if error:
                    raise raised(error, engine=engine)
        return cls._whole(answers)

    @classmethod
    def whatever(cls, answers: Sequence[Mapping[str, Any]], *, engine: str) -> WorkersState:
        """The state, also where an update has failed. Errors: a worker that cannot answer."""
        for answer in answers:
            if answer.get("error"):
                raise raised(answer["error"], engine=engine)
        return cls._whole(answers)

    @classmethod
    def _whole(cls, answers: Sequence[Mapping[str, Any]]) -> WorkersState:
        if not answers:
            raise EngineError("no worker answered; is collective_rpc supported by its executor?")
        versions = {answer["version"] for answer in answers}
        dirty = next((answer["dirty"] for answer in answers if answer["dirty"]), "")
        if not dirty and len(versions) > 1:
            dirty = f"its workers are at versions {sorted(versions, key=str)}"
        return cls(
            version=versions.pop() if len(versions) == 1 else None,
            committed=_common(answers, "committed"),
            holds={
                held: version
                for held, version in answers[0]["holds"].items()
                if all(held in answer["holds"] for answer in answers)
            },
            staging=next((answer["staging"] for answer in answers if answer["staging"]), ""),
            received=min(int(answer["received"]) for answer in answers),
            dirty=dirty,
            half=next((answer["half"] for answer in answers if answer["half"]), ""),
            disagree=len(versions) > 1,
            updating=any(answer["updating"] for answer in answers),
        )


def raised(error: Mapping[str, str], *, engine: str) -> Exception:
    """A worker's error, of its own class where that is one of ours."""
    kind, message = error["kind"], error["message"]
    if kind in _KINDS:
        return _KINDS[kind](f"engine {engine}: {message}")
    return EngineError(f"engine {engine}: {kind} in a worker: {message}")


def _common(answers: Sequence[Mapping[str, Any]], field: str) -> str:
    values = {str(answer[field]) for answer in answers}
    return values.pop() if len(values) == 1 else ""
