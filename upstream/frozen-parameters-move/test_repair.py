import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils

LAYOUTS = {
    "fp32": {},
    "fp32-distributed": {"use_distributed_optimizer": True},
    "bf16": {"bf16": True},
    "bf16-distributed": {"bf16": True, "use_distributed_optimizer": True},
    "loss-scale": {"bf16": True, "use_distributed_optimizer": True, "loss_scale": 64.0},
    "half-on-the-host": {
        "bf16": True,
        "use_distributed_optimizer": True,
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
    },
    "on-the-host": {
        "bf16": True,
        "use_distributed_optimizer": True,
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 1.0,
    },
}


class TestFrozenParametersStay:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def build(self, **config):
        torch.manual_seed(0)
        dtype = torch.bfloat16 if config.get("bf16") else torch.float32
        layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(4)]
        self.layers = torch.nn.Sequential(*layers).to(dtype).cuda()
        self.model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=config.get("use_distributed_optimizer", False),
            ),
            self.layers,
        )
        optimizer_config = OptimizerConfig(optimizer="adam", lr=0.1, weight_decay=0.1, **config)
        self.optimizer = get_megatron_optimizer(optimizer_config, [self.model])

    def step(self):
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        inputs = torch.ones(2, 8, dtype=self.layers[0].weight.dtype).cuda()
        self.optimizer.scale_loss(self.model(inputs).float().square().sum()).backward()
        self.model.finish_grad_sync()
        assert self.optimizer.step()[0]

    def weights(self):
        return [layer.weight.detach().clone() for layer in self.layers]

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_frozen_parameters_keep_their_values(self, layout):
        self.build(**LAYOUTS[layout])
        for _ in range(2):
            self.step()
        for layer in self.layers[::2]:
            layer.requires_grad_(False)
        before = self.weights()
        for _ in range(2):
            self.step()
        moved = [not torch.equal(*pair) for pair in zip(before, self.weights())]
        assert moved == [False, True, False, True]

        # The step that is saved for all parameters counts the steps without these, too.
        self.optimizer.state_dict()
        self.layers.requires_grad_(True)
        before = self.weights()
        self.step()
        assert not any(torch.equal(*pair) for pair in zip(before, self.weights()))
        for optimizer in self.optimizer.chained_optimizers:
            states = optimizer.optimizer.state.values()
            steps = {float(state["step"]) for state in states if "step" in state}
            assert steps <= {5.0}
