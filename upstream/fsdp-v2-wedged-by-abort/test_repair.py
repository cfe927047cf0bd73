import pytest
import torch

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


def _fail(*_):
    raise ValueError("interrupted")


class TestPassAfterException:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def losses_and_gradients(self, interrupted):
        torch.manual_seed(0)
        layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))).cuda()
        model = FullyShardedDataParallel(
            config=TransformerConfig(num_attention_heads=1, num_layers=1),
            ddp_config=DistributedDataParallelConfig(
                use_megatron_fsdp=True,
                megatron_fsdp_version=2,
                data_parallel_sharding_strategy="optim_grads_params",
            ),
            module=layers,
            fsdp_unit_modules=[torch.nn.Linear],
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="sgd", lr=0.1, use_distributed_optimizer=False),
            [model],
            use_gloo_process_groups=False,
        )
        inputs = torch.arange(16.0).view(2, 8).cuda() * (1 + torch.distributed.get_rank())

        def run_window():
            model.zero_grad_buffer()
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            gradients = [param.grad.to_local().clone() for param in model.parameters()]
            return [loss.detach(), *gradients]

        run_window()
        if interrupted is not None:
            weight, bias = (p.unsharded for p in layers[1].parameter_groups[0].fsdp_parameters)
            hook = {
                "forward": lambda: layers[1].register_forward_hook(_fail),
                "backward at a weight": lambda: weight.register_post_accumulate_grad_hook(_fail),
                "backward at a bias": lambda: bias.register_post_accumulate_grad_hook(_fail),
            }[interrupted]()
            with pytest.raises(ValueError, match="interrupted"):
                run_window()
            hook.remove()
        # As when weights are loaded: later passes must not use those of the interrupted one.
        for layer in layers:
            layer.parameter_groups[0].main_weight.local_buffer.mul_(0.5)
        with torch.no_grad():
            evaluated = model(inputs)
        return [evaluated, *run_window(), *run_window()]

    @pytest.mark.parametrize(
        "interrupted", ["forward", "backward at a weight", "backward at a bias"]
    )
    def test_later_passes_equal_those_without_it(self, interrupted):
        expected = self.losses_and_gradients(None)
        for tensor, other in zip(self.losses_and_gradients(interrupted), expected, strict=True):
            torch.testing.assert_close(tensor, other, rtol=0, atol=0)
