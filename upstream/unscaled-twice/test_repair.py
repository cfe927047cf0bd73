import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


@pytest.mark.parametrize("use_distributed_optimizer", [False, True])
@pytest.mark.parametrize("grad_reduce_in_fp32", [False, True])
class TestGradientsAreUnscaledOnce:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def build(self, use_distributed_optimizer, grad_reduce_in_fp32):
        torch.manual_seed(0)
        self.model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(
                use_distributed_optimizer=use_distributed_optimizer,
                grad_reduce_in_fp32=grad_reduce_in_fp32,
            ),
            torch.nn.Linear(4, 4, bias=False).half().cuda(),
        )
        config = OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            fp16=True,
            initial_loss_scale=1024.0,
            loss_scale_window=1,
            hysteresis=1,
            clip_grad=0.1,
            use_distributed_optimizer=use_distributed_optimizer,
        )
        self.optimizer = get_megatron_optimizer(config, [self.model])

    def backward(self, factor=1.0):
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = factor * self.model(torch.ones(2, 4).half().cuda()).sum()
        self.optimizer.scale_loss(loss.float()).backward()
        self.model.finish_grad_sync()

    def train(self, use_distributed_optimizer, grad_reduce_in_fp32, extra_calls):
        self.build(use_distributed_optimizer, grad_reduce_in_fp32)
        results = []
        for _ in range(3):
            self.backward()
            for _ in range(extra_calls):
                assert not self.optimizer.prepare_grads()
            success, grad_norm, _ = self.optimizer.step()
            results.append((success, float(grad_norm), float(self.optimizer.get_loss_scale())))
        return results, self.model.module.weight.detach().clone()

    def test_prepare_grads_before_the_step_changes_nothing(
        self, use_distributed_optimizer, grad_reduce_in_fp32
    ):
        layout = (use_distributed_optimizer, grad_reduce_in_fp32)
        expected, expected_weight = self.train(*layout, extra_calls=0)
        results, weight = self.train(*layout, extra_calls=2)
        assert results == expected
        torch.testing.assert_close(weight, expected_weight, rtol=0, atol=0)

    @pytest.mark.parametrize("overflow", [False, True])
    def test_next_gradients_are_unscaled_after_a_skipped_step(
        self, use_distributed_optimizer, grad_reduce_in_fp32, overflow
    ):
        self.build(use_distributed_optimizer, grad_reduce_in_fp32)
        self.backward()
        self.optimizer.prepare_grads()
        expected = float(self.optimizer.get_grad_norm())
        self.backward(float("inf") if overflow else 2.0)
        assert self.optimizer.prepare_grads() == overflow
        self.backward()
        assert not self.optimizer.prepare_grads()
        assert float(self.optimizer.get_grad_norm()) == expected
