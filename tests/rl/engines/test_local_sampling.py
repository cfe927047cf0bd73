"""Tokens out of logits, and the random numbers that choose them."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_idempotent.rl.engines.transformers import batch
from megatron_idempotent.rl.engines.transformers.batch import fold_seed, keyed_uniforms


def test_keyed_uniforms_are_uniform_and_differ_in_both_keys():
    seeds, places = torch.arange(200).repeat_interleave(80), torch.arange(80).repeat(200)
    uniforms = keyed_uniforms(seeds_B=seeds, places_B=places)
    assert uniforms.dtype == torch.float64
    assert 0 <= uniforms.min() <= uniforms.max() < 1
    assert len(uniforms.unique()) == len(uniforms)
    # Standard error of a mean of 16,000: 1 / sqrt(12 x 16000) = 0.0023; five of them.
    assert float(uniforms.mean()) == pytest.approx(0.5, abs=0.012)
    by_seed = uniforms.view(200, 80)
    for shifted in (by_seed[1:, :], by_seed[:, 1:]):
        base = by_seed[: len(shifted), : shifted.shape[1]]
        # Correlation of some 16,000 pairs: standard error 0.008; five of them.
        assert abs(float(torch.corrcoef(torch.stack([base.ravel(), shifted.ravel()]))[0, 1])) < 0.04


def test_keyed_uniforms_stay_what_they_are():
    """Samples of a run that is resumed on another release are the same."""
    found = keyed_uniforms(
        seeds_B=torch.tensor([0, 1, -1, 2**62]), places_B=torch.tensor([0, 1, 2, 3])
    )
    assert found.tolist() == [
        0.3188110691860069,
        0.7263894147021426,
        0.9126028800247624,
        0.65209533825089,
    ]


def test_any_integer_is_a_seed():
    for seed in (0, -1, 2**63 - 1, 2**63, 2**64 + 5, -(2**70)):
        assert (fold_seed(seed) - seed) % 2**64 == 0
        torch.tensor([fold_seed(seed)], dtype=torch.int64)


def draw(logits, temperatures=None, seeds=None):
    rows = len(logits)
    return batch.draw(
        logits,
        temperatures_B=torch.ones(rows) if temperatures is None else temperatures,
        seeds_B=torch.arange(rows) if seeds is None else seeds,
        places_B=torch.zeros(rows, dtype=torch.int64),
    )


def test_tokens_come_as_often_as_they_are_likely():
    logits = torch.tensor([0.0, 1.0, -1.0, -math.inf, 2.0])
    tokens, logprobs = draw(logits.expand(20_000, -1))
    likely = torch.softmax(logits.double(), -1)
    found = torch.bincount(tokens, minlength=5) / 20_000
    # Five standard errors of each share.
    assert bool(((found - likely).abs() <= 5 * (likely * (1 - likely) / 20_000).sqrt()).all())
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[tokens], rtol=0, atol=0)


def test_each_row_has_its_own_temperature():
    logits = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    temperatures = torch.linspace(0.1, 3, 64)
    tokens, logprobs = draw(logits, temperatures)
    expected = torch.log_softmax(logits / temperatures[:, None], -1).gather(1, tokens[:, None])
    torch.testing.assert_close(logprobs, expected[:, 0], rtol=0, atol=0)
    assert torch.equal(tokens[0], logits[0].argmax())  # cold


def test_a_large_batch_is_drawn_in_pieces_all_the_same(monkeypatch):
    logits = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    whole = draw(logits)
    monkeypatch.setattr(batch, "_CHUNK", 48)
    for found, expected in zip(draw(logits), whole, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_have_no_logprob(bad):
    logits = torch.zeros(3, 8)
    logits[1, 5] = bad
    logprobs = draw(logits)[1]
    assert logprobs.isnan().tolist() == [False, True, False]


def test_the_last_uniform_stays_in_the_vocabulary(monkeypatch):
    almost = torch.full((1,), 1 - 2.0**-53, dtype=torch.float64)
    monkeypatch.setattr(batch, "keyed_uniforms", lambda **_: almost)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        tokens, logprobs = draw(torch.randn(1, 50, generator=generator))
        assert int(tokens) < 50
        assert bool(logprobs.isfinite().all())
