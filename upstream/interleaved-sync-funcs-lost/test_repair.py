import pytest
import torch

from megatron.core import ModelParallelConfig
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from tests.unit_tests.test_utilities import Utils


class TestSyncFuncsAfterForwardOnly:
    def setup_method(self, method):
        Utils.initialize_model_parallel(
            pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2
        )
        self.calls = []
        self.config = ModelParallelConfig(
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=2,
            pipeline_dtype=torch.float,
            grad_sync_func=[self.calls.append] * 2,
            param_sync_func=[self.calls.append] * 2,
        )
        self.config.hidden_size = 8
        self.model = torch.nn.Linear(4, 1)
        self.model.config = self.config
        self.model.model_type = ModelType.encoder_or_decoder
        self.model.set_input_tensor = lambda input_tensor: None

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def evaluate(self, num_microbatches):
        def forward_step(data_iterator, model):
            return torch.rand(4, 2, 8).cuda(), lambda output: (output.sum(), {})

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[None, None],
            model=[self.model, self.model],
            num_microbatches=num_microbatches,
            seq_length=4,
            micro_batch_size=2,
            forward_only=True,
        )

    def test_exception(self):
        with pytest.raises(ValueError, match="contiguous micro-batches"):
            self.evaluate(1)
        assert self.config.grad_sync_func == [self.calls.append] * 2
        assert self.config.param_sync_func == [self.calls.append] * 2

    def test_not_called(self):
        self.evaluate(4)
        assert not self.calls
        assert self.config.grad_sync_func == [self.calls.append] * 2
        assert self.config.param_sync_func == [self.calls.append] * 2
