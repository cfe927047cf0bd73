"""The GRPO objective against the formula of its docstring, term by term in float64."""

import math
import random

import pytest

torch = pytest.importorskip("torch")

from megatron_idempotent import token_logprobs  # noqa: E402 - after the skip
from megatron_idempotent.rl.trainer.batch import Batch  # noqa: E402
from megatron_idempotent.rl.trainer.config import LossConfig  # noqa: E402
from megatron_idempotent.rl.trainer.loss import LogitsOf, PolicyLoss, grpo_loss  # noqa: E402
from megatron_idempotent.step.microbatches import valid_counts  # noqa: E402

B, T = 5, 7
CLIP_LOW, CLIP_HIGH, KL = 0.2, 0.3, 0.05


def reference(logprobs, old, advantages, mask, reference_logprobs, kl_coefficient):
    """The same sums in plain Python."""
    loss = kl = clipped = tokens = 0.0
    for b in range(B):
        for t in range(T):
            if not mask[b][t]:
                continue
            ratio = math.exp(logprobs[b][t] - old[b][t])
            held = min(max(ratio, 1 - CLIP_LOW), 1 + CLIP_HIGH)
            loss -= min(ratio * advantages[b], held * advantages[b])
            clipped += held * advantages[b] < ratio * advantages[b]
            gap = reference_logprobs[b][t] - logprobs[b][t]
            kl += math.exp(gap) - gap - 1
            tokens += 1
    return loss + kl_coefficient * kl, kl, clipped, tokens


def make_inputs():
    draw = random.Random(3)

    def table(scale):
        return [[-1 + scale * draw.gauss(0, 1) for _ in range(T)] for _ in range(B)]

    mask = [[float(draw.random() < 0.6) for _ in range(T)] for _ in range(B)]
    return table(0.5), table(0.5), [draw.gauss(0, 1) for _ in range(B)], mask, table(0.5)


def as_tensors(rows):
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def test_the_loss_is_the_formula_of_its_docstring():
    inputs = make_inputs()
    logprobs, old, advantages, mask, ref = as_tensors(inputs)
    parts = grpo_loss(
        logprobs,
        old,
        advantages,
        mask,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        reference_logprobs_BT=ref,
        kl_coefficient=KL,
    )
    loss, kl, clipped, tokens = reference(*inputs, KL)
    # Sums of some twenty terms of order one: float64 rounding stays far below this.
    assert float(parts.loss) == pytest.approx(loss, abs=1e-12)
    assert float(parts.kl) == pytest.approx(kl, abs=1e-12)
    assert int(parts.clipped) == clipped > 0
    assert int(parts.tokens) == tokens


def test_the_gradient_is_the_derivative_of_the_loss():
    logprobs, old, advantages, mask, ref = as_tensors(make_inputs())
    logprobs.requires_grad_()

    def loss(values):
        return grpo_loss(
            values,
            old,
            advantages,
            mask,
            clip_low=CLIP_LOW,
            clip_high=CLIP_HIGH,
            reference_logprobs_BT=ref,
            kl_coefficient=KL,
        ).loss

    assert torch.autograd.gradcheck(loss, (logprobs,))


def test_what_lies_outside_the_mask_has_no_influence_not_even_nan():
    logprobs, old, advantages, mask, ref = as_tensors(make_inputs())
    outside = mask == 0
    results = []
    for filler in (0.0, float("nan"), 1e9):
        values = logprobs.masked_fill(outside, filler).requires_grad_()
        parts = grpo_loss(
            values,
            old.masked_fill(outside, -filler),
            advantages,
            mask,
            clip_low=CLIP_LOW,
            clip_high=CLIP_HIGH,
            reference_logprobs_BT=ref,
            kl_coefficient=KL,
        )
        parts.loss.backward()
        assert torch.equal(values.grad[outside], torch.zeros_like(values.grad[outside]))
        results.append((parts.loss.item(), values.grad.tolist()))
    assert results[0] == results[1] == results[2]


def test_on_policy_the_gradient_is_the_plain_policy_gradient():
    logprobs, _, advantages, mask, _ = as_tensors(make_inputs())
    values = logprobs.clone().requires_grad_()
    grpo_loss(values, logprobs, advantages, mask, clip_low=0.2, clip_high=0.2).loss.backward()
    assert torch.allclose(values.grad, -advantages[:, None] * mask, atol=1e-15, rtol=0)


def test_a_split_steps_loss_is_the_objective_of_the_batch():
    _, old, advantages, mask, ref = as_tensors(make_inputs())
    generator = torch.Generator().manual_seed(4)
    targets = torch.randint(0, 6, (B, T), generator=generator)
    logits = torch.randn(B, T, 6, generator=generator, dtype=torch.float64)
    batch = Batch(
        tokens_BT=targets,
        targets_BT=targets,
        old_logprobs_BT=old,
        advantages_B=advantages,
        loss_mask_BT=mask,
        reference_logprobs_BT=ref,
    )
    config = LossConfig(clip_low=CLIP_LOW, clip_high=CLIP_HIGH, kl_coefficient=KL)
    loss, metrics = PolicyLoss(config, of=LogitsOf(temperature=0.7))(logits, batch.tensors())
    parts = grpo_loss(
        token_logprobs(logits=logits, targets=targets, temperature=0.7).logprob,
        old,
        advantages,
        mask,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        reference_logprobs_BT=ref,
        kl_coefficient=KL,
    )
    assert torch.equal(loss, parts.loss)
    positions = targets.numel()
    assert metrics == {"kl": parts.kl, "clip_fraction": parts.clipped, "positions": positions}
    # What the step divides by is what the sums go over.
    assert valid_counts(batch.tensors()).tolist() == [B, int(parts.tokens)]


def test_a_kl_coefficient_without_a_reference_is_an_error():
    logprobs, old, advantages, mask, _ = as_tensors(make_inputs())
    with pytest.raises(ValueError, match=r"kl_coefficient is 0.1 and there are no reference"):
        grpo_loss(logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.2, kl_coefficient=0.1)
