"""Pipeline stages whose MoE tracker has recorded different metrics hang in its report.

Symptom:
    With a pipeline stage without MoE layers, or one that has recorded no auxiliary loss yet, the
    tracker's `report` without names never returns on the other stages. No error until the process
    groups time out. If stages have recorded different metrics, or in a different order, the sums
    mix different metrics.

Cause:
    `_sync_metrics` all-reduces a stage's own metrics over the pipeline. Only with
    `force_initialize` and names does `report` create the metrics that a stage lacks.

Affects:
    0.18 and later; earlier releases have `moe-metrics-hang`. What the patch does: stages exchange
    the names and sizes of their metrics in one collective of objects, and each creates the metrics
    that it lacks, as zeros. Without a pipeline nothing changes. On a stage that did not record a
    metric it is not summed over tensor- and context-parallel ranks, as in upstream's own loop: log
    on a stage that recorded it.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/issues/1444,
    https://github.com/NVIDIA/Megatron-LM/pull/3401, https://github.com/NVIDIA-NeMo/RL/pull/3419

Remove when:
    stages agree on the metrics to reduce. `upstream/moe-tracker-hangs` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import moe

from ._case import Fault, Original, Patch, address, target


def sync(original: Original, self: Any, metric_names: list[str], pg_collection: Any = None) -> None:
    """Wrap the MoE tracker's reduction: first give all pipeline stages the same list of metrics.
    A stage creates the metrics that it lacks. A collective over the ranks of the pipeline.
    """
    sizes = moe.agreed_metrics(
        {n: len(self._metrics[n].values) if n in self._metrics else 0 for n in metric_names},
        pg_collection=pg_collection,
    )
    for name, size in sizes.items():
        if size:
            self.ensure_initialized(name, size)
    metric_names[:] = sizes  # report() logs these
    original(self, metric_names, pg_collection)


def reproduce() -> None:
    """Record one metric of 1 on each of two pipeline stages, under different names, and report.
    On stock Megatron the report lacks one metric, or mixes the two.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    name = f"stage {parallel_state.get_pipeline_model_parallel_rank()} loss"
    tracker, logged = MoEMetricsTracker(), dict[str, Any]()
    tracker.record(name, torch.ones((), device="cuda"), layer_number=1, num_layers=2)
    tracker.report(1.0, iteration=1, num_layers=1, total_loss_dict=logged)
    values = {metric: float(value) for metric, value in logged.items()}
    if values != {"stage 0 loss": 1.0, "stage 1 loss": 1.0}:
        raise Fault(f"of two metrics of 1 this stage logs {values}")


PATCH = Patch(
    "pipeline stages that have recorded different MoE metrics hang in the tracker's report",
    target("moe.moe_logging:MoEMetricsTracker._sync_metrics", sync),
    since="0.18",
    fixed_by=(
        (
            address("moe.moe_logging:MoEMetricsTracker.report"),
            "track_names is None or not force_initialize",
        ),
    ),
    loudness="both",
)
