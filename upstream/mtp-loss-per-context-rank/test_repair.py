import pytest
import torch

from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, process_mtp_loss
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.test_utilities import Utils

SEQUENCE = 8  # positions of each of two ranks


class TestMTPLossOfContextParallelRanks:
    def setup_method(self, method):
        Utils.initialize_model_parallel(context_parallel_size=2)
        MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    @pytest.mark.parametrize("per_token", [False, True])
    @pytest.mark.parametrize("counting", [range(1, 16), range(1, 7), [4]])
    def test_all_tokens_weigh_the_same(self, counting, per_token):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=1,
            num_attention_heads=1,
            mtp_num_layers=1,
            mtp_loss_scaling_factor=1.0,
            calculate_per_token_loss=per_token,
        )
        group = parallel_state.get_context_parallel_group()
        mask = torch.zeros(1, 2 * SEQUENCE)
        mask[:, counting] = 1
        # The first rank has the outer quarters of the sequence, the second one the inner quarters.
        quarters = mask.chunk(4, dim=1)
        mask = torch.cat(quarters[::3] if group.rank() == 0 else quarters[1:3], dim=1).cuda()
        hidden_states = torch.zeros(2 * SEQUENCE, 1, 1, device="cuda", requires_grad=True)
        output = process_mtp_loss(
            hidden_states,
            labels=torch.zeros(1, SEQUENCE, dtype=torch.long, device="cuda"),
            loss_mask=mask,
            output_layer=lambda hidden, **_: (hidden, None),
            output_weight=None,
            runtime_gather_output=None,
            is_training=False,
            compute_language_model_loss=lambda labels, logits: logits[..., 0].t(),
            config=config,
            cp_group=group,
        )
        output.sum().backward()
        gradient = hidden_states.grad[SEQUENCE:].flatten()
        # Without a weight, this is the number of tokens; DDP takes the mean over two ranks.
        total = len(counting) if per_token else group.size()
        expected = total / len(counting)
        torch.distributed.all_reduce(gradient_sum := gradient.sum(), group=group)
        used = gradient[gradient != 0]
        assert torch.allclose(used, torch.full_like(used, expected))
        assert gradient_sum.item() == pytest.approx(total)
