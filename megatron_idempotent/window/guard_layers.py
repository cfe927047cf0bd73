"""Decides whether other ranks may wait for this one in the middle of a layer."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from megatron_idempotent.window.agreement import compare, describe, lockstep_group, poison


class Layers:
    """Knows the ranks that meet inside of the model's layers, as tensor-parallel ranks do.

    With tensor or context parallel ranks, making the first `Layers` is a collective over all ranks,
    which makes a gloo group of those ranks.
    """

    def __init__(self, config: Any, arguments: Mapping[str, Any]) -> None:
        self._shared, in_lockstep = _shared(config, arguments)
        self._lockstep = lockstep_group() if in_lockstep else None

    def require_that_nobody_waits(self, error: Exception, where: str) -> None:
        """Raise unless all ranks that share the layers raised the same error at the same place.

        A rank that failed alone left a layer that the others may still wait in.

        Raises:
            SessionPoisoned: other ranks may wait for this one.
        """
        if self._shared is None:
            return
        headline, told = f"{where}: {describe(error)}", []
        if self._lockstep is not None:
            frames = traceback.extract_tb(error.__traceback__)
            place = [f"{frame.filename}:{frame.lineno}" for frame in frames]
            told = compare("\n".join((headline, *place)), self._lockstep)
            if told and len(set(told)) == 1:
                return
        heads = [text.partition("\n")[0] for text in told]
        others = "".join(f" ({head})" for head in heads if head != headline)
        raise poison(
            f"{headline}; it cannot be reported later with {self._shared}: the other ranks{others} "
            "did not fail at the same place and may wait inside a layer"
        ) from error


def _shared(config: Any, arguments: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Return why ranks meet inside of a layer, None if they do not, and whether in lockstep.

    Tensor and context parallel ranks run in lockstep, the same code over one batch. Other ranks
    have batches of their own, so that one of them can fail alone.
    """
    if type(arguments.get("p2p_communicator")).__name__ == "MultiModulePipelineCommunicator":
        return "a multi-module pipeline", False
    why = across_replicas(config)
    if why is not None:
        return why, False
    experts = _expert_tensor_size(config)
    if experts > 1:
        return f"expert_tensor_parallel_size={experts}", False
    for name in ("tensor_model_parallel_size", "context_parallel_size"):
        if _size(config, name) > 1:
            return f"{name}={_size(config, name)}", True
    return None, False


def across_replicas(config: Any) -> str | None:
    """Return the setting for which data-parallel replicas meet inside of a layer; else None."""
    if "global_aux_loss" in (getattr(config, "moe_router_load_balancing_type", None) or ()):
        return "moe_router_load_balancing_type=global_aux_loss"
    for name in ("expert_model_parallel_size", "gtp_weight_remat_size"):
        if _size(config, name) > 1:
            return f"{name}={_size(config, name)}"
    experts = _expert_tensor_size(config)
    if experts > _size(config, "tensor_model_parallel_size"):
        return f"expert_tensor_parallel_size={experts}"
    return None


def _expert_tensor_size(config: Any) -> int:
    if getattr(config, "num_moe_experts", None) is None:
        return 1
    return _size(config, "expert_tensor_parallel_size")


def _size(config: Any, name: str) -> int:
    return int(getattr(config, name, None) or 1)
