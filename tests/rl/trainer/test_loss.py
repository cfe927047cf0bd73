"""The GRPO objective and the correction for older weights, against their formulas, in float64."""

import dataclasses
import math
import random

import pytest

torch = pytest.importorskip("torch")

from megatron_idempotent import token_logprobs  # noqa: E402 - after the skip
from megatron_idempotent.rl.trainer.batch import Batch  # noqa: E402
from megatron_idempotent.rl.trainer.config import LossConfig  # noqa: E402
from megatron_idempotent.rl.trainer.loss import (  # noqa: E402
    LogitsOf,
    PolicyLoss,
    grpo_loss,
    importance_correction,
    with_logprobs,
)
from megatron_idempotent.step.microbatches import valid_counts  # noqa: E402

B, T = 6, 9
BOUNDS = {"low": 0.8, "high": 1.2}
CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def correcting(mode, level, low=0.8, high=1.2):
    """Return the settings of a correction."""
    bounds = {"correction_low": low, "correction_high": high}
    options = {"correction": mode, "correction_level": level, **bounds}
    return LossConfig(old_logprobs="recomputed", **options)


modes = pytest.mark.parametrize("mode", ["none", "truncate", "mask"])
levels = pytest.mark.parametrize("level", ["token", "sequence"])


def make_inputs(seed=1):
    """Proximal and behaviour log-probs and a mask, as lists; the last sequence has no response."""
    draw = random.Random(seed)
    behaviour = [[-draw.expovariate(1.0) for _ in range(T)] for _ in range(B)]
    proximal = [[value + draw.gauss(0, 0.4) for value in row] for row in behaviour]
    mask = [[float(draw.random() < 0.6) for _ in range(T)] for _ in range(B - 1)] + [[0.0] * T]
    return proximal, behaviour, mask


def doubles(*tables):
    return [torch.tensor(table, dtype=torch.float64) for table in tables]


def expected(proximal, behaviour, mask, *, mode, low, high, level):
    """Weights, mask and metrics, token by token."""
    weights = [[0.0] * T for _ in range(B)]
    kept = [[0.0] * T for _ in range(B)]
    sums = dict.fromkeys(("tokens", "ratio", "kl", "rejected", "truncated", "not_finite"), 0.0)
    largest = 0.0
    for b in range(B):
        gaps = {t: proximal[b][t] - behaviour[b][t] for t in range(T) if mask[b][t]}
        for t, gap in gaps.items():
            own = math.exp(gap)
            ratio = math.exp(sum(gaps.values()) / len(gaps)) if level == "sequence" else own
            rejected = mode == "mask" and not low <= ratio <= high
            weight = 1.0 if mode == "none" else min(ratio, high) if mode == "truncate" else ratio
            weights[b][t] = 0.0 if rejected else weight
            kept[b][t] = 0.0 if rejected else 1.0
            sums["tokens"] += 1
            sums["ratio"] += own
            sums["kl"] += own - 1 - gap
            sums["rejected"] += rejected
            sums["truncated"] += mode == "truncate" and ratio > high
            largest = max(largest, own)
    return weights, kept, {**sums, "largest_ratio": largest}


@levels
@modes
def test_weights_mask_and_metrics_are_their_formulas(mode, level):
    some = dict.fromkeys(("rejected", "truncated"), 0.0)
    for seed in range(8):
        inputs = make_inputs(seed)
        found = importance_correction(*doubles(*inputs), correcting(mode, level))
        weights, mask, metrics = expected(*inputs, mode=mode, level=level, **BOUNDS)
        assert found.metrics == pytest.approx(metrics, abs=1e-12)
        assert torch.allclose(found.weights_BT, *doubles(weights), atol=1e-14, rtol=0)
        assert torch.equal(found.loss_mask_BT, *doubles(mask))
        some = {name: some[name] + metrics[name] for name in some}
    assert (some["rejected"] > 0) == (mode == "mask")
    assert (some["truncated"] > 0) == (mode == "truncate")


def test_the_bounds_themselves_are_kept():
    logs = [[math.log(0.5), math.log(2.0), math.log(0.5) - 1e-9, math.log(2.0) + 1e-9]]
    given = doubles(logs, [[0.0] * 4], [[1.0] * 4])
    found = importance_correction(*given, correcting("mask", "token", low=0.5, high=2.0))
    assert found.loss_mask_BT.tolist() == [[1.0, 1.0, 0.0, 0.0]]


@levels
@modes
def test_padding_has_no_influence_on_a_correction_not_even_nan(mode, level):
    proximal, behaviour, mask = doubles(*make_inputs())
    outside, config = mask == 0, correcting(mode, level)
    first, *others = [
        importance_correction(
            proximal.masked_fill(outside, one),
            behaviour.masked_fill(outside, other),
            mask,
            config,
        )
        for one, other in ((0.0, 0.0), (math.nan, 1.0), (-math.inf, -math.inf), (1e300, -1e300))
    ]
    for each in others:
        assert torch.equal(each.weights_BT, first.weights_BT)
        assert torch.equal(each.loss_mask_BT, first.loss_mask_BT)
        assert each.metrics == first.metrics


