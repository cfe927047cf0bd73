import pytest
import torch

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestWindowAfterAbortedBackward:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def test_gradients_are_those_of_the_window(self):
        torch.manual_seed(0)
        model = FullyShardedDataParallel(
            config=TransformerConfig(num_attention_heads=1, num_layers=1),
            ddp_config=DistributedDataParallelConfig(
                data_parallel_sharding_strategy="optim_grads_params",
                overlap_grad_reduce=True,
                use_megatron_fsdp=True,
                gradient_reduce_div_fusion=False,
            ),
            # The norm is no unit: the root module's hooks reduce its gradients.
            module=torch.nn.Sequential(
                torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)
            ).cuda(),
            fsdp_unit_modules=[torch.nn.Linear],
        )
        fsdp = model.module
        inputs = torch.arange(16.0).view(2, 8).cuda() * (1 + torch.distributed.get_rank())

        def run_window():
            model.zero_grad_buffer()
            model(inputs).square().sum().backward()
            model.finish_grad_sync()
            return [
                param.grad._local_tensor.clone()
                for _, param in fsdp.param_and_grad_buffer.optimizer_named_parameters
                if param.grad is not None
            ]

        expected = run_window()
        assert expected

        def fail(param):
            raise ValueError("interrupted")

        hook = fsdp.raw_param["0.weight"].register_post_accumulate_grad_hook(fail)
        with pytest.raises(ValueError):
            run_window()
        hook.remove()

        for _ in range(2):
            for gradient, other in zip(run_window(), expected):
                torch.testing.assert_close(gradient, other, rtol=0, atol=0)
