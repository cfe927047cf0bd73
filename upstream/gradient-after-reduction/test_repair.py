import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestGradientAfterReduction:
    def setup_method(self, method):
        Utils.initialize_model_parallel()
        self.model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(overlap_grad_reduce=True),
            torch.nn.Linear(4, 4).cuda(),
        )
        self.backward()
        self.model.finish_grad_sync()  # the first window learns when to reduce
        self.model.zero_grad_buffer()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def backward(self):
        self.model(torch.ones(2, 4).cuda()).sum().backward()

    def test_inside_of_no_sync(self):
        self.backward()
        with self.model.no_sync():
            self.backward()
        with pytest.raises(RuntimeError, match="would stay local"):
            self.model.finish_grad_sync()

    def test_more_microbatches_than_in_the_first_window(self):
        self.backward()
        self.backward()
        with pytest.raises(RuntimeError, match="would stay local"):
            self.model.finish_grad_sync()

    def test_windows_after_an_error(self):
        self.backward()
        self.backward()
        with pytest.raises(RuntimeError, match="would stay local"):
            self.model.finish_grad_sync()
        self.model.zero_grad_buffer()
        with self.model.no_sync():
            self.backward()
        self.backward()
        self.model.finish_grad_sync()
