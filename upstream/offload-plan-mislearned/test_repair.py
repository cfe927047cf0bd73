from types import SimpleNamespace

import pytest
import torch

from megatron.core import ModelParallelConfig
from megatron.core.enums import ModelType
from megatron.core.extensions import transformer_engine
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    ChunkOffloadHandler,
    FineGrainedActivationOffloadingInterface,
    PipelineOffloadManager,
)
from tests.unit_tests.test_utilities import Utils

MICROBATCHES = 2
LAYERS = 3


class OffloadingModel(torch.nn.Module):
    def __init__(self, offload):
        super().__init__()
        self.config = ModelParallelConfig()
        self.config.fine_grained_activation_offloading = offload
        self.config.overlap_moe_expert_parallel_comm = False
        self.config.hybrid_context_parallel = False
        self.config.calculate_per_token_loss = False
        self.model_type = ModelType.encoder_or_decoder
        self.weight = torch.nn.Parameter(torch.full((4, 4), 0.1, device="cuda"))

    def set_input_tensor(self, input_tensor):
        pass

    def forward(self, hidden):
        offload = self.config.fine_grained_activation_offloading
        if offload:
            FineGrainedActivationOffloadingInterface.init_chunk_handler(
                pp_rank=0,
                vp_size=None,
                vp_stage=None,
                min_offloaded_tensor_size=1,
                delta_offload_bytes_across_pp_ranks=0,
                activation_offload_fraction=1.0,
            )
        for _ in range(LAYERS):
            hidden = hidden @ self.weight
            manager = FineGrainedActivationOffloadingInterface(offload, hidden, "mlp_norm")
            with manager as layer_input:
                hidden = layer_input.exp()
            hidden = manager.group_offload(hidden)
        return hidden


def _run_window(model, forward_only=False, fail=False, reference=False):
    """Run two microbatches; return the gradient and the number of offloaded tensors."""

    def loss_func(output):
        if fail and next(count) == MICROBATCHES:
            raise ValueError("interrupted")
        loss = output.mean()
        return loss, {"loss": loss.detach()}

    def forward_step(data_iterator, model):
        if reference:
            _without_schedule(model)
        return model(next(data_iterator)), loss_func

    def offloaded():
        return PipelineOffloadManager.get_instance().cpu_tensor_pool._stats["allocation_requests"]

    count = iter(range(1, 1 + MICROBATCHES))
    model.weight.grad = None
    before = offloaded()
    schedules.forward_backward_no_pipelining(
        forward_step_func=forward_step,
        data_iterator=iter(torch.arange(8.0 * MICROBATCHES).view(-1, 2, 4).cuda() / 8),
        model=model,
        num_microbatches=MICROBATCHES,
        seq_length=2,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return model.weight.grad, offloaded() - before


def _forward_only(model):
    with torch.no_grad():
        _run_window(model, forward_only=True)


def _forward_only_with_grad(model):
    _run_window(model, forward_only=True)


def _without_schedule(model):
    with torch.no_grad():
        model(torch.ones(2, 4).cuda())


def _interrupted(model):
    with pytest.raises(ValueError, match="interrupted"):
        _run_window(model, fail=True)


class TestActivationOffloadPlan:
    @pytest.fixture(autouse=True)
    def setup(self, monkeypatch):
        # Tensors may be on the host, and no Transformer Engine is needed.
        monkeypatch.setattr(
            transformer_engine, "cpu_offload", SimpleNamespace(CPUOffloadEnabled=False)
        )
        monkeypatch.setattr(
            ChunkOffloadHandler,
            "_can_manage_tensor_for_offload",
            staticmethod(lambda tensor: not isinstance(tensor, torch.nn.Parameter)),
        )
        Utils.initialize_model_parallel()
        PipelineOffloadManager.reset_instance()
        yield
        PipelineOffloadManager.reset_instance()
        Utils.destroy_model_parallel()

    @pytest.mark.parametrize("after", [0, 1], ids=["first", "later"])
    @pytest.mark.parametrize(
        "other", [_forward_only, _forward_only_with_grad, _without_schedule, _interrupted]
    )
    def test_windows_offload_as_if_they_were_alone(self, other, after):
        gradient, _ = _run_window(OffloadingModel(offload=False))
        model = OffloadingModel(offload=True)
        expected = [_run_window(model)[1] for _ in range(3)]
        assert all(expected)

        PipelineOffloadManager.reset_instance()
        for window in range(3):
            if window == after:
                other(model)
            window_gradient, count = _run_window(model)
            torch.testing.assert_close(window_gradient, gradient, rtol=0, atol=0)
            assert count == expected[window]

    def test_forward_without_gradients_in_a_window_offloads_nothing(self):
        model = OffloadingModel(offload=True)
        expected = [_run_window(model)[1] for _ in range(2)]
        PipelineOffloadManager.reset_instance()
        assert [_run_window(model, reference=True)[1] for _ in range(2)] == expected
