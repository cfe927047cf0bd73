"""Divisors of gradients: losses of tokens and of sequences, and the auxiliary ones.

Two ranks, and microbatches, rows and positions by powers of two, so that every division is exact
and equal means equal to the bit.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

MOE = {"moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 0.5}


def _split_gradient(kind: str, per_token: bool, options: dict[str, Any], full: bool) -> Any:
    from scenario import Bench, SequenceLoss, TokenLoss, cut

    overrides = {**options.get("config_overrides", {}), "calculate_per_token_loss": per_token}
    loss = {"token": TokenLoss, "sequence": SequenceLoss}[kind]()
    bench = Bench(loss=loss, **{**options, "config_overrides": overrides})
    bench.optimizer.step = lambda: (True, None, None)  # the gradients are what is asked for
    bench.run(list(cut(bench.batch(4, full=full), [1, 3])))
    return bench.model.gradients()


def _plain_gradient(options: dict[str, Any]) -> Any:
    """One schedule call with a mean loss, which Megatron averages over microbatches and ranks."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from scenario import ROWS, SequenceLoss, T, build, cut, data, forward

    overrides = {**options.get("config_overrides", {}), "calculate_per_token_loss": False}
    model, _, replica = build(**{**options, "config_overrides": overrides})

    def forward_step(data_iterator, chunk):
        microbatch = next(data_iterator)

        def loss_func(output):
            return SequenceLoss()(output, microbatch)[0] / ROWS, {}

        return forward(chunk, microbatch), loss_func

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=cut(data(1, 4 * ROWS, replica, full=True), [1] * 4),
        model=model.chunks,
        num_microbatches=4,
        seq_length=T,
        micro_batch_size=ROWS,
        forward_only=False,
    )
    return model.gradients()


def compared(what: str, options: dict[str, Any]) -> bool:
    """Runs on a rank: whether two ways to the same gradient give the same bits."""
    import torch

    if what == "plain":
        want = _plain_gradient(options)
        return all(
            torch.equal(_split_gradient("sequence", per_token, options, full=True), want)
            for per_token in (False, True)
        )
    summed = _split_gradient(what, True, options, full=False)
    assert summed.abs().max() > 0
    shift = 0
    if options.get("dtype") == "fp16":
        # Where DDP averages, a step divides its losses by a power of two not below what the sum of
        # a replica is over, here 4 sequences of 32 tokens, and multiplies with it at the end. So a
        # scale that is larger by as much gives the same bits on the way.
        shift = {"token": 7, "sequence": 2}[what]
        options = {**options, "loss_scale": options["loss_scale"] * 2**shift}
    averaged = _split_gradient(what, False, options, full=False)
    return torch.equal(summed, averaged * 2.0**-shift)


LAYOUTS = {
    "dense": {},
    "all-reduce": {"distributed_optimizer": False, "overlap_grad_reduce": False},
    "pp2": {"pp": 2},
    "experts": {"experts": 4, "config_overrides": MOE},
    "fp16 experts": {
        "experts": 4,
        "config_overrides": MOE,
        "dtype": "fp16",
        "loss_scale": 64.0,
    },
    # Not fp16, whose small gradients round by where the division is made.
    "scaled experts": {
        "experts": 4,
        "config_overrides": MOE,
        "dtype": "bf16",
        "loss_scale": 64.0,
    },
}


#: Those whose losses and auxiliary losses are divided in a way of their own, and each layout once.
ALWAYS = [
    ("dense", "token"),
    ("experts", "token"),
    ("experts", "sequence"),
    ("fp16 experts", "token"),
    ("pp2", "sequence"),
]


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(*each, marks=() if each in ALWAYS else pytest.mark.exhaustive)
        for each in itertools.product(LAYOUTS, ("token", "sequence"))
    ],
)
def test_ddp_may_sum_or_average(megatron_ranks, layout, kind):
    assert all(megatron_ranks(2, compared, kind, LAYOUTS[layout]))


@pytest.mark.parametrize(
    "layout",
    [
        "dense",
        pytest.param("all-reduce", marks=pytest.mark.exhaustive),
        pytest.param("experts", marks=pytest.mark.exhaustive),
        "scaled experts",
    ],
)
def test_auxiliary_losses_count_as_in_a_plain_mean(megatron_ranks, layout):
    assert all(megatron_ranks(2, compared, "plain", LAYOUTS[layout]))
