"""Writes into each recipe's page when its framework's own code last passed our tests, and where.

    python tools/recipe_dates.py REPORT

REPORT is what `pytest --junitxml` has written of tests/downstream; `nox -s downstream` calls this.
A page changes if tests that name its framework ran, and none of them failed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from _checkout import ROOT

RECIPES = ROOT / "docs" / "recipes"
#: The first paragraph of a page, and what this tool wrote after it.
_HEAD = re.compile(
    r"(?P<paragraph>Written for \[.*\]\(\S+/tree/(?P<commit>\w{40})\).*\n)(\nLast passed .*\n)?"
)
_FAILED = ("failure", "error")


def outcomes(report: Path, framework: str) -> Iterator[bool]:
    """Yield for each test that names the framework and was not skipped if it passed."""
    words = re.compile(rf"(?<![a-z]){framework.replace('-', '[-_]')}(?![a-z])")
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')} {case.get('name')}".lower()
        if words.search(name) and case.find("skipped") is None:
            yield all(case.find(kind) is None for kind in _FAILED)


def with_date(page: str, day: str) -> str:
    """Return a page that says on which day and at which commit its tests last passed.

    Raises:
        ValueError: the page does not say for which commit it was written.
    """
    head = _HEAD.search(page)
    if head is None:
        raise ValueError("the page lacks its line `Written for [NAME at …](…/tree/COMMIT)`")
    line = f"\nLast passed on {day}, at {head['commit'][:10]}.\n"
    return page[: head.start()] + head["paragraph"] + line + page[head.end() :]


def main(report: Path) -> None:
    """Write the dates of those that passed, and say so."""
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