@modes
@pytest.mark.parametrize(
    ("proximal", "behaviour"),
    [(math.nan, -1.0), (-1.0, math.nan), (-math.inf, -1.0), (-1.0, -math.inf)],
)
def test_a_ratio_that_is_no_number_is_rejected_and_counted(mode, proximal, behaviour):
    given = doubles(
        [[proximal, -2.0], [-1.0, -1.0]], [[behaviour, -2.0], [-1.0, -1.0]], [[1.0, 1.0]] * 2
    )
    for level, rejected in (("token", [0.0, 1.0]), ("sequence", [0.0, 0.0])):
        found = importance_correction(*given, correcting(mode, level, low=0.0, high=1e6))
        assert found.loss_mask_BT.tolist() == [rejected, [1.0, 1.0]]
        assert found.weights_BT.tolist() == [rejected, [1.0, 1.0]]
        assert found.metrics["not_finite"] == 1
        assert found.metrics["rejected"] == rejected.count(0.0)
        assert all(math.isfinite(value) for value in found.metrics.values())


@modes
def test_a_ratio_too_large_for_floats_stays_a_number(mode):
    inputs = [torch.tensor([[value]]) for value in (-0.5, -1e30, 1.0)]
    found = importance_correction(*inputs, correcting(mode, "token"))
    assert found.weights_BT.dtype == torch.float32
    assert found.weights_BT.item() == pytest.approx({"none": 1, "truncate": 1.2, "mask": 0}[mode])
    assert math.isfinite(torch.tensor(found.metrics["largest_ratio"]).float())


def test_a_batch_without_sequences_has_nothing_to_correct():
    empty = torch.zeros(0, 4)
    found = importance_correction(empty, empty, empty, correcting("mask", "sequence"))
    assert found.weights_BT.shape == (0, 4)
    assert set(found.metrics.values()) == {0.0}


def make_step(seed=5):
    """Current, proximal and behaviour log-probs, advantages and a mask, as lists.

    Behaviour is far from proximal, the current policy close to it.
    """
    proximal, behaviour, mask = make_inputs(seed)
    draw = random.Random(seed)
    logprobs = [[value + draw.gauss(0, 0.3) for value in row] for row in proximal]
    return logprobs, proximal, behaviour, [draw.gauss(0, 1) for _ in range(B)], mask


def objective(logprobs, proximal, reference, weights, advantages, mask, kl_coefficient):
    """Loss, KL penalty, clipped tokens and the loss's gradient, token by token."""
    loss = penalty = clipped = 0.0
    gradient = [[0.0] * T for _ in range(B)]
    for b, t in ((b, t) for b in range(B) for t in range(T) if mask[b][t]):
        ratio, gap = (math.exp(logprobs[b][t] - proximal[b][t]), reference[b][t] - logprobs[b][t])
        free, held = ratio * advantages[b], min(max(ratio, 0.8), 1.3) * advantages[b]
        loss -= weights[b][t] * min(free, held)
        penalty += math.exp(gap) - gap - 1
        clipped += held < free
        gradient[b][t] = kl_coefficient * (1 - math.exp(gap))
        if free <= held:  # else clipped, and constant
            gradient[b][t] -= weights[b][t] * free
    return loss + kl_coefficient * penalty, penalty, clipped, gradient


@levels
@modes
@pytest.mark.parametrize("kl_coefficient", [0.05, 0.0])
def test_decoupled_ppo_with_a_penalty_and_its_gradient_are_the_formula(mode, level, kl_coefficient):
    logprobs, proximal, behaviour, advantages, mask = make_step()
    found = importance_correction(*doubles(proximal, behaviour, mask), correcting(mode, level))
    weights, kept, _ = expected(proximal, behaviour, mask, mode=mode, level=level, **BOUNDS)
    current, old, reference, gains = doubles(logprobs, proximal, behaviour, advantages)
    total, metrics = grpo_loss(
        current.requires_grad_(),
        old,
        gains,
        found.loss_mask_BT,
        LossConfig(**CLIP, kl_coefficient=kl_coefficient),
        reference_logprobs_BT=reference,
        weights_BT=found.weights_BT.requires_grad_(),
    )
    total.backward()
    loss, kl, clipped, gradient = objective(
        logprobs, proximal, behaviour, weights, advantages, kept, kl_coefficient
    )
    # Sums of some thirty terms of order one: float64 rounding stays far below this.
    assert total.item() == pytest.approx(loss, abs=1e-12)
    assert metrics["kl"].item() == pytest.approx(kl, abs=1e-12)
    assert int(metrics["clip_fraction"]) == clipped > 0
    assert torch.allclose(current.grad, *doubles(gradient), atol=1e-13, rtol=0)
    assert found.weights_BT.grad is None


