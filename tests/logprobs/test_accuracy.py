"""A vocabulary and logits as models have them, and graphs as callers use them."""

from __future__ import annotations

from typing import Any

import pytest

N, V = 64, 32768


def of_a_model(name: str) -> list[bytes]:
    """Runs on one of two ranks: a model's logits, held to float64; what it found, as bytes."""
    import torch
    from cases import Case, within_bounds

    torch.manual_seed(0)
    whole = (torch.randn(N, V) * 3).to(getattr(torch, name))
    targets = torch.randint(0, V, (N,))
    # Most of the tokens are what a policy would sample.
    likely = torch.arange(N) % 4 > 0
    targets = torch.where(likely, whole.float().softmax(-1).multinomial(1).squeeze(1), targets)
    of_logprob, of_entropy = torch.randn(2, N)
    found = []
    for temperature in (1.0, 0.7):
        for entropy in ("none", "grad"):
            arguments = {
                "targets": targets,
                "vocab_size": None,
                "temperature": temperature,
                "entropy": entropy,
            }
            given = Case(whole, arguments, "plain", of_logprob, of_entropy)
            found += within_bounds(given, arguments)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_errors_of_a_models_logits_are_within_what_rounding_allows(megatron_ranks, dtype):
    first, second = megatron_ranks(2, of_a_model, dtype)
    assert first == second


def again() -> None:
    """Runs on a rank: a graph that is kept is differentiated twice, from hidden states and cut
    too."""
    import torch

    from megatron_idempotent import token_logprobs
    from megatron_idempotent.logprobs import Sampling

    torch.manual_seed(0)
    logits, hidden, weight = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((6, 300), (6, 8), (300, 8))
    )
    forms: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
        ({"logits": logits}, (logits,)),
        ({"hidden": hidden, "weight": weight}, (hidden, weight)),
    ]
    for sampling in (None, Sampling(top_k=9)):
        for form, inputs in forms:
            stats = token_logprobs(
                **form, targets=torch.arange(6), entropy="grad", sampling=sampling
            )
            total = stats.logprob.sum() + stats.entropy.sum()
            once, twice = (torch.autograd.grad(total, inputs, retain_graph=True) for _ in range(2))
            assert all(map(torch.equal, once, twice))
            # One output alone, and then the other, add up to both.
            parts = [
                torch.autograd.grad(each.sum(), inputs, retain_graph=True)
                for each in (stats.logprob, stats.entropy)
            ]
            for whole, logprob, entropy in zip(once, *parts, strict=True):
                torch.testing.assert_close(logprob + entropy, whole, rtol=1e-11, atol=1e-13)


def some_without_gradient() -> None:
    """Runs on a rank: tokens whose outputs nobody differentiates, such as clipped ones; in
    float64."""
    import torch

    from megatron_idempotent import token_logprobs

    torch.manual_seed(0)
    logits, hidden, weight = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((4, 5, 300), (4, 5, 8), (300, 8))
    )
    mask = torch.rand(4, 5) < 0.8
    of_logprob, of_entropy = torch.randn(2, 4, 5)
    of_logprob[:, ::2] = 0.0  # of which only the entropy is differentiated
    of_entropy[1] = 0.0  # of which only the log-prob is
    live = torch.arange(20).view(4, 5) % 3 == 0
    dead = ~live | ~mask
    forms: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
        ({"logits": logits}, (logits,)),
        ({"logits": logits * 1, "ownership": "consume"}, (logits,)),
        ({"hidden": hidden, "weight": weight}, (hidden, weight)),
    ]
    targets, temperature = torch.arange(20).view(4, 5), torch.rand(4, 5) + 0.5

    def total(logprob: Any, entropy: Any) -> Any:
        return ((logprob * of_logprob + entropy * of_entropy) * (live & mask)).sum()

    for form, inputs in forms:
        made = logits if "hidden" not in form else hidden @ weight.t()
        logp = torch.log_softmax(made / temperature[..., None], -1)
        logprob = logp.gather(-1, targets[..., None]).squeeze(-1)
        wanted = torch.autograd.grad(total(logprob, -(logp.exp() * logp).sum(-1)), inputs)
        stats = token_logprobs(
            **form, targets=targets, temperature=temperature, token_mask=mask, entropy="grad"
        )
        found = torch.autograd.grad(total(stats.logprob, stats.entropy), inputs)
        assert not found[0][dead].any()
        for value, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-13)
    # Nothing is read of logits that nobody wants to know of.
    logits = torch.full((8, 300), torch.nan)
    logits[:2] = 1.0
    logits.requires_grad_()
    stats = token_logprobs(logits=logits, targets=torch.arange(8))
    (gradient,) = torch.autograd.grad(stats.logprob[:2].sum(), logits)
    assert gradient.isfinite().all()


def test_tokens_whose_outputs_have_no_gradient_are_left_out_of_the_backward(megatron_ranks):
    megatron_ranks(1, some_without_gradient)


def changed_in_place() -> None:
    """Runs on a rank: each output is multiplied where it lies, before it is differentiated."""
    import torch

    from megatron_idempotent import token_logprobs
    from megatron_idempotent.logprobs import Sampling

    for sampling in (None, Sampling(top_k=3)):
        for name in ("logprob", "entropy"):
            logits = torch.randn(4, 9, requires_grad=True)
            gradients = []
            for _ in range(2):
                stats = token_logprobs(
                    logits=logits, targets=torch.arange(4), entropy="grad", sampling=sampling
                )
                value = getattr(stats, name)
                doubled = value.mul_(2) if gradients else value * 2
                gradients += torch.autograd.grad(doubled.sum(), logits)
            assert torch.equal(*gradients)


def test_callers_may_change_outputs_in_place(megatron_ranks):
    megatron_ranks(1, changed_in_place)


def test_a_graph_that_is_kept_gives_the_same_gradient_again(megatron_ranks):
    megatron_ranks(1, again)
