"""Threads, forks, spawned children; each scenario has a deadline, after which it counts as hung."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("while_importing", [False, True])
def test_apply_from_many_threads_installs_once(warm, while_importing):
    result = warm.run(
        "with_processes.many_threads",
        imported=not while_importing,
        while_importing=while_importing,
        timeout_s=60,
    )
    assert result["failures"] == []
    assert result["stock"] == [False] * 4
    # One layer of ours around upstream's function, however many threads came by.
    assert set(result["wrapped"].values()) == {1}
    assert all(len(layers) == len(set(layers)) for layers in result["layers"])
    assert set(result["statuses"]) <= {
        "applied",
        "already_applied",
        "pending_import",
        "missing_target",
        "unsupported_version",
        "not_installed",
        "disabled",
    }


@pytest.mark.parametrize("hold_the_lock", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_inherits_the_patches_and_can_change_its_own(warm, hold_the_lock):
    result = warm.run(
        "with_processes.forked", imported=True, hold_the_lock=hold_the_lock, timeout_s=60
    )
    assert result["child"] == "True disabled True"
    assert result["parent"] == [False] * 4


# It imports torch and Megatron in two processes.
@pytest.mark.exhaustive
def test_a_spawned_child_has_no_patches_until_it_applies_them(warm):
    came, without, patched = warm.run("with_processes.spawned", imported=True, timeout_s=300)
    assert came == ["apply() was not called"]
    assert without == [True] * 4
    assert patched == [False] * 4


def test_the_package_and_apply_pull_in_next_to_nothing(cold):
    result = cold.run("fresh_modules")
    heavy = {
        *("torch", "megatron", "numpy", "wrapt", "packaging", "asyncio", "logging", "inspect"),
        *("dataclasses", "pathlib", "ast", "json", "importlib.metadata"),
    }
    assert heavy & set(result["applied"]) == set()
    # Importing changes nothing; applying leaves one finder, which waits for Megatron.
    assert not [name for name in result["imported"] if ".patches" in name]
    assert result["finders added"] == ["_ImportSentinel"]


def test_the_loss_scale_survives_copies_and_leaves_the_optimizer_behind(warm):
    result = warm.run("on_megatron.loss_scale", imported=True)
    assert result == {"scaled": 16.0, "pickled": None, "left": 2.0}
