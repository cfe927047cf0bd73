from types import SimpleNamespace

import pytest
import torch

from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss


class TestReportedLoss:
    @pytest.mark.parametrize("num_tokens", [(), (torch.tensor(8),)])
    @pytest.mark.parametrize("calculate_per_token_loss", [True, False])
    def test_detached_loss_is_not_scaled(self, num_tokens, calculate_per_token_loss):
        weight = torch.tensor(3.0, requires_grad=True)

        def loss_func(output):
            loss = output.sum()
            return loss, *num_tokens, {"loss": loss.detach()}

        reported = []
        loss, _ = forward_step_calc_loss(
            None,
            2.0 * weight,
            loss_func,
            SimpleNamespace(timers=None, calculate_per_token_loss=calculate_per_token_loss),
            None,
            False,
            4,
            reported,
            cp_group_size=2,
            is_last_stage=True,
        )
        loss.backward()
        if not num_tokens:
            factor = 2 / 4
        elif calculate_per_token_loss:
            factor = 1.0
        else:
            factor = 1 / 8 / 4
        assert loss.item() == 6.0 * factor
        assert weight.grad.item() == 2.0 * factor
        assert reported[0]["loss"].item() == 6.0
