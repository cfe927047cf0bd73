import pytest
import torch

from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker
from tests.unit_tests.test_utilities import Utils


class TestMetricsOfPipelineStages:
    def setup_method(self, method):
        Utils.initialize_model_parallel(pipeline_model_parallel_size=2)
        self.stage = parallel_state.get_pipeline_model_parallel_rank()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def _report(self, recorded, **kwargs):
        tracker, logged = MoEMetricsTracker(), {}
        for name in recorded:
            tracker.record(
                name, torch.ones((), device="cuda"), layer_number=self.stage + 1, num_layers=2
            )
        tracker.report(1.0, iteration=1, num_layers=1, total_loss_dict=logged, **kwargs)
        return {name: value.item() for name, value in logged.items()}

    def test_stages_with_other_metrics(self):
        recorded = (["a_loss", "b_loss"], ["c_loss", "a_loss"])[self.stage]
        assert self._report(recorded) == {"a_loss": 2, "b_loss": 1, "c_loss": 1}

    @pytest.mark.parametrize("force_initialize", [False, True])
    def test_named_metrics(self, force_initialize):
        recorded = (["a_loss", "b_loss"], ["b_loss", "a_loss"])[self.stage]
        kwargs = {"track_names": ["a_loss"], "force_initialize": force_initialize}
        assert self._report(recorded, mtp_num_layers=1, **kwargs) == {"a_loss": 1}
