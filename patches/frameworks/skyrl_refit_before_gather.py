"""With overlap_param_gather, SkyRL's weight sync sends the engine parameters that lack the step.

Symptom:
    The inference engine gets, from each data-parallel rank, that rank's shard of the new parameters
    and the old ones for the rest. No error.

Cause:
    The step leaves the gather to the next forward, and `extract_weights` reads the parameters
    before one.

Affects:
    The worker of main, August 2026, with overlap_param_gather (off by default there). What the
    patch does: `extract_weights` first gathers a pending update. All of the model's ranks take
    part in a weight sync.

Upstream:
    https://github.com/NovaSky-AI/SkyRL/blob/main/skyrl/backends/skyrl_train/workers/megatron/megatron_worker.py,
    `MegatronWeightExtractor.extract_weights`.

Remove when:
    the worker synchronises the parameters before it exports them.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Original, Patch, expect_agreement, target

from megatron_idempotent.megatron import gather

from . import _skyrl


def extract_weights(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Gather the updated parameters that the optimizer step left to the next forward; then run
    SkyRL's `extract_weights`.
    """
    gather.finish_update(self.actor_module)
    return original(self, *args, **kwargs)


def reproduce() -> None:
    """Run SkyRL's weight sync right after a step with overlap_param_gather.
    Without the patch data-parallel ranks still have different parameters after the sync.
    """
    skyrl = _skyrl.SkyRL(overlap_param_gather=True)
    skyrl.train(0)
    skyrl.exported()
    expect_agreement(skyrl.bench, "in a refit after the step")


PATCH = Patch(
    "with overlap_param_gather, SkyRL's weight sync sends parameters that lack the step",
    target(
        f"{_skyrl.WORKERS}.megatron_worker:MegatronWeightExtractor.extract_weights",
        extract_weights,
        "self.bridge.export_hf_weights",
        "self.actor_module",
    ),
    since="0.1",
)
