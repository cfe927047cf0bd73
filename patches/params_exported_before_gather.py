"""With overlap_param_gather, parameters read right after a step lack the step.

Symptom:
    Weights that are exported, copied, refitted to an inference engine or put into a state_dict
    after `optimizer.step()` are new in this rank's shard and old in all other shards: the
    data-parallel ranks export different models, none of them right. A save of the actor, a load of
    the reference, its log-probs and a restore of the actor make that permanent: the restored
    parameters are the stale copy, and the pending gather was applied to the reference.

Cause:
    The step leaves the gather to the next forward. Reading a parameter does not trigger the gather,
    and must not: a rank that reads alone would wait for the others for ever.

Affects:
    Every release, with the distributed optimizer and overlap_param_gather. What to do: call
    `ensure_params_synced(model_chunks)` on all ranks before parameters are read. It gathers only
    the parameters that wait for a gather.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/training.py, where
    `save_checkpoint_and_time` disables the hooks for their synchronisation before it saves.
    https://github.com/NVIDIA-NeMo/RL/pull/561, "fix overlap param gather", keeps the gather out of
    a reference pass; https://github.com/NVIDIA-NeMo/RL/pull/4086 gathers before a refit.

Remove when:
    upstream has a call that synchronises only stale parameters.
"""

from __future__ import annotations

from ._case import Helper, bench, expect_agreement


def reproduce(*, helped: bool) -> None:
    """Read a model's parameters right after a step with overlap_param_gather.
    The data-parallel ranks have different parameters; with `helped`, `ensure_params_synced` gathers
    them first.
    """
    from megatron_idempotent import ensure_params_synced

    model = bench(overlap_param_gather=True)
    model.train_step(2, data_seed=0)
    if helped:
        ensure_params_synced(model.chunks)
    expect_agreement(model, "in an export after the step")


def control(*, helped: bool) -> bytes:
    """Gather the parameters by hand before they are read, as a control; return their bytes.
    With `helped`, call `ensure_params_synced` twice instead.
    """
    from megatron_idempotent import ensure_params_synced

    model = bench(overlap_param_gather=True)
    model.train_step(2, data_seed=0)
    for _ in range(2):
        if helped:
            ensure_params_synced(model.chunks)
        else:
            model.chunks[0].start_param_sync(force_sync=True)
    expect_agreement(model, "in an export after the step")
    return model.bits()


HELPER = Helper(
    summary="parameters exported right after a step lack the step, except for the rank's own shard",
    call="ensure_params_synced",
)
