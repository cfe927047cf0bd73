"""Importance correction and decoupled PPO against their formulas, in plain Python's float64."""

import math
import random

import pytest

torch = pytest.importorskip("torch")

from megatron_idempotent.rl.trainer.batch import Batch  # noqa: E402
from megatron_idempotent.rl.trainer.config import (  # noqa: E402
    Config,
    ConfigError,
    LossConfig,
)
from megatron_idempotent.rl.trainer.loss import (  # noqa: E402
    LogitsOf,
    PolicyLoss,
    corrected,
    grpo_loss,
    importance_correction,
)
from megatron_idempotent.step.microbatches import valid_counts  # noqa: E402 - after the skip

B, T = 6, 9
BOUNDS = {"low": 0.8, "high": 1.2}
MODES, LEVELS = ("none", "truncate", "mask"), ("token", "sequence")


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


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_weights_mask_and_metrics_are_their_formulas(mode, level):
    some = dict.fromkeys(("rejected", "truncated"), 0.0)
    for seed in range(8):
        inputs = make_inputs(seed)
        found = importance_correction(*doubles(*inputs), mode=mode, level=level, **BOUNDS)
        weights, mask, metrics = expected(*inputs, mode=mode, level=level, **BOUNDS)
        assert found.metrics == pytest.approx(metrics, abs=1e-12)
        assert torch.allclose(found.weights_BT, *doubles(weights), atol=1e-14, rtol=0)
        assert torch.equal(found.loss_mask_BT, *doubles(mask))
        some = {name: some[name] + metrics[name] for name in some}
    assert (some["rejected"] > 0) == (mode == "mask")
    assert (some["truncated"] > 0) == (mode == "truncate")


def test_the_bounds_themselves_are_kept():
    logs = [[math.log(0.5), math.log(2.0), math.log(0.5) - 1e-9, math.log(2.0) + 1e-9]]
    proximal, behaviour, mask = doubles(logs, [[0.0] * 4], [[1.0] * 4])
    found = importance_correction(
        proximal, behaviour, mask, mode="mask", low=0.5, high=2.0, level="token"
    )
    assert found.loss_mask_BT.tolist() == [[1.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_padding_has_no_influence_not_even_nan(mode, level):
    proximal, behaviour, mask = doubles(*make_inputs())
    outside = mask == 0
    found = [
        importance_correction(
            proximal.masked_fill(outside, one),
            behaviour.masked_fill(outside, other),
            mask,
            mode=mode,
            level=level,
            **BOUNDS,
        )
        for one, other in ((0.0, 0.0), (math.nan, 1.0), (-math.inf, -math.inf), (1e300, -1e300))
    ]
    for each in found[1:]:
        assert torch.equal(each.weights_BT, found[0].weights_BT)
        assert torch.equal(each.loss_mask_BT, found[0].loss_mask_BT)
        assert each.metrics == found[0].metrics


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("proximal", "behaviour"),
    [(math.nan, -1.0), (-1.0, math.nan), (-math.inf, -1.0), (-1.0, -math.inf)],
)
def test_a_ratio_that_is_no_number_is_rejected_and_counted(mode, proximal, behaviour):
    for level, rejected in (("token", [0.0, 1.0]), ("sequence", [0.0, 0.0])):
        proximal_BT, behaviour_BT, mask_BT = doubles(
            [[proximal, -2.0], [-1.0, -1.0]], [[behaviour, -2.0], [-1.0, -1.0]], [[1.0, 1.0]] * 2
        )
        found = importance_correction(
            proximal_BT, behaviour_BT, mask_BT, mode=mode, level=level, low=0.0, high=1e6
        )
        assert found.loss_mask_BT.tolist() == [rejected, [1.0, 1.0]]
        assert found.weights_BT.tolist() == [rejected, [1.0, 1.0]]
        assert found.metrics["not_finite"] == 1
        assert found.metrics["rejected"] == rejected.count(0.0)
        assert all(math.isfinite(value) for value in found.metrics.values())


@pytest.mark.parametrize("mode", MODES)
def test_a_ratio_too_large_for_floats_stays_a_number(mode):
    inputs = [torch.tensor([[value]]) for value in (-0.5, -1e30, 1.0)]
    found = importance_correction(*inputs, mode=mode, level="token", **BOUNDS)
    assert found.weights_BT.dtype == torch.float32
    assert found.weights_BT.item() == pytest.approx({"none": 1, "truncate": 1.2, "mask": 0}[mode])
    assert math.isfinite(torch.tensor(found.metrics["largest_ratio"]).float())


def test_a_batch_without_sequences_has_nothing_to_correct():
    empty = torch.zeros(0, 4)
    found = importance_correction(empty, empty, empty, mode="mask", level="sequence", **BOUNDS)
    assert found.weights_BT.shape == (0, 4)
    assert set(found.metrics.values()) == {0.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "clip"}, "mode is 'clip'; allowed: none, truncate, mask"),
        ({"level": "word"}, "level is 'word'; allowed: token, sequence"),
        ({"low": 2.0}, "low is 2.0 and high is 1.2; allowed: 0 <= low <= high"),
        ({"high": math.nan}, "high is nan; allowed"),
    ],
)
def test_arguments_that_mean_nothing_are_errors(change, message):
    options = {"mode": "mask", "level": "token", **BOUNDS, **change}
    with pytest.raises(ValueError, match=message):
        importance_correction(*doubles(*make_inputs()), **options)


