"""Pipeline stages agree on the MoE metrics to reduce, if the caller does not name them."""

from upstream.edits import Repair, before

_TRACKER = "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker"
_AGREE = '''
def _agree_on_metrics(
    self, metric_names: List[str], pg_collection: Optional[ProcessGroupCollection] = None
) -> List[str]:
    """Create the metrics that only other PP ranks have, and return all in one order."""
    if pg_collection is None:
        pp_group = parallel_state.get_pipeline_model_parallel_group()
    else:
        pp_group = pg_collection.pp
    if pp_group.size() == 1:
        return metric_names
    sizes = {n: len(self._metrics[n].values) for n in metric_names if n in self._metrics}
    all_sizes = [sizes] * pp_group.size()
    torch.distributed.all_gather_object(all_sizes, sizes, group=pp_group)
    agreed = {name: size for sizes in all_sizes for name, size in sizes.items()}
    for name, size in agreed.items():
        self.ensure_initialized(name, size)
    return list(agreed)

'''

REPAIR = Repair(
    edits=(
        before(
            f"{_TRACKER}.report",
            "self._sync_metrics(metric_names, pg_collection)",
            """
            if track_names is None or not force_initialize:
                metric_names = self._agree_on_metrics(metric_names, pg_collection)

            """,
        ),
        before(_TRACKER, "def _sync_metrics", _AGREE),
    ),
    unit_tests=("transformer/moe/test_aux_loss.py",),
    ranks=2,
)
