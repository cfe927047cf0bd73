"""Gradients of graphs that are kept, changed or mostly empty, and in Megatron's `main_grad`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import reference, summed

from megatron_idempotent import token_logprobs
from megatron_idempotent.logprobs import Sampling


@pytest.mark.parametrize("sampling", [None, Sampling(top_k=9)], ids=["whole", "cut"])
def test_a_graph_that_is_kept_gives_the_same_gradient_again(sampling):
    torch.manual_seed(0)
    logits, hidden, weight = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((6, 300), (6, 8), (300, 8))
    )
    for form in ({"logits": logits}, {"hidden": hidden, "weight": weight}):
        inputs = tuple(form.values())
        stats = token_logprobs(**form, targets=torch.arange(6), entropy="grad", sampling=sampling)
        once, twice = (
            torch.autograd.grad(summed(stats), inputs, retain_graph=True) for _ in range(2)
        )
        assert all(map(torch.equal, once, twice))
        # One output alone, and then the other, add up to both.
        parts = [
            torch.autograd.grad(each.sum(), inputs, retain_graph=True)
            for each in (stats.logprob, stats.entropy)
        ]
        for whole, logprob, entropy in zip(once, *parts, strict=True):
            torch.testing.assert_close(logprob + entropy, whole, rtol=1e-11, atol=1e-13)


def test_tokens_whose_outputs_have_no_gradient_are_left_out_of_the_backward():
    """Tokens whose outputs nobody differentiates, such as clipped ones; in float64."""
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
        wanted = torch.autograd.grad(total(*reference(made, targets, temperature)), inputs)
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


def changed_in_place() -> None:
    """Each output is multiplied where it lies, before it is differentiated."""
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


def test_callers_may_change_outputs_in_place():
    changed_in_place()


def test_a_token_has_a_gradient_if_any_of_its_targets_has():
    """Two of 40 tokens, of which a gradient reaches the second target alone."""
    live, generator = [3, 17], torch.Generator().manual_seed(0)
    logits = torch.randn(1, 40, 24, generator=generator)
    weight = torch.randn(24, 8, generator=generator)
    hidden = torch.randn(1, 40, 8, generator=generator)
    ids = torch.stack([torch.arange(40) % 24, (torch.arange(40) + 5) % 24], -1)[None]

    def gradient(leaf: Any, rows: list[int], **form: Any) -> Any:
        stats = token_logprobs(targets=ids[:, rows], **form)
        own = [rows.index(each) for each in live]
        return torch.autograd.grad(stats.logprob[0, own, 1].sum(), leaf)[0]

    every = list(range(40))
    whole = gradient(logits.requires_grad_(), every, logits=logits)
    few = logits.detach()[:, live].requires_grad_()
    assert torch.equal(whole[:, live], gradient(few, live, logits=few))
    found = gradient(hidden.requires_grad_(), every, hidden=hidden, weight=weight)
    for each in (whole, found):
        assert (each != 0).any(-1)[0].nonzero().flatten().tolist() == live


def test_all_of_a_vocabulary_leave_no_rest_which_does_not_move():
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 50, requires_grad=True)
    every = torch.arange(50).expand(3, 4, -1)
    stats = token_logprobs(logits=logits, targets=every, entropy="grad")
    assert (stats.rest == -torch.inf).all()
    total = (stats.logprob * torch.randn(3, 4, 50)).sum()
    first, second = (
        torch.autograd.grad(each, logits, retain_graph=True)[0]
        for each in (total, total + stats.rest.sum())
    )
    assert torch.equal(first, second)


H, V = 16, 600


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_who_has_main_grad_finds_zeros_in_grad(dtype, wide):
    """A plain tensor, with the attributes that Megatron gives it; its products come in parts."""
    weight = torch.randn(V, H).to(dtype).requires_grad_()
    hidden = torch.randn(5, H).to(dtype)
    arguments: dict[str, Any] = {
        "hidden": hidden,
        "weight": weight,
        "targets": torch.arange(5),
        "workspace_bytes": 1000,
    }
    weight.main_grad = torch.ones(V, H, dtype=wide)
    weight.grad_added_to_main_grad = False
    stats = token_logprobs(**arguments, gradient_accumulation_fusion=True)
    stats.logprob.sum().backward()
    assert weight.grad_added_to_main_grad
    assert not weight.grad.any()
    fused = weight.main_grad - 1
    weight.grad = None
    token_logprobs(**arguments).logprob.sum().backward()
    # Either way an element adds up a product for each of 5 tokens, each product no larger than
    # the hidden state; one way adds them to 1, which is taken away again.
    bound_H = (2 * 5 + 2) * torch.finfo(dtype).eps / 2 * (1 + hidden.abs().sum(0).to(wide))
    assert ((fused - weight.grad).abs() <= bound_H).all()
    assert weight.grad.any()
