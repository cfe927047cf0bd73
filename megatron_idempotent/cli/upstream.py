"""Finds upstream's own repairs of hazards in a checkout of this project: the folders upstream/ID.

An installed package does not have them; then the text says where they are.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

from megatron_idempotent.patching.record import Hazard, Patch

from .findings import absence_from_main, recorded

#: The checkout's folder of repairs; an installed package has none beside it.
FOLDER = Path(__file__).parents[2] / "upstream"
#: Begins the reason, in a case file's `Remove when`, why there is no repair to send.
BY_DESIGN = "By design: "
_ADDRESS = "https://github.com/megatron-idempotent/megatron-idempotent/tree/main/upstream"


def repair_folder(hazard_id: str) -> Path | None:
    """Return the checkout's folder with the repair of a hazard; None if there is none."""
    folder = FOLDER / hazard_id
    return folder if (folder / "repair.py").is_file() else None


def wider_repair(hazard: Hazard) -> str | None:
    """Return the id of another hazard whose repair also ends this one, as its `Remove when` says;
    None if there is none.
    """
    named = re.search(r"`upstream/([\w-]+)`", hazard.case_file["Remove when"])
    return named[1] if named and named[1] != hazard.id and repair_folder(named[1]) else None


def pull_request(hazard_id: str) -> str:
    """Say which pull request of upstream's repairs a hazard: `open pull request …`, `merged in …`.

    Returns "" if none is known, and in an installed package, which has no list of them.
    """
    row = _pull_requests(FOLDER / "pull_requests.json").get(hazard_id)
    if row is None:
        return ""
    state = "open pull request" if row["state"] == "open" else "merged in"
    opened = f", of {row['opened']}" if row["opened"] else ""
    covers = f" ({row['covers']})" if "covers" in row else ""
    return f"{state} {row['pull_request']}{opened}{covers}"


@functools.cache
def _pull_requests(file: Path) -> dict[str, dict[str, str]]:
    """Return the fields of upstream's pull requests by hazard; none if there is no such file."""
    rows: dict[str, dict[str, str]] = {}
    if file.is_file():
        rows = json.loads(file.read_text("utf-8"))
    return rows


def repair_text(hazard: Hazard) -> str:
    """Return a pull request's message and its edits of upstream's code, formatted for a terminal.

    Without a repair, the text says when the patch can go, and where repairs are kept.
    """
    folder, request = repair_folder(hazard.id), pull_request(hazard.id)
    if folder is not None:
        message = (folder / "message.md").read_text("utf-8").rstrip()
        edits = (folder / "repair.py").read_text("utf-8").rstrip()
        commands = (
            f"python tools/repairs.py diff path/to/checkout {hazard.id}",
            f"python tools/repairs.py prove path/to/checkout {hazard.id}",
        )
        lines = [message, *(["", f"Upstream's own: {request}."] if request else [])]
        lines += ["", "What changes (repair.py):", "", edits, "", "See it:"]
        return "\n".join([*lines, *(f"    {command}" for command in commands)])
    until = " ".join(hazard.case_file["Remove when"].split())
    if not FOLDER.is_dir():
        sentence = f"Repairs are kept in the repository: {_ADDRESS}/{hazard.id}, if there is one."
    elif request:
        sentence = f"Upstream's repair: {request}."
    elif other := wider_repair(hazard):
        sentence = f"The repair of {other} ends it, too: `explain {other} --upstream` shows that."
    elif absence := absence_from_main(hazard, recorded()):
        sentence = f"There is nothing to send (Megatron's main: {absence})."
    elif isinstance(hazard, Patch) and BY_DESIGN not in until:
        sentence = "Nobody has written upstream's repair yet: upstream/README.md says how."
    else:
        sentence = "It is by design: there is no repair to send."
    return f"{sentence}\nRemove when: {until}"
