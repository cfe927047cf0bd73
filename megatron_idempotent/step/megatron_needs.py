"""The patches that a split step on Megatron stands on, and what is lost without each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.utils import get_model_config

from megatron_idempotent.engine.catalogue import outlines
from megatron_idempotent.engine.landing import current, landed
from megatron_idempotent.patches import _gather
from megatron_idempotent.patches._ddp import bucket_groups

# Outcomes that say that this Megatron does not have the hazard.
_NOT_THERE = frozenset({"fixed_upstream", "missing_target", "unsupported_version"})

_Need = tuple[str, Callable[[Any], bool], str]


def _set(name: str) -> Callable[[Any], bool]:
    return lambda chunk: bool(getattr(get_model_config(chunk), name, False))


def _gathers_layer_wise(chunk: Any) -> bool:
    return bool(chunk.ddp_config.overlap_param_gather) and any(
        map(_gather.is_layer_wise, bucket_groups(chunk))
    )


# The step itself holds back reductions, scales losses, and drops what an aborted batch leaves. The
# rest is asked for only where a chunk has what is patched.
_NEEDS: tuple[_Need, ...] = (
    (
        "aux-loss-scale-left-set",
        lambda chunk: True,
        "a schedule that is called to train while a step is open reduces in the middle of it",
    ),
    (
        "layerwise-params-stale-after-step",
        _gathers_layer_wise,
        "reading() sees parameters of other ranks without the last update",
    ),
    (
        "deferred-embedding-one-microbatch",
        _set("defer_embedding_wgrad_compute"),
        "a batch of one microbatch raises",
    ),
    (
        "deferred-embedding-reduced-early",
        _set("defer_embedding_wgrad_compute"),
        "with last=True the output layer's gradient is reduced before it is computed",
    ),
    (
        "forward-only-counts-tokens",
        _set("moe_router_enable_expert_bias"),
        "a forward-only schedule while a step is open counts for its expert bias",
    ),
)


def check_patches(chunks: Sequence[Any]) -> None:
    """Raise unless the patches are applied that a step on these chunks stands on.

    Raises:
        RuntimeError: names each that is not, why it is not, and what is lost without it.
    """
    lost = []
    for number, (patch_id, needs, without) in enumerate(_NEEDS):
        patch = outlines()[patch_id]
        if landed(patch) or not any(map(needs, chunks)):
            continue
        row = current(patch)
        # Nothing stands in for the first one, through which an open step meets the schedules.
        if number == 0 or row.status not in _NOT_THERE:
            lost.append(f"{patch_id} ({row.status}: {row.reason}), without which {without}")
    if lost:
        raise RuntimeError(
            f"TrainStep() stands on patches that are not applied: {'; '.join(lost)}. Call "
            "megatron_idempotent.apply(), and exclude none of them"
        )
