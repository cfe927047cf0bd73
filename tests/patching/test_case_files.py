"""Every case file is complete, and what it says about the installed Megatron holds."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from editable import proven_on_a_commit

from megatron_idempotent.lazy import homes
from megatron_idempotent.patching import releases, source
from megatron_idempotent.patching.base import PACKAGE
from megatron_idempotent.patching.catalog import hazards, patches
from megatron_idempotent.patching.evidence import Bodies
from megatron_idempotent.patching.record import SECTIONS, Helper, takes_help
from megatron_idempotent.patching.releases import OnPath

TARGETS = [(patch, target) for patch in patches().values() for target in patch.targets]
# Frameworks that carry copies of Megatron's code are not installed here: see tests/downstream.
OF_MEGATRON = [both for both in TARGETS if both[0].distribution == "megatron-core"]
INSTALLED = releases.installed("megatron-core")


def module_of(patch_id: str) -> object:
    return importlib.import_module(hazards()[patch_id].module)


@pytest.mark.parametrize("hazard_id", hazards())
def test_a_case_file_is_called_like_its_hazard_and_has_every_section_once_and_filled(hazard_id):
    hazard, module = hazards()[hazard_id], module_of(hazard_id)
    assert hazard in [vars(module).get(name) for name in ("PATCH", "HELPER", "LIMIT")]
    assert hazard.id == hazard_id
    assert "\n" not in hazard.summary
    re.compile(hazard.stock_error)
    assert hazard.ranks >= 1
    headings = re.findall(rf"^({'|'.join(SECTIONS)}):$", module.__doc__ or "", re.MULTILINE)
    assert headings == list(SECTIONS)
    assert hazard.case_file[""].endswith(".")
    assert all(hazard.case_file[section] for section in SECTIONS)
    assert hazard.upstream.startswith("https://")


@pytest.mark.parametrize("patch_id", patches())
def test_targets_have_plain_wrappers_and_what_was_read_of_them(patch_id):
    """Wrappers take the original first. A body that was read is a hash, and what a patch relies on
    one expression or statement."""
    for target in patches()[patch_id].targets:
        assert inspect.isfunction(target.wrapper)
        assert "." not in target.wrapper.__qualname__
        assert next(iter(inspect.signature(target.wrapper).parameters)) == "original"
        assert all(re.fullmatch("[0-9a-f]{12}", body_hash) for body_hash in target.reviewed)
        assert all(len(ast.parse(fragment).body) == 1 for fragment in target.relies_on)


def test_every_file_in_the_folder_is_a_case_file():
    folder = Path(inspect.getfile(importlib.import_module(PACKAGE))).parent
    files = {path.stem for path in folder.rglob("*.py") if not path.stem.startswith("_")}
    assert files == {hazard_id.replace("-", "_") for hazard_id in hazards()}


@pytest.mark.parametrize(
    ("patch", "target"), OF_MEGATRON, ids=lambda value: getattr(value, "address", None)
)
def test_a_target_is_in_the_installed_megatron_and_its_body_is_known(patch, target, megatron):
    assert INSTALLED is not None
    if not releases.supported(INSTALLED, patch.since, patch.before):
        pytest.skip(f"megatron-core {INSTALLED.text} is not in {patch.versions}")
    path = source.locate(target.module)
    if path is None:
        assert target.module.startswith("megatron.training"), "only its wheel may lack a target"
        pytest.skip(f"megatron-core {INSTALLED.text} ships no {target.module}")
    body = source.read_body(path, target.qualname)
    assert body is not None
    held = bool(target.relies_on) and all(map(body.contains, target.relies_on))
    assert held or body.hash in target.reviewed  # a whole body may be read that lacks a fragment
    if patch.fixed_when is not None:
        everything = Bodies(sources=OnPath())
        for other in patch.targets:
            located = source.locate(other.module)
            assert located is not None
            everything[other.address] = source.read_body(located, other.qualname)
        # Commits that lead to a release may lack a repair that it has.
        assert not patch.fixed_when(everything) or proven_on_a_commit(patch.id)


@functools.cache
def parsed(module: str) -> tuple[dict[str, ast.AST], dict[str, tuple[str, str]]]:
    """Read what a module of this project defines and imports, by name, without running it."""
    ours = module.startswith("megatron_idempotent.")
    spec = importlib.util.find_spec(module) if ours else None
    if spec is None or spec.origin is None:
        return {}, {}
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    defined = {
        node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    imported = {
        alias.asname or alias.name: (
            importlib.util.resolve_name("." * node.level + (node.module or ""), spec.parent),
            alias.name,
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return defined, imported


def under(module: str, name: str, package: str = "") -> Iterator[tuple[str, str, ast.AST | None]]:
    """This project's code that is reached from a function: module, name, and where it is defined.

    Args:
        package: code elsewhere is named, and not followed.
    """
    seen: set[tuple[str, str]] = set()
    reached = [(module, name)]
    while reached:
        module, name = reached.pop()
        # A hook's check of all ranks, which wrappers come by; it has tests of right ones.
        if (module, name) in seen or name == "verify_at_start":
            continue
        seen.add((module, name))
        defined, imported = parsed(module) if module.startswith(package) else ({}, {})
        if name in imported:
            reached.append(imported[name])
        yield module, name, defined.get(name)
        for node in ast.walk(defined[name]) if name in defined else ():
            if isinstance(node, ast.Name):
                reached.append((module, node.id))
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                holder = imported.get(node.value.id)
                if holder is not None:
                    reached.append((".".join(holder), node.attr))


def can_raise(module: str, name: str) -> bool:
    """Return whether this project's code under a function has a `raise` of an error of its own."""
    return any(
        isinstance(node, ast.Raise) and node.exc is not None
        for _, _, body in under(module, name)
        if body is not None
        for node in ast.walk(body)
    )


def test_a_patch_that_can_raise_names_a_right_program_beside_the_hazard():
    raising = {
        patch_id
        for patch_id, patch in patches().items()
        if any(can_raise(t.wrapper.__module__, t.wrapper.__qualname__) for t in patch.targets)
    }
    assert {"gradient-after-reduction", "no-sync-ends-early"} <= raising, "the search finds them"
    assert {"replicas-differ-unnoticed"} <= raising, "in what a wrapper calls elsewhere, too"
    without = {name for name in raising if patches()[name].control is None}
    assert not without, "a false alarm of theirs would go unnoticed"


def test_a_helper_that_can_raise_is_called_by_a_right_program_beside_a_hazard():
    """List those that act on a Megatron program; losses, packing and FP8 only take arguments."""
    acting = {
        **homes("megatron_idempotent.window"),
        "verify": "megatron_idempotent.patching.verify",
    }
    refusing = {
        name for name, module in acting.items() if name.islower() and can_raise(module, name)
    }
    assert {"accumulation_window", "guarded_window", "rebuild_process_groups"} <= refusing
    assert {hazard.call for hazard in hazards().values() if isinstance(hazard, Helper)} <= refusing
    called = {
        name
        for hazard in hazards().values()
        if takes_help(hazard.control)
        for _, name, _ in under(hazard.module, "control", PACKAGE)
    }
    assert not refusing - called, "a false alarm of theirs would go unnoticed"
