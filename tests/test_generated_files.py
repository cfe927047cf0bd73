"""HAZARDS.md and the README's table are what the case files say."""

from __future__ import annotations

from pathlib import Path

from megatron_idempotent import casebook

ROOT = Path(__file__).parent.parent
REMEDY = "run `python -m megatron_idempotent.casebook` in the repository"


def test_hazards_md_is_current():
    assert (ROOT / "HAZARDS.md").read_text() == casebook.hazards_markdown(), REMEDY


def test_the_readme_table_is_current():
    text = (ROOT / "README.md").read_text()
    assert casebook.updated_readme(text) == text, REMEDY


def test_a_stale_table_is_renewed():
    stale = f"before\n{casebook.BEGIN}\nold\n{casebook.END}\nafter\n"
    renewed = casebook.updated_readme(stale)
    assert renewed.startswith("before\n")
    assert renewed.endswith("after\n")
    assert "old" not in renewed
    assert "`train-interval-timer`" in renewed
