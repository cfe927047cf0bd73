"""Pipeline stages that have recorded different MoE metrics hang when they log them.

Symptom:
    With a pipeline stage without MoE layers, or one that has recorded no auxiliary loss yet,
    `track_moe_metrics` without names, or `reduce_aux_losses_tracker_across_ranks`, never returns on
    the other stages. No error until the process groups time out. If stages have recorded different
    metrics, or in a different order, the sums mix different metrics. Before 0.17 MTP layers also
    hang with names.

Cause:
    Each stage all-reduces its own metrics over the pipeline. Only with `force_initialize` and names
    does it create the metrics that it lacks, before 0.17 in a size without MTP layers.

Affects:
    0.12 to 0.17; later releases have `moe-tracker-hangs`. What the patch does: stages exchange the
    names and sizes of their metrics in one collective of objects, and each creates the metrics that
    it lacks, as zeros. Without a pipeline nothing changes. On a stage that did not record a metric
    it is not summed over tensor- and context-parallel ranks, as in upstream's own loop: log on a
    stage that recorded it.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/issues/1444,
    https://github.com/NVIDIA/Megatron-LM/pull/3401, https://github.com/NVIDIA-NeMo/RL/pull/3419

Remove when:
    stages agree on the metrics to reduce.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import moe

from ._case import Fault, Original, Patch, a_body_has, target


def reduce(original: Original, track_names: Any = None, *args: Any, **kwargs: Any) -> None:
    """Wrap the reduction of MoE metrics: first give all pipeline stages the same list of metrics.
    A metric that a stage lacks is zero there. A collective over the ranks of the pipeline.
    """
    import torch

    tracker = moe.legacy_metrics()
    sizes = moe.agreed_metrics(
        {name: len(entry["values"]) for name, entry in tracker.items()},
        pg_collection=kwargs.get("pg_collection", args[0] if args else None),
    )
    recorded = dict(tracker)
    tracker.clear()
    for name, size in sizes.items():
        entry = recorded.get(name, {"values": torch.zeros(0, device="cuda")})
        lacking = size - len(entry["values"])
        if lacking:
            entry["values"] = torch.nn.functional.pad(entry["values"], (0, lacking))
        tracker[name] = {"reduce_group": None, "avg_group": None, **entry}
    original(track_names, *args, **kwargs)


def reproduce() -> None:
    """Record one metric of 1 on each of two pipeline stages, under different names, and reduce.
    On stock Megatron the sums mix the two metrics.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    moe.legacy_metrics().clear()
    name = f"loss of stage {parallel_state.get_pipeline_model_parallel_rank()}"
    moe_utils.save_to_aux_losses_tracker(name, torch.ones((), device="cuda"), 1, 2)
    moe_utils.reduce_aux_losses_tracker_across_ranks()
    total = float(moe.legacy_metrics()[name]["values"].sum())
    if total != 1.0:
        raise Fault(f"a metric of 1 is {total:g} after its reduction over the pipeline")


PATCH = Patch(
    "pipeline stages that have recorded different MoE metrics hang in their reduction",
    target("moe.moe_utils:reduce_aux_losses_tracker_across_ranks", reduce),
    before="0.18",
    # Then another function reduces them.
    fixed_when=a_body_has("get_moe_metrics_tracker()"),
    loudness="both",
)
