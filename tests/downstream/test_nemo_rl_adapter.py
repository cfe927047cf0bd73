"""`examples/nemo_rl_step.py` beside NeMo-RL's split step, with its data, forward pass and losses.

Whether a step is the right one, aborted, empty, with experts and with MTP, certify tells
(test_certified.py, `NemoRLOnTrainStep`): here the bits are NeMo-RL's.

`NEMO_RL_SOURCE` names a checkout of NeMo-RL, as of August 2026.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

SOURCE = os.environ.get("NEMO_RL_SOURCE", "")
ALL = (8,)
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not SOURCE, reason="NEMO_RL_SOURCE names no checkout of NeMo-RL"),
]


def worker(adapted: bool, **layout: Any) -> Any:
    """Runs on a rank: NeMo-RL's worker, with the adapter or without."""
    from adapters import adapter
    from nemo_worker import NemoWorker, import_nemo_rl

    import megatron_idempotent

    megatron_idempotent.apply()
    import_nemo_rl(SOURCE)
    return NemoWorker(adapter("nemo_rl").SplitStepWorker if adapted else None, **layout)


def steps(adapted: bool, chunks: Any = ALL, *, layout: Any = None, **options: Any) -> Any:
    """The parameters after two steps, and what the steps returned that both return."""
    nemo = worker(adapted, **(layout or {}))
    loss_fn = nemo.loss_fn(**options.pop("loss", {}))
    found = [nemo.step(seed, chunks, loss_fn=loss_fn, **options) for seed in range(2)]
    return nemo.parameters(), [comparable(each) for each in found]


def comparable(found: dict[str, Any]) -> Any:
    own = ("rank", "replica", "wd")  # the stand-in for a scheduler knows no weight decay
    rows = {k: v for k, v in found["all_mb_metrics"].items() if k not in own}
    return sorted(rows.items()), found["grad_norm"].item()


def dense() -> dict[str, bool]:
    """Runs on a rank; returns what has the bits of NeMo-RL's own step in one chunk."""
    theirs = steps(False)
    sequences = {"token_level_loss": False}
    assert theirs[1][0][1] > 0
    return {
        "one chunk": steps(True) == theirs,
        "two chunks": steps(True, (2, 6)) == theirs,
        "four chunks": steps(True, (2, 2, 2, 2)) == theirs,
        "of sequences": steps(True, loss=sequences) == steps(False, loss=sequences),
    }


def names() -> dict[str, tuple[str, str]]:
    """Runs on a rank: metrics that NeMo-RL's loss divides otherwise than our table says."""
    from megatron_idempotent.step import POLICY_GRADIENT_NORMALIZERS

    differing = {}
    for token_level in (True, False):
        nemo = worker(False)
        loss_fn = nemo.loss_fn(token_level_loss=token_level)
        of_gradient = "tokens" if token_level else "sequences"
        for name, each in loss_fn.metric_normalizations.items():
            ours = POLICY_GRADIENT_NORMALIZERS.get(name, of_gradient)
            if each.value != ours and "_min" not in name and "_max" not in name:
                differing[name] = each.value, ours
    return differing


def test_our_table_of_normalizers_is_that_of_nemo_rls_loss(megatron_ranks):
    assert megatron_ranks(1, names, timeout_s=400) == [{}]


def test_any_number_of_chunks_has_the_bits_of_nemo_rls_step(megatron_ranks):
    for found in megatron_ranks(2, dense, timeout_s=400):
        assert all(found.values()), found


def ended() -> dict[str, bool]:
    """Runs on a rank: what `finish_train_step` returns where there is little to return."""
    theirs, ours = worker(False).step(0), worker(True).step(0)
    same = ("gpu_name", "model_dtype")
    nemo = worker(True)
    nemo.worker.begin_train_step(nemo.loss_fn())
    empty = nemo.worker.finish_train_step()
    overflowing = worker(True, dtype="fp16", loss_scale=2.0**120)
    before = overflowing.parameters()
    overflow = overflowing.step(0)
    return {
        "device and type": [ours.get(each) for each in same] == [theirs[each] for each in same],
        "no microbatches": (empty["all_mb_metrics"], empty["global_loss"].tolist()) == ({}, [0.0]),
        "no microbatches, norm": empty["grad_norm"].tolist() == [0.0],
        "overflow": overflow["grad_norm"].isnan().tolist() == [True],
        "overflow, nothing updated": overflowing.parameters() == before,
        "overflow, rows": len(overflow["all_mb_metrics"]["loss"]) == 4,
    }


def test_a_step_that_overflowed_or_was_empty_returns_what_drivers_read(megatron_ranks):
    for found in megatron_ranks(2, ended, timeout_s=400):
        assert all(found.values()), found


def packed(layout: dict[str, Any]) -> dict[str, bool]:
    """Runs on a rank; returns what has the bits of NeMo-RL's own step on the same packs."""
    layout = {"packed": True, **layout}
    options: dict[str, dict[str, Any]] = {
        "of tokens": {},
        "of sequences": {"loss": {"token_level_loss": False}},
        "two chunks": {"chunks": (4, 4)},
    }
    found = {}
    for name, how in options.items():
        (theirs, seen), (ours, ours_seen) = (
            steps(adapted, layout=layout, **how) for adapted in (False, True)
        )
        assert seen[0][1] > 0
        losses = [dict(rows).pop("loss") for rows, _ in (*seen, *ours_seen)]
        # NeMo-RL adds the losses of the two sequences of a pack in float64 for its rows, and for
        # the gradient in float32, whose sum the step reports: one rounding, of each loss.
        close = all(
            abs(want - got) <= 2**-24 * abs(want)
            for wanted, gotten in zip(losses[:2], losses[2:], strict=True)
            for want, got in zip(wanted, gotten, strict=True)
        )
        found[name] = theirs == ours and without_loss(seen) == without_loss(ours_seen) and close
    return found


def without_loss(seen: Any) -> Any:
    return [([each for each in rows if each[0] != "loss"], norm) for rows, norm in seen]


@pytest.mark.parametrize("layout", [{}, {"cp": 2}, {"pp": 2}, {"cp": 2, "pp": 2}], ids=str)
def test_packs_have_the_bits_of_nemo_rls_step(layout, megatron_ranks):
    ranks = 4 if len(layout) > 1 else 2
    for found in megatron_ranks(ranks, packed, layout, timeout_s=400):
        assert all(found.values()), found


def packed_experts() -> dict[str, bool]:
    """Runs on a rank: MoE's loss in packs, under context parallelism."""
    overrides = {"moe_aux_loss_coeff": 1.0, "calculate_per_token_loss": True}
    layout = {"packed": True, "cp": 2, "experts": 4, "config_overrides": overrides}

    def norms(adapted: bool, *, token_level: bool) -> list[float]:
        loss = {"token_level_loss": token_level}
        return [norm for _, norm in steps(adapted, layout=layout, loss=loss)[1]]

    theirs, ours = (norms(each, token_level=False) for each in (False, True))
    return {
        "of tokens": norms(True, token_level=True) == norms(False, token_level=True),
        # Its weight is positions / sequences, where the loss is a mean over sequences.
        "of sequences: theirs is larger": theirs[0] > 10 * ours[0],
    }


def test_moes_loss_in_packs_has_nemo_rls_weight_where_the_loss_is_of_tokens(megatron_ranks):
    for found in megatron_ranks(2, packed_experts, timeout_s=400):
        assert all(found.values()), found
