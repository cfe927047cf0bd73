"""Pipeline stages log the same MoE metrics, whichever of them have recorded one."""

from __future__ import annotations

import importlib
import importlib.util

from ranks import on_ranks

import megatron_idempotent

TRACKER = "megatron.core.transformer.moe.moe_logging"


@on_ranks(2)
def test_stages_that_have_recorded_nothing_log_what_others_have():
    """Three rounds: nobody has a metric, the second stage has one, and both have, in two orders."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    megatron_idempotent.apply()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    new = importlib.util.find_spec(TRACKER) is not None
    if new:
        tracker = importlib.import_module(TRACKER).MoEMetricsTracker()
        record, report = tracker.record, tracker.report
    else:
        record, report = moe_utils.save_to_aux_losses_tracker, moe_utils.track_moe_metrics
    one = torch.ones((), device="cuda")
    rounds = [
        ([[], []], {}),
        ([[], ["a loss"]], {"a loss": 1.0}),
        ([["a loss", "z loss"], ["z loss", "a loss"]], {"a loss": 2.0, "z loss": 2.0}),
    ]
    for recorded, expected in rounds:
        for name in recorded[stage]:
            record(name, one, stage + 1, 2)
        logged: dict[str, object] = {}
        report(1.0, 1, None, num_layers=1, total_loss_dict=logged)
        assert {name: float(value) for name, value in logged.items()} == expected