def decoupled(logprobs, proximal, weights, advantages, mask, *, low, high):
    """Loss and its gradient, token by token."""
    loss, gradient = 0.0, [[0.0] * T for _ in range(B)]
    for b in range(B):
        for t in range(T):
            if not mask[b][t]:
                continue
            ratio = math.exp(logprobs[b][t] - proximal[b][t])
            free, held = ratio * advantages[b], min(max(ratio, 1 - low), 1 + high) * advantages[b]
            loss -= weights[b][t] * min(free, held)
            if free <= held:  # else clipped, and constant
                gradient[b][t] = -weights[b][t] * free
    return loss, gradient


def make_step(mode, level, seed=5):
    """Proximal, behaviour and current log-probs, mask, advantages; and what they are corrected to.

    Behaviour is far from proximal, the current policy close to it.
    """
    proximal, behaviour, mask = make_inputs(seed)
    draw = random.Random(seed)
    logprobs = [[value + draw.gauss(0, 0.3) for value in row] for row in proximal]
    advantages = [draw.gauss(0, 1) for _ in range(B)]
    weights, kept, _ = expected(proximal, behaviour, mask, mode=mode, level=level, **BOUNDS)
    return proximal, behaviour, logprobs, mask, advantages, weights, kept


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_decoupled_ppo_and_its_gradient_are_the_formula(mode, level):
    proximal, behaviour, logprobs, mask, advantages, weights, kept = make_step(mode, level)
    found = importance_correction(
        *doubles(proximal, behaviour, mask), mode=mode, level=level, **BOUNDS
    )
    current, old, gains = doubles(logprobs, proximal, advantages)
    current.requires_grad_()
    parts = grpo_loss(
        current,
        old,
        gains,
        found.loss_mask_BT,
        clip_low=0.2,
        clip_high=0.3,
        weights_BT=found.weights_BT.requires_grad_(),
    )
    parts.loss.backward()
    loss, gradient = decoupled(logprobs, proximal, weights, advantages, kept, low=0.2, high=0.3)
    assert parts.loss.item() == pytest.approx(loss, abs=1e-12)
    assert torch.allclose(current.grad, *doubles(gradient), atol=1e-13, rtol=0)
    assert found.weights_BT.grad is None
    assert parts.tokens == sum(map(sum, kept))


def test_padding_of_weights_has_no_influence_not_even_nan():
    proximal, _, logprobs, _, advantages, weights, kept = make_step("mask", "token")
    tensors = doubles(logprobs, proximal, advantages, kept)
    (weights_BT,) = doubles(weights)
    clip = {"clip_low": 0.2, "clip_high": 0.3}
    found = []
    for filler in (0.0, math.nan, math.inf):
        current = tensors[0].clone().requires_grad_()
        filled_BT = weights_BT.masked_fill(tensors[3] == 0, filler)
        loss = grpo_loss(current, *tensors[1:], **clip, weights_BT=filled_BT).loss
        loss.backward()
        found.append((loss.item(), current.grad.tolist()))
    assert found[0] == found[1] == found[2]


def test_weights_of_one_change_no_bit():
    proximal, _, logprobs, mask, advantages, _, _ = make_step("none", "token")
    found = []
    for weights_BT in (None, torch.ones(B, T)):
        tensors = [each.float() for each in doubles(logprobs, proximal, advantages, mask)]
        tensors[0].requires_grad_()
        loss = grpo_loss(*tensors, clip_low=0.2, clip_high=0.3, weights_BT=weights_BT).loss
        loss.backward()
        found.append((loss.item(), tensors[0].grad.tolist()))
    assert found[0] == found[1]


