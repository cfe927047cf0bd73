"""Somebody else at the target, before `apply()` or after it, on the real Megatron."""

from __future__ import annotations

import pytest
from alterations import alter
from on_megatron import neighbours

SEED = "pipeline-seed-offset"
FOREIGN = {
    "polite": "alterations.py",
    "wrapt_proxy": "FunctionWrapper, not upstream's function",
    "replacement": "alterations.py",
    "recompiled": "from <string>:1",
}


@pytest.mark.parametrize("prepare", FOREIGN)
def test_somebody_elses_function_is_a_conflict_and_stays_untouched(warm, prepare):
    result = warm.run("live_outcome", imported=True, prepare=prepare)
    row = result["rows"][SEED]
    assert row["status"] == "conflict"
    assert row["reason"].startswith(
        "megatron.core.tensor_parallel.random:model_parallel_cuda_manual_seed is "
    )
    assert row["reason"].endswith(f"undo that or exclude {SEED}")
    assert FOREIGN[prepare] in row["reason"]
    assert result["seed untouched"] is True
    # It is no reason to leave the other patches out.
    assert result["untouched"] == [False, False, False]


@pytest.mark.parametrize("arguments", [{"only": [SEED]}, {"strict": True}])
def test_a_conflict_raises_where_it_was_asked_for_and_nothing_is_installed(warm, arguments):
    result = warm.run("live_outcome", imported=True, prepare="polite", **arguments)
    assert f"{SEED}: conflict: " in result["raised"]
    assert result["seed untouched"] is True
    assert result["untouched"] == [True, True, True]
    assert {row["status"] for row in result["rows"].values()} == {"disabled"}
    assert {row["reason"] for row in result["rows"].values()} == {"apply() was not called"}


def test_a_function_that_somebody_removed_is_a_failure(warm):
    row = warm.run("live_outcome", imported=True, prepare="removed")["rows"][SEED]
    assert row["status"] in ("failed", "conflict")
    assert "model_parallel_cuda_manual_seed" in row["reason"]


def test_a_drifted_copy_that_really_is_imported_is_left_alone(warm, megatron_copy):
    random = "megatron/core/tensor_parallel/random.py"
    alter(megatron_copy, random, "offset = seed + 2718", "offset = seed + 2719")
    refused = warm.run("copy_is_imported", path=str(megatron_copy), exclude=neighbours())
    assert (refused[SEED]["status"], refused[SEED]["stock"]) == ("drifted", True)
    assert refused["grad-scale-func"]["status"] == "applied"
    accepted = warm.run("copy_is_imported", path=str(megatron_copy), only=[SEED])
    assert (accepted[SEED]["status"], accepted[SEED]["stock"]) == ("applied", False)
    assert "accepted by name" in accepted[SEED]["reason"]


def test_a_wrapper_on_top_of_ours_is_fine_and_keeps_an_inert_layer_after_revert(warm):
    result = warm.run("on_megatron.wrapped_on_top", imported=True)
    assert result["status"] == "applied"
    assert result["again"] == "already_applied"
    assert result["reverted"]["status"] == "conflict"
    assert "someone wrapped megatron.core.tensor_parallel.random:" in result["reverted"]["reason"]
    assert "our layer stays below, doing nothing" in result["reverted"]["reason"]
    assert result["theirs stays"] is result["inert"] is True
    assert result["applied again"] == "applied"
    assert result["same object"] is True
    assert result["live again"] == [SEED]
    assert (result["undone"], result["upstream back"]) == ("disabled", True)


def test_a_replaced_function_is_found_by_verify_and_by_the_next_apply(warm):
    result = warm.run("on_megatron.replaced_after", imported=True)
    assert result["message"].startswith(f"no longer in place: {SEED} (")
    assert "call apply() after whatever replaced them" in result["message"]
    assert result["again"]["status"] == "conflict"
    assert result["untouched"] is True
    assert (result["fixed"], result["same"]) == ("applied", True)


def test_upstreams_own_refusals_stay_and_leave_nothing_behind(warm):
    result = warm.run("on_megatron.hooks_without_overlap", imported=True)
    assert result["raised"] == ["disable_forward_pre_hook", "enable_forward_pre_hook"]
    assert result["handles"] == 0
