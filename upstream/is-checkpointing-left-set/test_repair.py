import pytest
import torch

from megatron.core.tensor_parallel.random import (
    checkpoint,
    is_checkpointing,
    model_parallel_cuda_manual_seed,
)
from tests.unit_tests.test_utilities import Utils


class TestFlagAfterException:
    def setup_method(self, method):
        Utils.initialize_model_parallel(1, 1)
        model_parallel_cuda_manual_seed(123)

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    @pytest.mark.parametrize("good_runs", [0, 1])
    def test_exception_in_forward_or_recomputation(self, good_runs):
        seen = []

        def layer(x):
            seen.append(is_checkpointing())
            if len(seen) > good_runs:
                raise ValueError("interrupted")
            return x * 2

        x = torch.ones(4, requires_grad=True)
        with pytest.raises(ValueError, match="interrupted"):
            checkpoint(layer, False, x).sum().backward()
        assert seen == [True] * (1 + good_runs)
        assert not is_checkpointing()
