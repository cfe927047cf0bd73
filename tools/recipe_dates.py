"""Writes into each recipe's page the day and commit at which its framework last passed our tests.

    python tools/recipe_dates.py REPORT

REPORT is the output of `pytest --junitxml` for tests/downstream; `nox -s downstream` calls this.
A page changes if tests with its framework's name ran, and none of them failed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from _checkout import ROOT

RECIPES = ROOT / "docs" / "recipes"
#: The first paragraph of a page, and the line of this tool after it.
_HEAD = re.compile(
    r"(?P<paragraph>Written for \[.*\]\(\S+/tree/(?P<commit>\w{40})\).*\n)(\nLast passed .*\n)?"
)
_FAILED = ("failure", "error")


def outcomes(report: Path, framework: str) -> Iterator[bool]:
    """Yield, for each test of a framework that was not skipped, True if it passed, else False."""
    words = re.compile(rf"(?<![a-z]){framework.replace('-', '[-_]')}(?![a-z])")
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')} {case.get('name')}".lower()
        if words.search(name) and case.find("skipped") is None:
            yield all(case.find(kind) is None for kind in _FAILED)


def with_date(page: str, day: str) -> str:
    """Return a recipe's page whose line `Last passed on` has this day and the page's commit.

    Raises:
        ValueError: the page lacks the line with its commit.
    """
    head = _HEAD.search(page)
    if head is None:
        raise ValueError("the page lacks its line `Written for [NAME at …](…/tree/COMMIT)`")
    line = f"\nLast passed on {day}, at {head['commit'][:10]}.\n"
    return page[: head.start()] + head["paragraph"] + line + page[head.end() :]


def main(report: Path) -> None:
    """Update the pages of recipes whose tests all passed; print a line for each recipe."""
    day = ElementTree.parse(report).find("testsuite").get("timestamp", "")[:10]  # type: ignore[union-attr]
    for page in sorted(RECIPES.glob("*.md")):
        passed = list(outcomes(report, page.stem))
        if not passed or page.stem == "index":
            continue
        text = page.read_text(encoding="utf-8")
        if all(passed):
            page.write_text(with_date(text, day), encoding="utf-8")
        print(f"{page.stem}: {sum(passed)} of {len(passed)} tests passed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
