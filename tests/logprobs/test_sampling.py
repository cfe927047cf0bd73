"""Over what top-k, top-p or an engine's ids leave of the vocabulary."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ranks import on_ranks

from megatron_idempotent import token_logprobs
from megatron_idempotent.logprobs import Sampling

V = 4096


@on_ranks(2)
def test_nan_stays_in_its_row_and_columns_of_minus_infinity_have_no_part() -> None:
    """NaN stays in its row, and columns of -inf are not there."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    whole = torch.randn(4, 2 * V)
    whole[1, V + 7] = torch.nan
    whole[2, V:] = -torch.inf
    targets = torch.tensor([5, 6, 7, V + 9])
    for sampling in (
        Sampling(top_k=3),
        Sampling(top_p=0.3),
        Sampling(top_k=V + 5, target="-inf"),
        Sampling(keep=torch.tensor([[V + 7, V + 8, 5]] * 4)),
    ):
        logits = whole.chunk(2, -1)[rank].clone().requires_grad_()
        stats = token_logprobs(
            logits=logits,
            targets=targets,
            tp_group=dist.group.WORLD,
            entropy="grad",
            sampling=sampling,
        )
        torch.where(stats.logprob > -torch.inf, stats.logprob + stats.entropy, 0.0).sum().backward()
        for value in (stats.logprob, stats.entropy):
            assert value.isnan().tolist() == [False, True, False, False], (sampling, value)
        assert logits.grad[[0, 2, 3]].isfinite().all()
        if rank:
            assert not logits.grad[2].any()


def test_targets_of_probability_zero_leave_the_rest_finite_and_have_no_gradient():
    """Targets that are not kept, or that no sampler could have taken."""
    torch.manual_seed(0)
    targets = torch.arange(3)
    for sampling in (
        None,
        Sampling(top_k=3),
        Sampling(top_k=V - 1),
        Sampling(top_p=0.5),
        Sampling(top_p=1 - 1e-9),
        Sampling(keep=torch.arange(9)[None].expand(3, -1).contiguous()),
    ):
        logits = torch.randn(3, V)
        logits[1:, :3] = torch.where(torch.eye(3)[1:] > 0, -torch.inf, 1.0)
        logits.requires_grad_()
        stats = token_logprobs(logits=logits, targets=targets, entropy="grad", sampling=sampling)
        assert stats.logprob.isfinite().tolist() == [True, False, False]
        assert stats.entropy.isfinite().all()
        stats.entropy.sum().backward()
        assert logits.grad.isfinite().all()
    logits = torch.randn(3, V).scatter_(1, targets[:, None], -9.0).requires_grad_()
    for cut in (
        {"top_k": 3},
        {"top_p": 0.5},
        {"keep": torch.arange(9)[None].expand(3, -1) + 3},
    ):
        sampling = Sampling(**cut, target="-inf")
        stats = token_logprobs(logits=logits, targets=targets, sampling=sampling)
        assert (stats.logprob == -torch.inf).all()
        ones = torch.ones_like(stats.logprob)
        (gradient,) = torch.autograd.grad(stats.logprob, logits, ones)
        assert not gradient.any()


def test_settings_that_leave_nothing_out_and_those_that_mean_the_same():
    arguments = {"logits": torch.randn(2, 9), "targets": torch.tensor([1, 2])}
    plain = token_logprobs(**arguments).logprob
    for sampling in (Sampling(), Sampling(top_k=9), Sampling(top_k=-1), Sampling(top_k=None)):
        assert torch.equal(token_logprobs(**arguments, sampling=sampling).logprob, plain)
    ids = torch.tensor([[1, 4], [2, -1]])
    for one, other in (
        (Sampling(top_k=None, top_p=0.6), Sampling(top_p=0.6)),
        (Sampling(top_k=None, keep=ids.int()), Sampling(keep=ids)),
    ):
        found, wanted = (
            token_logprobs(**arguments, sampling=each).logprob for each in (one, other)
        )
        assert torch.equal(found, wanted)
        assert not torch.equal(found, plain)
    empty = Sampling(keep=torch.zeros(2, 0, dtype=torch.int64))
    assert not token_logprobs(**arguments, sampling=empty).logprob.any()  # the target alone
