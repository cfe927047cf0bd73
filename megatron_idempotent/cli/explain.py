"""Implements `explain`, which prints a hazard's case file, or finds hazards by an error message."""

from __future__ import annotations

import math
import re
from collections import Counter

from megatron_idempotent.patching.base import UnknownPatchError
from megatron_idempotent.patching.catalog import hazards
from megatron_idempotent.patching.record import GROUPS, LOUDNESS, SECTIONS, Hazard, Helper, Patch
from megatron_idempotent.patching.settings import SWITCH, unknown_id
from megatron_idempotent.patching.table import render, wrapped

from .findings import meaning, recorded, seen
from .upstream import repair_text

#: The most hazards that are listed for an error message.
_SHOWN = 5
#: The width of a case file's lines, without their indent.
_LINE = 96
_WORD = re.compile(r"[a-z][a-z0-9]{2,}")


def explain(text: str, *, upstream: bool = False) -> int:
    """Print a hazard's case file, the hazards that may cause an error message, or all hazards.

    Args:
        text: an id, or the name of its file; words of an error message or a symptom; or "".
        upstream: True to print the repair of upstream's own code in place of the case file.

    Returns:
        The exit code, 0.

    Raises:
        UnknownPatchError: no case file has that id, or a title or symptom like the text.
        ValueError: `upstream` is given without an id.
    """
    listed = hazards()
    if as_id(text) in listed:
        hazard = listed[as_id(text)]
        print(repair_text(hazard) if upstream else case_text(hazard))
        return 0
    if upstream and len(text.split()) != 1:
        raise ValueError("--upstream prints the repair of one hazard: name its id")
    rows = [(hazard.id, hazard.summary) for hazard in listed.values()]
    if text:
        if len(text.split()) == 1:
            raise UnknownPatchError(unknown_id(text, "explain", tuple(listed)))
        ids = nearest(text)
        if not ids:
            raise UnknownPatchError(
                f"no case file's title or symptom speaks of {text!r}: `megatron-idempotent "
                "explain` lists all titles"
            )
        print(f"No hazard has the id {text!r}. By title and symptom the nearest are:\n")
        rows = [(name, listed[name].summary) for name in ids]
    print(render(("id", "on stock Megatron"), rows))
    return 0


def case_text(patch: Hazard) -> str:
    """Return a hazard's case file as text for a terminal, with the facts of its record and the
    releases on which it was seen.
    """
    sections = patch.case_file
    lines = [patch.id, "=" * len(patch.id), "", sections[""], ""]
    for name in SECTIONS:
        lines += [f"{name}:", *(f"    {line}" for line in sections[name].splitlines()), ""]
    seen_lines = [
        line
        for word, names in seen(patch, recorded()).items()
        for line in wrapped(f"{meaning(word).sentence}: {', '.join(names)}", _LINE)
    ]
    for name, values in {**facts(patch), "Where it was seen": seen_lines}.items():
        if values:
            lines += [f"{name}:", *(f"    {value}" for value in values), ""]
    lines += ["See it:", f"    megatron-idempotent prove {patch.id}"]
    return "\n".join(lines)


def facts(hazard: Hazard) -> dict[str, list[str]]:
    """Return title → facts, for facts of a hazard's record that its case file does not state."""
    of_patch: dict[str, list[str]] = {}
    if isinstance(hazard, Patch):
        of_patch = {
            "Targets": [target.address for target in hazard.targets],
            "Promise, together with others": [GROUPS[name].promise for name in hazard.groups],
        }
    return {
        "Versions": [f"{hazard.distribution} {hazard.versions}"],
        "Silent or loud": [f"{hazard.loudness}: {LOUDNESS[hazard.loudness]}"],
        "Answer": [_answer(hazard)],
        **of_patch,
        "Shown with these patches on": [*hazard.given],
        "Its program needs": [*hazard.needs],
    }


def _answer(hazard: Hazard) -> str:
    if isinstance(hazard, Helper):
        return f"call {hazard.answer}"
    if not isinstance(hazard, Patch):
        return f"{hazard.answer}: nothing here repairs it"
    if hazard.default:
        return f"{hazard.answer}, on by default"
    check = f", or set {SWITCH}_CHECK=1" if hazard.debug else ""
    return f'{hazard.answer}: name it, `apply(only=["{hazard.id}"])`{check}'


def as_id(text: str) -> str:
    """Return the id of the hazard whose case file has the name `text`; else `text` itself."""
    dashed = text.removesuffix(".py").replace("_", "-")
    return dashed if dashed in hazards() else text


def nearest(text: str) -> list[str]:
    """Return the ids of hazards that may cause a message or symptom, the most likely first.

    First come hazards whose reproduction raises an error like the text, or whose title or symptom
    contains it. Others share words with it that occur in few case files.
    """
    texts = {name: _spoken(hazard) for name, hazard in hazards().items()}
    words_of = {name: set(_WORD.findall(spoken)) for name, spoken in texts.items()}
    files_with = Counter(word for words in words_of.values() for word in words)
    weights = {
        word: math.log(len(words_of) / files_with[word])
        for word in set(_WORD.findall(text.lower()))
        if 0 < files_with[word] <= len(words_of) / 4
    }
    phrase = " ".join(re.sub(r"^\S*(Error|Exception): ", "", text).lower().split())
    scores = {}
    for name, words in words_of.items():
        shared = weights.keys() & words
        score = sum(weights[word] for word in shared) * (len(shared) > 1)
        hazard = hazards()[name]
        quotes = (phrase in texts[name], phrase in hazard.summary.lower(), hazard.raises(text))
        score += sum(quotes) * (1 + sum(weights.values()))  # more than all words together
        if score:
            scores[name] = score
    best = max(scores.values(), default=0)
    ids = [name for name in scores if scores[name] >= best / 2]
    return sorted(ids, key=lambda name: -scores[name])[:_SHOWN]


def _spoken(hazard: Hazard) -> str:
    """Return a hazard's id, summary, title and symptom as one lower-case text for a word search."""
    sections = hazard.case_file
    spoken = f"{hazard.id} {hazard.summary} {sections['']} {sections['Symptom']}"
    return " ".join(spoken.lower().split())