def test_the_kl_penalty_is_not_weighted():
    proximal, behaviour, logprobs, mask, advantages, _, _ = make_step("none", "token")
    current, old, reference, gains, mask_BT = doubles(
        logprobs, proximal, behaviour, advantages, mask
    )
    clip = {"clip_low": 0.2, "clip_high": 0.3}
    zeros = torch.zeros_like(old)
    with_kl = {"reference_logprobs_BT": reference, "kl_coefficient": 0.5}
    parts = grpo_loss(current, old, gains, mask_BT, **clip, **with_kl, weights_BT=zeros)
    assert parts.loss.item() == pytest.approx(0.5 * parts.kl.item()) != 0


def make_batch(seed=5):
    proximal, behaviour, mask = doubles(*make_inputs(seed))
    generator = torch.Generator().manual_seed(seed)
    targets_BT = torch.randint(0, 6, (B, T), generator=generator)
    batch = Batch(
        tokens_BT=targets_BT,
        targets_BT=targets_BT,
        old_logprobs_BT=behaviour,
        advantages_B=torch.randn(B, generator=generator, dtype=torch.float64),
        loss_mask_BT=mask,
    )
    return batch, proximal


SETTINGS = {
    "old_logprobs": "recomputed",
    "kl_coefficient": 0.0,
    "correction_low": 0.7,
    "correction_high": 1.6,
}


def test_rejected_tokens_leave_the_denominator_of_the_step():
    batch, proximal = make_batch()
    config = LossConfig(**SETTINGS, correction="mask")
    new, metrics = corrected(batch, proximal, config)
    tokens = valid_counts(batch.tensors())[1] - valid_counts(new.tensors())[1]
    assert tokens == metrics["rejected"] > 0
    assert torch.equal(new.old_logprobs_BT, proximal)
    assert torch.equal(new.weights_BT > 0, new.loss_mask_BT > 0)


def test_weights_travel_with_their_sequences():
    batch, proximal = make_batch()
    new, _ = corrected(batch, proximal, LossConfig(**SETTINGS, correction="truncate"))
    index = torch.tensor([3, 0])
    assert torch.equal(new.rows(index).weights_BT, new.weights_BT[index])
    assert torch.equal(new.rows(index).tensors()["weights"], new.weights_BT[index])
    assert batch.rows(index).weights_BT is None
    assert "weights" not in batch.tensors()


def test_a_split_steps_loss_is_weighted():
    batch, proximal = make_batch()
    config = LossConfig(**SETTINGS, correction="truncate")
    new, _ = corrected(batch, proximal, config)
    logits = torch.randn(B, T, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logprobs_BT = logits.log_softmax(-1).gather(-1, batch.targets_BT[..., None])[..., 0]
    loss, _ = PolicyLoss(config, of=LogitsOf(temperature=1.0))(logits.clone(), new.tensors())
    clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    parts = grpo_loss(
        logprobs_BT,
        proximal,
        batch.advantages_B,
        batch.loss_mask_BT,
        **clip,
        weights_BT=new.weights_BT,
    )
    assert loss.item() == pytest.approx(parts.loss.item(), abs=1e-12)


def test_a_loss_that_needs_recomputed_logprobs_says_so():
    assert not PolicyLoss(LossConfig(), of=LogitsOf(temperature=1.0)).needs_recomputed_logprobs
    for correction in MODES:
        loss = PolicyLoss(
            LossConfig(**SETTINGS, correction=correction), of=LogitsOf(temperature=1.0)
        )
        assert loss.needs_recomputed_logprobs
        batch, _ = make_batch()
        with pytest.raises(ValueError, match=f"correction is '{correction}', and the batch has no"):
            loss(torch.zeros(B, T, 6), batch.tensors())


def test_a_correction_of_the_engines_own_logprobs_is_no_setting():
    message = "loss.correction is 'mask' and loss.old_logprobs is 'behaviour'; allowed"
    with pytest.raises(ConfigError, match=message):
        Config(loss=LossConfig(correction="mask"))
    with pytest.raises(ConfigError, match=r"correction_low is 1\.5; allowed: 0 to 1"):
        LossConfig(correction_low=1.5)
    with pytest.raises(ConfigError, match="correction_level is 'word'"):
        LossConfig(correction_level="word")