def test_what_lies_outside_the_mask_has_no_influence_on_a_loss_not_even_nan():
    current, old, reference, gains, mask = doubles(*make_step())
    outside, results = mask == 0, []
    for filler in (0.0, math.nan, math.inf, 1e9):
        values = current.masked_fill(outside, filler).requires_grad_()
        others = [each.masked_fill(outside, -filler) for each in (old, reference, old.exp())]
        options = {"reference_logprobs_BT": others[1], "weights_BT": others[2]}
        config = LossConfig(**CLIP, kl_coefficient=0.1)
        loss, _ = grpo_loss(values, others[0], gains, mask, config, **options)
        loss.backward()
        assert torch.equal(values.grad[outside], torch.zeros_like(values.grad[outside]))
        results.append((loss.item(), values.grad.tolist()))
    assert results[0] == results[1] == results[2] == results[3]


def test_without_weights_it_is_the_same_to_the_bit_as_with_weights_of_one():
    found = []
    for weights_BT in (None, torch.ones(B, T)):
        current, old, _, gains, mask = (each.float() for each in doubles(*make_step()))
        inputs = current.requires_grad_(), old, gains, mask
        config = LossConfig(**CLIP, kl_coefficient=0)
        loss, _ = grpo_loss(*inputs, config, weights_BT=weights_BT)
        loss.backward()
        found.append((loss.item(), current.grad.tolist()))
    assert found[0] == found[1]


def test_a_kl_coefficient_without_a_reference_is_an_error():
    current, old, _, gains, mask = doubles(*make_step())
    with pytest.raises(ValueError, match=r"kl_coefficient is 0.1 and there are no reference"):
        grpo_loss(current, old, gains, mask, LossConfig(**CLIP, kl_coefficient=0.1))


def make_batch(seed=5):
    """A batch with a reference, and the proximal log-probs of its rows."""
    _, proximal, behaviour, advantages, mask = doubles(*make_step(seed))
    targets_BT = torch.randint(0, 6, (B, T), generator=torch.Generator().manual_seed(seed))
    batch = Batch(
        tokens_BT=targets_BT,
        targets_BT=targets_BT,
        old_logprobs_BT=behaviour,
        advantages_B=advantages,
        loss_mask_BT=mask,
        reference_logprobs_BT=proximal,
    )
    return batch, proximal


def config_of(correction):
    return LossConfig(
        old_logprobs="recomputed",
        correction=correction,
        correction_low=0.7,
        correction_high=1.6,
        kl_coefficient=0.05,
    )


@pytest.mark.parametrize("correction", [None, "truncate"])
def test_a_steps_loss_is_the_objective_of_the_batch(correction):
    batch, proximal = make_batch()
    config = LossConfig(kl_coefficient=0.05) if correction is None else config_of(correction)
    batch, _ = with_logprobs(batch, {"policy": proximal, "reference": proximal}, config)
    logits = torch.randn(B, T, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own = token_logprobs(logits=logits, targets=batch.targets_BT, temperature=0.7).logprob
    loss, metrics = PolicyLoss(config, of=LogitsOf(temperature=0.7))(logits, batch.tensors())
    expected_loss, sums = grpo_loss(
        own,
        proximal if correction else batch.old_logprobs_BT,
        batch.advantages_B,
        batch.loss_mask_BT,
        config,
        reference_logprobs_BT=proximal,
        weights_BT=batch.weights_BT,
    )
    assert torch.equal(loss, expected_loss)
    assert metrics == {**sums, "positions": batch.targets_BT.numel()}
    # What the step divides by is what the sums go over.
    assert valid_counts(batch.tensors())[1] == (batch.loss_mask_BT > 0).sum()


def test_rejected_tokens_leave_the_denominator_and_weights_travel_with_their_sequences():
    batch, proximal = make_batch()
    new, metrics = with_logprobs(batch, {"policy": proximal}, config_of("mask"))
    tokens = valid_counts(batch.tensors())[1] - valid_counts(new.tensors())[1]
    assert tokens == metrics["rejected"] > 0
    assert torch.equal(new.old_logprobs_BT, proximal)
    assert torch.equal(new.weights_BT > 0, new.loss_mask_BT > 0)
    index = torch.tensor([3, 0])
    assert torch.equal(new.rows(index).tensors()["weights"], new.weights_BT[index])
    assert batch.rows(index).weights_BT is None
    assert "weights" not in batch.tensors()


@modes
def test_a_loss_that_needs_recomputed_logprobs_says_so(mode):
    loss = PolicyLoss(config_of(mode), of=LogitsOf(temperature=1.0))
    with pytest.raises(ValueError, match=f"correction is '{mode}', and the batch has no"):
        loss(torch.zeros(B, T, 6), make_batch()[0].tensors())


def test_a_batch_without_lengths_is_not_packed():
    batch, _ = make_batch()
    with pytest.raises(ValueError, match=f"{B} sequences without lengths_B cannot be packed"):
        batch.sequences()
    whole = dataclasses.replace(batch, lengths_B=torch.full((B,), 4)).sequences()
    assert {tuple(each.shape) for each in whole.values()} == {(B, T + 1), (B,)}
    assert whole["token_mask"][:, 1:].equal(batch.loss_mask_BT)
    assert whole["response_mask"][:, :-1].equal(batch.loss_mask_BT)
