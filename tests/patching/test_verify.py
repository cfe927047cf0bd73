"""`verify()` alone, over the ranks of a group, and by itself in a hooked run's first call."""

from __future__ import annotations

import os

import pytest
from ranks import on_ranks

import megatron_idempotent
from megatron_idempotent import VerificationError, verify


def test_alone_it_returns_the_report_and_finds_what_was_replaced(toys):
    toys.greet()
    import toy_up.greet

    toys.apply()
    assert verify()["toy-a"].status == "applied"
    toy_up.greet.greet = print
    with pytest.raises(VerificationError, match="toy-a"):
        verify()


def one_without() -> str:
    """Rank 1 leaves one patch out."""
    import torch

    out = ["pipeline-seed-offset"] if torch.distributed.get_rank() == 1 else []
    megatron_idempotent.apply(exclude=out)
    return message_of_verify()


def replaced_on_one(strict: bool) -> str:
    """Rank 1 has lost a function, or is strict besides; it knows before the others are asked."""
    import megatron.core.tensor_parallel.random as module
    import torch

    mine = torch.distributed.get_rank() == 1
    megatron_idempotent.apply(strict=strict and mine)
    if mine:
        module.model_parallel_cuda_manual_seed = print
    return message_of_verify()


def message_of_verify() -> str:
    """Type and text of what `verify()` raises."""
    try:
        megatron_idempotent.verify()
    except (megatron_idempotent.VerificationError, megatron_idempotent.PatchError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@on_ranks(2)
def test_equal_ranks_agree() -> None:
    """Apply, verify."""
    megatron_idempotent.apply()
    assert (megatron_idempotent.verify()["pipeline-seed-offset"].status) == "applied"


def test_a_rank_without_a_patch_raises_on_all_ranks_and_is_named(megatron_ranks):
    first, second = megatron_ranks(2, one_without)
    assert first == second
    assert first.startswith(
        "VerificationError: ranks are patched differently: pipeline-seed-offset: applied 0."
    )
    assert " on rank 0, disabled 0." in first
    assert " on rank 1; call apply() on every rank" in first
    assert "grad-scale-func" not in first


@pytest.mark.parametrize("strict", [False, True])
def test_a_rank_that_fails_by_itself_does_not_leave_the_others_waiting(megatron_ranks, strict):
    first, second = megatron_ranks(2, replaced_on_one, strict)
    assert first.startswith("VerificationError: rank 1: ")
    assert second.startswith("PatchError: " if strict else "VerificationError: ")
    assert "pipeline-seed-offset" in first
    assert "pipeline-seed-offset" in second


@on_ranks(2)
def test_a_rank_outside_of_the_group_is_not_asked() -> None:
    """A group of rank 1 alone: rank 0 has nothing to do with it."""
    import torch

    group = torch.distributed.new_group([1])
    megatron_idempotent.apply(exclude=["grad-scale-func"] * torch.distributed.get_rank())
    megatron_idempotent.verify(group)
    assert ("fine") == "fine"


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
    assert "MEGATRON_IDEMPOTENT=1 where `megatron-idempotent hook install` has run" in error


def test_seconds_that_are_none_are_refused(monkeypatch):
    monkeypatch.setenv("MEGATRON_IDEMPOTENT_VERIFY", "soon")
    with pytest.raises(ValueError, match="'soon'"):
        megatron_idempotent.init()
