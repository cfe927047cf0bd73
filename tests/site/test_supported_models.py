"""The page of models and features names tests that there are, and errors that the code raises."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "supported-models.md").read_text(encoding="utf-8")
STATES = {"yes", "refused", "unknown", "–", "no layout", "stand-in", "export only"}
#: States that say more than one word.
LONGER = {
    *("yes, not on the output layer", "refused in part", "inputs only"),
    *("Qwen3-MoE", "`FSDPTrainStep`", "[factors alone](weight-sync.md)"),
}


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.splitlines() if line.startswith("| [")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@functools.cache
def literals() -> str:
    """All strings of the package, with placeholders of f-strings left out."""
    found = []
    for path in (ROOT / "megatron_idempotent").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_each_feature_has_a_state_in_each_part_and_a_section():
    titles = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"(?m)^## (.+)$", PAGE)
    }
    assert len(rows()) > 15
    for feature, *states in rows():
        assert len(states) == 6
        assert set(states) <= STATES | LONGER, feature
        assert feature.rpartition("(#")[2].rstrip(")") in titles


def test_each_test_that_shows_something_is_there():
    named = re.findall(r"\]\(\.\./(tests/[^)#]+)\)", PAGE)
    assert len(set(named)) > 25
    assert not [path for path in named if not (ROOT / path).is_file()]


@pytest.mark.parametrize(
    "message", [" ".join(each.split()) for each in re.findall(r'(?<!`)"([^"`]{12,})"', PAGE)]
)
def test_an_error_that_is_quoted_is_one_of_the_code(message):
    if message != "Refused":
        assert message in literals()
