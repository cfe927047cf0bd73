"""Prints what CHANGELOG.md says of a tag's version, as the notes of its release: `notes.py v1.2.3`.

It fails where the changelog has no section of the version, or an empty one.
"""

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def notes(changelog: str, tag: str) -> str:
    """Return the changelog's section about the version that `tag` names, without its heading.

    Raises:
        ValueError: the changelog says nothing of that version.
    """
    version = tag.removeprefix("v")
    heading = rf"(?ms)^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$\n(.*?)(?=^## |\Z)"
    found = re.search(heading, changelog)
    if found is None or not found[1].strip():
        known = ", ".join(re.findall(r"(?m)^## \[(.+)\]", changelog)) or "none"
        raise ValueError(
            f"{CHANGELOG.name} has nothing under `## [{version}] - YYYY-MM-DD`, its sections are "
            f"{known}: move what is under Unreleased there, and tag again"
        )
    return found[1].strip() + "\n"


if __name__ == "__main__":
    try:
        print(notes(CHANGELOG.read_text("utf-8"), sys.argv[1]), end="")
    except ValueError as error:
        sys.exit(str(error))
