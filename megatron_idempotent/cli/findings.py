"""Reads the verdicts of `make matrix` and `make pins` about each hazard, and explains them.

`patches/_generated/proven.json` has a verdict per hazard for each release, and for each commit that
frameworks pin. `python tools/casebook.py --proven FOLDER` writes it. `explain` prints the verdicts
about one hazard, and the documentation site shows all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from megatron_idempotent.patching.base import MEGATRON, generated
from megatron_idempotent.patching.record import Hazard

#: The file in `patches/_generated/`.
PROVEN = "proven.json"

Proven = Mapping[str, Mapping[str, str]]
"""Maps a release or a commit's name, then a hazard's id, to a verdict: a key of `WORDS`."""


class Meaning(NamedTuple):
    """Describes a verdict about a hazard: a mark for table cells, a sentence for readers, and
    whether the hazard exists.
    """

    mark: str
    """The word or sign for the verdict in the table."""
    sentence: str
    present: bool
    """True if the Megatron with this verdict has the hazard."""


NOT_RUN = "not run"

#: A verdict of `prove`, or the reason why a hazard does not apply → its meaning.
WORDS: Mapping[str, Meaning] = {
    "proven": Meaning("✓", "stock fails as the case file says, and the repair holds", True),
    "documented": Meaning("limit", "stock fails as the case file says, nothing repairs it", True),
    "disabled": Meaning("off", "needs hardware, and is applied only where it is named", True),
    "drifted": Meaning(
        "refused",
        "nobody has reviewed a function there, and it lacks what the patch relies on",
        True,
    ),
    "unpatched": Meaning(
        "unpatched", "stock fails as the case file says, and `apply()` leaves the patch out", True
    ),
    "other_error": Meaning(
        "cannot run", "the program needs of that commit what cannot run on our machines", False
    ),
    "unsupported_version": Meaning("–", "does not have the hazard", False),
    "fixed_upstream": Meaning("fixed", "upstream has repaired it", False),
    "missing_target": Meaning(
        "absent", "lacks the code (before 0.17 wheels lack `megatron.training`)", False
    ),
    NOT_RUN: Meaning(NOT_RUN, "the hazard is newer than the last run", False),
}


def recorded() -> Proven:
    """Return the verdicts of `prove` from this package's `proven.json`.
    The result maps a release or commit to a map from hazard to verdict.
    """
    findings: Proven = json.loads("\n".join(generated(PROVEN)))
    return findings


def meaning(word: str) -> Meaning:
    """Return the `Meaning` of a verdict.
    A verdict that `WORDS` lacks is a failure, which is described by the verdict's own text.
    """
    return WORDS.get(word) or Meaning(word, word, False)


def seen(hazard: Hazard, proven: Proven) -> dict[str, list[str]]:
    """Return verdict → the releases and commits with that verdict about a hazard.
    The verdicts are in the order of `WORDS`.

    There are none for a framework's hazard, because only Megatron's releases have verdicts.
    """
    if hazard.distribution != MEGATRON:
        return {}
    names: dict[str, list[str]] = {word: [] for word in WORDS}
    for name, verdicts in proven.items():
        names.setdefault(verdicts.get(hazard.id, NOT_RUN), []).append(name)
    return {word: named for word, named in names.items() if named}


def absence_from_main(hazard: Hazard, proven: Proven) -> str:
    """Say why Megatron's main, as pinned, does not have a hazard. Return "" if it has the hazard,
    if nobody has run it there, or if it is a framework's.
    """
    verdict = proven["main"].get(hazard.id, NOT_RUN) if hazard.distribution == MEGATRON else NOT_RUN
    is_absent = verdict in ("unsupported_version", "fixed_upstream", "missing_target")
    return WORDS[verdict].sentence if is_absent else ""
