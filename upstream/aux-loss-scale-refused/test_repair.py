import torch

from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler


class TestScaleOfMoEAuxLoss:
    def setup_method(self, method):
        MoEAuxLossAutoScaler.main_loss_backward_scale = None

    def teardown_method(self, method):
        MoEAuxLossAutoScaler.main_loss_backward_scale = None

    def _gradient(self):
        output, aux_loss = (torch.ones(1, device="cuda", requires_grad=True) for _ in range(2))
        MoEAuxLossAutoScaler.apply(output, aux_loss).sum().backward()
        return aux_loss.grad.item()

    def test_training_after_inference(self):
        with torch.inference_mode():
            MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device="cuda"))
        MoEAuxLossAutoScaler.set_loss_scale(torch.full((1,), 0.5, device="cuda"))
        assert self._gradient() == 0.5

    def test_schedule_after_direct_backward(self):
        assert self._gradient() == 1.0
        MoEAuxLossAutoScaler.set_loss_scale(torch.full((1,), 0.5, device="cuda"))
        assert self._gradient() == 0.5

    def test_scale_of_the_caller_is_not_written_to(self):
        scale = torch.ones(1, device="cuda")
        MoEAuxLossAutoScaler.set_loss_scale(scale)
        MoEAuxLossAutoScaler.set_loss_scale(torch.full((1,), 0.5, device="cuda"))
        assert scale.item() == 1.0
