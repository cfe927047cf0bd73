"""fp16: sums over a step stay in the range of a mean, and a skipped step gives the true reason."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import on_ranks
from scenario import ROWS, Bench, TokenLoss, build, cut, data, one_shot

# Rows of each replica, of 31 tokens that count: 992.
REPLICA_ROWS = 32
# A norm of fp16 gradients against one of others: each has 11 bits, and the norm is of thousands.
TOLERANCE = 2.0**-10


def _options(scale: float | None, **overrides: Any) -> dict[str, Any]:
    return {
        "dtype": "fp16",
        "loss_scale": scale,
        "config_overrides": {"calculate_per_token_loss": False},
        **overrides,
    }


def _split_norm(batch: Any, pieces: list[int], last: bool, **options: Any) -> Any:
    pieces = list(cut(batch, pieces))
    return Bench(**options).run(pieces, last=last, global_batch_size=2 * REPLICA_ROWS)


@on_ranks(2)
def test_sums_do_not_overflow_where_means_do_not() -> None:
    """The norm of steps in pieces against that of a plain step with a mean loss."""
    for scale, pieces, last in ((4096.0, [16], False), (2.0**14, [4, 12], True)):
        model, scheduler, replica = build(**_options(scale))
        batch = data(1, REPLICA_ROWS, replica, full=True)
        want = float(one_shot(model, scheduler, TokenLoss(), batch))
        result = _split_norm(batch, pieces, last, **_options(scale))
        assert result.updated, result.skipped
        assert result.grad_norm == pytest.approx(want, rel=TOLERANCE)


@pytest.mark.parametrize("layout", [{}, {"experts": 4, "ep": 2}], ids=["dense", "ep2"])
@on_ranks(2)
def test_ranks_agree_on_what_they_divide_by(layout: dict[str, Any]) -> None:
    """Replicas with rows of 32 and of 8 tokens, and one without any, against
    float32."""
    _, _, replica = build(**layout)
    number = 4
    batch = data(1, number * ROWS, replica, full=True)
    if replica == 1:
        batch = {name: value[:, :8] if value.dim() > 1 else value for name, value in batch.items()}
    # So much that sums would overflow that are divided by what the shorter rows have.
    scale = 2.0**14
    for pieces in ([number], [number] if replica else []):
        norms = []
        for dtype, given, last in (
            ("fp16", scale, False),
            ("fp16", scale, True),
            ("fp32", None, True),
        ):
            options = {**_options(given), **layout, "dtype": dtype}
            result = _split_norm(batch, pieces, last, **options)
            assert result.updated, result.skipped
            norms.append(result.grad_norm)
        assert norms[:2] == pytest.approx(norms[2:] * 2, rel=2.0**-7), norms


@on_ranks(1)
def test_auxiliary_losses_with_a_scale_of_their_own_are_divided_too() -> None:
    """A config's own scale of the MoE losses, under losses divided by 2^6 and by
    2^9."""
    norms = []
    for size in (8, 64):
        options = _options(64.0, experts=4)
        options["config_overrides"] = {**options["config_overrides"], "moe_aux_loss_coeff": 1.0}
        bench = Bench(**options)
        bench.model.config.moe_grad_scale_func = lambda: 2.0**14
        norms.append(bench.run([bench.batch(2, full=True)], global_batch_size=size).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=2.0**-7), norms


@on_ranks(1)
def test_a_skipped_step_says_what_became_of_the_scale() -> None:
    from megatron.core.optimizer import OptimizerConfig

    batch = data(1, 4, 0, full=True)
    dynamic = {"initial_loss_scale": 2.0**40, "min_loss_scale": 1.0, "hysteresis": 1}
    told = {}
    for name, scale, rates in (
        ("fixed", 2.0**40, {}),
        ("lowered", None, dynamic),
        ("hysteresis", None, {**dynamic, "hysteresis": 2}),
        ("least", None, {**dynamic, "min_loss_scale": 2.0**40}),
        ("threshold", 1.0, {"grad_norm_skip_threshold": 1e-6}),
    ):
        if name == "threshold" and not hasattr(OptimizerConfig, "grad_norm_skip_threshold"):
            continue  # before 0.18
        result = _split_norm(batch, [2], False, **_options(scale, optimizer_overrides=rates))
        told[name] = str(result.skipped)
    assert "fixed loss scale of 1.09951e+12" in told["fixed"]
    assert "is 5.49756e+11 now, not 1.09951e+12" in told["lowered"]
    assert "stays at 1.09951e+12, as its hysteresis says" in told["hysteresis"]
    assert "is the least that is allowed" in told["least"]
    if "threshold" in told:
        assert "above grad_norm_skip_threshold" in told["threshold"]
