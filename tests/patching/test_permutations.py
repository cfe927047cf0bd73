"""Import, apply, revert, apply again: in every order, each in a process of its own."""

from __future__ import annotations

import pytest

# i imports Megatron, a applies, r reverts.
ORDERS = ["ia", "ai", "iaa", "iar", "air", "ari", "ria", "iara", "arai"]
#: Each imports Megatron again, and is two of the others one after the other.
LONGER = ["aai", "aira", "aria"]


def test_a_fresh_interpreter_gets_the_patches_with_the_import_and_loses_them_with_revert(warm):
    first = warm.first
    elsewhere = {"unsupported_version", "not_installed", "disabled", "missing_target"}
    assert set(first["before"].values()) <= {"pending_import"} | elsewhere
    assert first["after"]["pipeline-seed-offset"] == "applied"
    assert first["after"]["grad-scale-func"] == "applied"
    assert first["after"]["forward-pre-hook-reentry"] == "applied"
    assert set(first["patched"].values()) == {True}
    assert set(first["reverted"].values()) == {True}


@pytest.mark.parametrize(
    "steps", [*ORDERS, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in LONGER)]
)
def test_the_last_of_apply_and_revert_decides_whenever_megatron_is_imported(warm, steps):
    result = warm.run("order", imported=steps.startswith("i"), steps=steps)
    patched = steps.replace("i", "").endswith("a")
    assert set(result["stock"]) == {not patched}
    assert result["statuses"]["pipeline-seed-offset"] in (
        ("applied", "already_applied") if patched else ("disabled",)
    )
    # Twice applied is once applied, by identity, and also with a revert() in between.
    assert set(result["objects"]) <= {1}
    # megatron.core.tensor_parallel has bound the function by name, early or late.
    assert result["bound early"] is True


def test_names_bound_early_are_rebound_in_megatron_and_reported_elsewhere(warm):
    result = warm.run("on_megatron.early_bound", imported=True, rebind=None)
    assert result["inside"] is True
    assert result["user"] is False
    assert "bound before us and left alone: user_program.build" in result["reason"]
    assert result["inside after"] is result["late after"] is result["user after"] is True
    assert result["inside again"] is True


@pytest.mark.parametrize("rebind", ["user_program", "other, user_program"])
def test_names_bound_early_in_a_package_that_asked_for_it_are_rebound(warm, rebind):
    result = warm.run("on_megatron.early_bound", imported=True, rebind=rebind)
    assert result["user"] is True
    assert "left alone" not in result["reason"]
    assert result["user after"] is True


def test_a_reloaded_module_is_said_to_be_unpatched_and_patched_again_by_apply(warm):
    result = warm.run("on_megatron.reloaded", imported=True)
    assert result == {
        "after reload": "conflict",
        "reloaded is stock": True,
        "again": "applied",
        "patched again": True,
        "stock again": True,
        "early bound is stock": True,
    }


def test_patched_functions_can_be_copied_pickled_and_inspected_like_upstreams(warm):
    result = warm.run("on_megatron.copies", imported=True)
    assert set(result["pickled"]) == {True}
    assert set(result["copied"]) == {True}
    assert set(result["signatures"].values()) == {True}
    assert result["bound"] is True
    if result["clouds"] is None:
        pytest.skip("cloudpickle is not installed; the rest holds")
    assert set(result["clouds"]) == {True}
