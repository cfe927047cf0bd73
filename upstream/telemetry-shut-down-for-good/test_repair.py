from unittest import mock

from megatron.training import training


def test_each_handle_is_shut_down_once():
    handles = [mock.Mock(), mock.Mock()]
    for handle in handles:
        with mock.patch.object(training, "get_telemetry", return_value=handle):
            training._end_otel_job_spans()
            training._end_otel_job_spans()
    for handle in handles:
        handle.shutdown.assert_called_once_with()


def test_no_telemetry():
    with mock.patch.object(training, "get_telemetry", return_value=None):
        training._end_otel_job_spans()
        training._end_otel_job_spans()
