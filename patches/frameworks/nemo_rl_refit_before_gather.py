"""With overlap_param_gather, NeMo-RL's refit sends the engine parameters that lack the step.

Symptom:
    The inference engine gets, from each data-parallel rank, that rank's shard of the new parameters
    and the old ones for the rest. Rollouts come from a mixture of two models; no error.

Cause:
    The step leaves the gather to the next forward, and the refit reads the parameters before one.
    The worker's own generation with Megatron gathers first; the refit of other engines does not.

Affects:
    The worker of main, August 2026, with overlap_param_gather and the distributed optimizer, until
    its `sync_params_before_refit` gathers, which is called before each refit. What the patch does:
    if an update is pending, `_iter_params_with_optional_kv_scales` (ZMQ and collective refit)
    gathers it first. All of the model's ranks take part in such a refit. Not covered:
    `nccl_reshard_refit` and the sparse refit read parameters directly, so call
    `ensure_params_synced` before them.

Upstream:
    https://github.com/NVIDIA-NeMo/RL/blob/main/nemo_rl/models/policy/workers/megatron_policy_worker.py,
    `_iter_params_with_optional_kv_scales`. https://github.com/NVIDIA-NeMo/RL/pull/4086 repairs it
    in September 2026: "fix(megatron): synchronize parameters before inference refit".

Remove when:
    the worker synchronises the parameters before it exports them.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Original, Patch, expect_agreement, target

from megatron_idempotent.megatron import gather

from . import _nemo_rl


def export(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `_iter_params_with_optional_kv_scales`, but first gather a pending parameter update."""
    gather.finish_update([self.model])
    return original(self, *args, **kwargs)


def reproduce() -> None:
    """Run NeMo-RL's refit right after a step with overlap_param_gather.
    Without the patch data-parallel ranks still have different parameters in the refit.
    """
    nemo = _nemo_rl.NemoRL(overlap_param_gather=True)
    nemo.train(0)
    nemo.exported()
    expect_agreement(nemo.bench, "in a refit after the step")


PATCH = Patch(
    "with overlap_param_gather, NeMo-RL's refit sends parameters that lack the last step",
    target(
        f"{_nemo_rl.POLICY}._iter_params_with_optional_kv_scales",
        export,
        "self.megatron_bridge.export_hf_weights",
        "[self.model]",
    ),
    since="0.1",
    fixed_by=((f"{_nemo_rl.POLICY}.sync_params_before_refit", "self.model.start_param_sync"),),
)
