"""An MTP layer's gradient is the same on one context-parallel rank and on two."""

import numpy
import pytest
from ranks import needs_release

needs_release((0, 17), "before 0.17 there is no patch")

pytestmark = pytest.mark.full
#: Of a step in float32, as a part of its norm: tests/step/roundings.py derives them.
ROUNDINGS = 4e5 * 2.0**-24
PATCH = "mtp-loss-per-context-rank"


def mtp_gradient(cp, layers, per_token, masked, applied):
    """Runs on a rank: what MTP's loss alone does to the MTP layers, as one list."""
    import torch
    from megatron_idempotent.patches import _case

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny
    from megatron_idempotent.step import own_positions

    megatron_idempotent.apply(exclude=() if applied else (PATCH,))
    model = tiny.build(
        cp=cp,
        overlap_grad_reduce=False,
        distributed_optimizer=False,
        exact_attention=True,
        mtp=layers,
        config_overrides={"calculate_per_token_loss": per_token},
    )
    (chunk,) = model.chunks
    length = tiny.SEQUENCE
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, tiny.VOCABULARY, (1, length), generator=generator).cuda()
    # One of the first rank, and the first one of the second, which the first rank predicts.
    counts = torch.zeros(1, length, device="cuda")
    counts[0, 2] = counts[0, length // 4] = 1
    mask = own_positions(counts) if masked else None

    def forward_step(data, chunk):
        next(data)
        output = _case.of_context_rank(chunk, tokens, mask)

        def nothing(output):
            number = torch.tensor(1 if mask is None else int(mask.sum()))
            return (output.sum() * 0, number, {}) if per_token else (output.sum() * 0, {})

        return output, nothing

    chunk.zero_grad_buffer()
    model.schedule(iter([None]), 1, forward_step, micro_batch_size=1)
    gradients = [each.main_grad.flatten() for each in chunk.module.mtp.parameters()]
    return torch.cat(gradients).double().tolist()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("per_token", [True, False], ids=["per-token", "averaged"])
def test_context_ranks_share_one_mean(layers, per_token, megatron_rank_pool):
    one, *_ = megatron_rank_pool.run(1, mtp_gradient, 1, layers, per_token, True, True)
    both = megatron_rank_pool.run(2, mtp_gradient, 2, layers, per_token, True, True)
    assert both[0] == both[1]
    right, shared = numpy.array(one), numpy.array(both[0])
    norm = numpy.linalg.norm(right)
    assert norm > 0
    assert numpy.linalg.norm(shared - right) <= ROUNDINGS * norm
    # Stock Megatron's are no roundings.
    stock, _ = megatron_rank_pool.run(2, mtp_gradient, 2, layers, per_token, True, False)
    assert numpy.linalg.norm(numpy.array(stock) - right) > 2 * ROUNDINGS * norm


def test_without_a_mask_all_tokens_count(megatron_rank_pool):
    one, *_ = megatron_rank_pool.run(1, mtp_gradient, 1, 1, False, False, True)
    both, _ = megatron_rank_pool.run(2, mtp_gradient, 2, 1, False, False, True)
    right = numpy.array(one)
    error = numpy.linalg.norm(numpy.array(both) - right)
    assert error <= ROUNDINGS * numpy.linalg.norm(right)
