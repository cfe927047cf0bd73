"""The patches that a split step on Megatron stands on, and what is lost without each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.utils import get_model_config

from megatron_idempotent.megatron import gather
from megatron_idempotent.megatron.ddp import bucket_groups
from megatron_idempotent.window.needs import Need, check_applied


def _set(name: str) -> Callable[[Any], bool]:
    return lambda chunk: bool(getattr(get_model_config(chunk), name, False))


def _gathers_layer_wise(chunk: Any) -> bool:
    return bool(chunk.ddp_config.overlap_param_gather) and any(
        map(gather.is_layer_wise, bucket_groups(chunk))
    )


# The step itself holds back reductions, scales losses, and drops what an aborted batch leaves. The
# rest is asked for only where a chunk has what is patched.
_NEEDS = (
    Need(
        "aux-loss-scale-left-set",
        "a schedule that is called to train while a step is open reduces in the middle of it",
        a_door=True,
    ),
    Need(
        "layerwise-params-stale-after-step",
        "reading() sees parameters of other ranks without the last update",
        _gathers_layer_wise,
    ),
    Need(
        "deferred-embedding-one-microbatch",
        "a batch of one microbatch raises",
        _set("defer_embedding_wgrad_compute"),
    ),
    Need(
        "deferred-embedding-reduced-early",
        "with last=True the output layer's gradient is reduced before it is computed",
        _set("defer_embedding_wgrad_compute"),
    ),
    Need(
        "forward-only-counts-tokens",
        "a forward-only schedule while a step is open counts for its expert bias",
        _set("moe_router_enable_expert_bias"),
    ),
)


def check_patches(chunks: Sequence[Any]) -> None:
    """Raise unless the patches are applied that a step on these chunks stands on.

    Raises:
        RuntimeError: names each that is not, why it is not, and what is lost without it.
    """
    check_applied("TrainStep()", _NEEDS, chunks)
