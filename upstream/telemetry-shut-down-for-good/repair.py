"""`_end_otel_job_spans()` shuts down each run's telemetry once, not only that of the first run."""

from upstream.edits import Repair, substitute

_END = "megatron.training.training:_end_otel_job_spans"

REPAIR = Repair(
    edits=(
        substitute(
            _END,
            "if not _otel_shutdown_done",
            "if _otel_shutdown_done is not get_telemetry()",
        ),
        substitute(
            _END,
            "_otel_shutdown_done = True",
            "_otel_shutdown_done = _otel_handle  # a later run in this process has its own",
        ),
    ),
    unit_tests=("telemetry/test_span_groups.py",),
)
