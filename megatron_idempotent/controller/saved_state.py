"""The controller's part of a checkpoint: numbers and groups as JSON, and back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from megatron_idempotent.rollout.records import Sample

from .again import tried
from .buffer import GroupBuffer
from .errors import ControllerError
from .protocol import DataPlane, Prompts
from .records import RolloutGroup
from .shared import Shared

_FORMAT = 1


async def capture(shared: Shared, plane: DataPlane) -> dict[str, Any]:
    """Returns what a resumed run needs, as JSON.

    Log-probs are written as Python writes floats, so they come back bit for bit. Prompts are not
    written: they are functions of their place.
    """
    while True:
        # The numbers first, and at once: groups become complete while others are read.
        state = {
            "format": _FORMAT,
            "trainer_version": shared.trainer_version,
            "next_prompt": shared.next_prompt,
            "sampler": shared.sampler.name,
            "max_staleness": shared.sampler.max_staleness,
            "groups_per_step": shared.settings.groups_per_step,
            "buffer": shared.buffer.state(),
        }
        held = [each["id"] for each in state["buffer"]["ready"]]  # type: ignore[index]
        found = [await _get(shared, plane, group_id) for group_id in held]
        if None not in found:
            return {**state, "groups": [_as_json(group) for group in found if group is not None]}
        for group_id, group in zip(held, found, strict=True):
            if group is None:
                shared.lose(group_id)


async def put_back(
    shared: Shared, plane: DataPlane, prompts: Prompts, state: Mapping[str, Any]
) -> list[int]:
    """Make a run stand where the state was captured; engines have not been told yet.

    Returns the ids of the groups that are in the data plane again.

    Errors: `ControllerError` for a state of another sampler, of steps of another size, or of
        another format.
    """
    for name, now in (
        ("format", _FORMAT),
        ("sampler", shared.sampler.name),
        ("max_staleness", shared.sampler.max_staleness),
        ("groups_per_step", shared.settings.groups_per_step),
    ):
        if state.get(name) != now:
            raise ControllerError(
                f"the checkpoint was written with {name} = {state.get(name)!r}, now it is {now!r}; "
                "resume with the same settings, or start a new run"
            )
    buffer = GroupBuffer.restored(state["buffer"], shared.buffer.capacity)
    for fields in state["groups"]:
        group = _from_json(fields, prompts.prompt(fields["id"]))
        await tried(shared, "put", functools.partial(plane.put, group))
    shared.buffer = buffer
    shared.trainer_version = state["trainer_version"]
    shared.next_prompt = state["next_prompt"]
    return [fields["id"] for fields in state["groups"]]


async def _get(shared: Shared, plane: DataPlane, group_id: int) -> RolloutGroup | None:
    """The group; None where the data plane has lost it. Errors: those of the last try."""
    try:
        return await tried(shared, "get", lambda: plane.get(group_id), final=(KeyError,))
    except KeyError:
        return None


def forget(shared: Shared) -> None:
    """Empty the buffer, for a run that is put back to where it was earlier."""
    shared.buffer = GroupBuffer(shared.buffer.capacity)
    shared.trainer_version = shared.rollout_version = shared.next_prompt = 0
    shared.published = -1
    shared.exhausted = shared.permitted = shared.engines_back = shared.publish_failed = False


def _as_json(group: RolloutGroup) -> dict[str, Any]:
    return {
        "id": group.id,
        "samples": [dataclasses.asdict(sample) for sample in group.samples],
        "rewards": list(group.rewards),
        "failed": group.failed,
    }


def _from_json(fields: Mapping[str, Any], prompt: Any) -> RolloutGroup:
    samples = [
        Sample(
            request_id=each["request_id"],
            tokens=tuple(each["tokens"]),
            logprobs=tuple(each["logprobs"]),
            versions=tuple(each["versions"]),
            finish_reason=each["finish_reason"],
        )
        for each in fields["samples"]
    ]
    return RolloutGroup(
        id=fields["id"],
        prompt=prompt,
        samples=tuple(samples),
        rewards=tuple(fields["rewards"]),
        failed=fields["failed"],
    )
