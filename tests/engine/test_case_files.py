"""Every case file is complete, and what it says about the installed Megatron holds."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

from megatron_idempotent.engine import catalogue, source, versions
from megatron_idempotent.engine.catalogue import hazards, patches
from megatron_idempotent.engine.record import SECTIONS

TARGETS = [(patch, target) for patch in patches().values() for target in patch.targets]
# Frameworks that carry copies of Megatron's code are not installed here: see tests/downstream.
OF_MEGATRON = [both for both in TARGETS if both[0].distribution == "megatron-core"]
INSTALLED = versions.installed("megatron-core")


def module_of(patch_id: str) -> object:
    return importlib.import_module(f"{catalogue.PACKAGE}.{patch_id.replace('-', '_')}")


@pytest.mark.parametrize("patch_id", hazards())
def test_a_case_file_has_every_section_once_and_filled(patch_id):
    doc = module_of(patch_id).__doc__ or ""
    assert re.findall(rf"^({'|'.join(SECTIONS)}):$", doc, re.MULTILINE) == list(SECTIONS)
    case_file = hazards()[patch_id].case_file
    assert case_file[""].endswith(".")
    assert all(case_file[section] for section in SECTIONS)
    assert "https://" in case_file["Upstream"]


@pytest.mark.parametrize("patch_id", hazards())
def test_a_case_file_is_called_like_its_patch_and_says_it_in_one_line(patch_id):
    patch = hazards()[patch_id]
    assert patch in [vars(module_of(patch_id)).get(k) for k in ("PATCH", "HELPER", "LIMIT")]
    assert patch.id == patch_id
    assert "\n" not in patch.summary
    re.compile(patch.reproduction.stock_error)
    assert patch.reproduction.ranks >= 1


@pytest.mark.parametrize("patch_id", patches())
def test_wrappers_are_plain_functions_that_take_the_original_first(patch_id):
    for target in patches()[patch_id].targets:
        assert inspect.isfunction(target.wrapper)
        assert "." not in target.wrapper.__qualname__
        assert next(iter(inspect.signature(target.wrapper).parameters)) == "original"


def test_every_file_in_the_folder_is_a_case_file():
    folder = Path(inspect.getfile(importlib.import_module(catalogue.PACKAGE))).parent
    files = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")}
    assert files == {hazard_id.replace("-", "_") for hazard_id in hazards()}


@pytest.mark.parametrize(
    ("patch", "target"), OF_MEGATRON, ids=lambda value: getattr(value, "address", None)
)
def test_a_target_is_in_the_installed_megatron_and_its_body_is_known(patch, target):
    assert INSTALLED is not None, "the tests need a Megatron"
    if not versions.supported(INSTALLED, patch.since, patch.before):
        pytest.skip(f"megatron-core {INSTALLED.text} is not in {patch.versions}")
    path = source.locate(target.module)
    if path is None:
        assert target.module.startswith("megatron.training"), "only its wheel may lack a target"
        pytest.skip(f"megatron-core {INSTALLED.text} ships no {target.module}")
    body = source.read_body(path, target.qualname)
    assert body is not None
    if target.relies_on:
        for fragment in target.relies_on:
            assert body.contains(fragment)
    else:
        assert body.hash in target.reviewed
    if patch.fixed_when is not None:
        everything = {}
        for other in patch.targets:
            located = source.locate(other.module)
            assert located is not None
            everything[other.address] = source.read_body(located, other.qualname)
        assert not patch.fixed_when(everything)


def test_reviewed_hashes_and_fragments_are_well_formed():
    for _, target in TARGETS:
        assert all(re.fullmatch("[0-9a-f]{12}", body_hash) for body_hash in target.reviewed)
        for fragment in target.relies_on:
            assert source.ast.parse(fragment).body
