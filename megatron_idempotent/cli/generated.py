"""Writes the files of `patches/_generated/`, each with a head that says which command does so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_idempotent.patching.base import INDEX, generated_folder
from megatron_idempotent.patching.record import FILE
from megatron_idempotent.patching.releases import TABLE
from megatron_idempotent.patching.source import TEXTS
from megatron_idempotent.patching.statements import ACCEPTED
from megatron_idempotent.patching.surroundings import READS

#: The folder, in a checkout or as it is installed.
FOLDER = Path(generated_folder())

_CASEBOOK = "`python -m megatron_idempotent.cli.casebook`"
_ACCEPT = "`megatron-idempotent drift PATH --accept ID`"
HEADS: Mapping[str, str] = {
    INDEX: f"""\
# All hazards, with what apply() has to know of a patch, and the first release that nobody has run.
# Written by {_CASEBOOK}; do not edit.
""",
    READS: f"""\
# What the wrappers of each patch read, call or set of upstream, and what has to bind it: a
# module, or a class in it. `.name`: it is set on objects of another class. `name!`: wrappers
# set it. `name(keyword)`: they pass that. `name[hash]`: they take its result apart, which these
# statements make. `name?`: commits do without it that a person has read. keeps: the wrappers
# keep state of ours on upstream's objects.
# Written by {_CASEBOOK} and {_ACCEPT}; do not edit.
""",
    TABLE: f"""\
# A line for each module that patches read: a release, and the SHA-256 of the file from it on. Then
# a line for each patch, with a character for each release: + it lands, - the release is not in its
# range, f upstream has repaired the hazard, ? its bodies are read each time.
# Written by {_CASEBOOK} with the paths of wheels; do not edit.
""",
    TEXTS: f"""\
# Texts of functions that need not be parsed: the digest of the text, and of the body that it has.
# Written by {_CASEBOOK} with the paths of wheels and commits; do not edit.
""",
    FILE: f"""\
# Bodies of upstream's functions that a person has read: the hash of the code, the releases
# or commits that have it, and below it the patches for which it was read. A part is what one
# patch relies on in a body. Written by {_ACCEPT}.
""",
    ACCEPTED: f"""\
# The bodies in {FILE}: the hash of each, and four characters for each of its statements.
# Written by {_ACCEPT}; do not edit.
""",
}


def write(folder: Path, name: str, lines: Iterable[str]) -> None:
    """Replace one of the files in the folder by its head and these lines."""
    rewrite(folder / name, HEADS[name] + "".join(f"{line}\n" for line in lines))


def rewrite(path: Path, text: str) -> None:
    """Give a file this text, and leave one alone that has it: make goes by the time of a change."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    # Beside it and renamed: an interrupted write must not leave half of the reviews.
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def content(folder: Path, name: str) -> list[str]:
    """Return the lines of one of the files in the folder, without its head."""
    lines = (folder / name).read_text(encoding="ascii").splitlines()
    return [line for line in lines if not line.startswith("#")]
