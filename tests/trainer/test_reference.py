"""The documentation of the settings is current and complete."""

import dataclasses
from pathlib import Path

import pytest

from megatron_idempotent.trainer.reference import field_docstrings, with_current_table
from megatron_idempotent.trainer.settings import SECTIONS

PAGE = Path(__file__).parents[2] / "docs" / "trainer.md"


def test_the_settings_in_the_documentation_are_current():
    page = PAGE.read_text(encoding="utf-8")
    assert with_current_table(page) == page, (
        "run: python -m megatron_idempotent.trainer.reference docs/trainer.md"
    )


def test_every_setting_has_a_docstring():
    docstrings = field_docstrings()
    for section in SECTIONS.values():
        for field in dataclasses.fields(section):
            assert docstrings[section.__name__, field.name].endswith(".")


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="lacks the markers"):
        with_current_table("# A page\n")
