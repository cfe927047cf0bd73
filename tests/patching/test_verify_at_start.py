"""Patches that came by a hook are checked on all ranks in the first training call, by itself."""

from __future__ import annotations

import os

import pytest

import megatron_idempotent

PATCH = "pipeline-seed-offset"


def trained(seconds: str, patched: tuple[bool, ...], without: str = "") -> tuple[str, str]:
    """Run on every rank: take patches by a hook where `patched` says so, and train one step.

    Returns the error of the step, and what the rank wrote on standard error.
    """
    import contextlib
    import io

    import torch

    from megatron_idempotent.proof.cpu import tiny

    rank = torch.distributed.get_rank()
    os.environ["MEGATRON_IDEMPOTENT_VERIFY"] = seconds
    os.environ["MEGATRON_IDEMPOTENT_DISABLE"] = without if rank == 1 else ""
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        if patched[rank]:
            megatron_idempotent.init()
        model = tiny.build()
        error = ""
        for _ in range(2 * patched[rank]):
            try:
                model.forward_backward(1, data_seed=3)
            except megatron_idempotent.VerificationError as failed:
                error += str(failed)
                break
    return error, told.getvalue()


def test_all_ranks_are_patched_and_one_says_so(megatron_ranks):
    first, second = megatron_ranks(2, trained, "60", (True, True))
    assert first[0] == second[0] == ""
    assert [line.split()[2:] for line in first[1].splitlines() if "patches on all" in line] == [
        ["patches", "on", "all", "2", "ranks"]
    ]
    assert "patches on all" not in second[1]


def test_ranks_that_differ_are_told_on_both(megatron_ranks):
    for error, _ in megatron_ranks(2, trained, "60", (True, True), PATCH):
        assert f"ranks are patched differently: {PATCH}: " in error


def test_a_check_that_is_off_says_nothing(megatron_ranks):
    for error, told in megatron_ranks(2, trained, "0", (True, True), PATCH):
        assert error == ""
        assert "patches on all" not in told


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_without_patches_is_named(megatron_ranks, silent):
    found = megatron_ranks(2, trained, "1", (silent == 1, silent == 0))
    error = found[1 - silent][0]
    assert error.startswith(f"no patches on rank {silent}, ")
    assert "`megatron-idempotent run`" in error


def test_seconds_that_are_none_are_refused(monkeypatch):
    monkeypatch.setenv("MEGATRON_IDEMPOTENT_VERIFY", "soon")
    with pytest.raises(ValueError, match="'soon' is no number of seconds: set it to 0 or more"):
        megatron_idempotent.init()
