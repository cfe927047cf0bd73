"""Chooses layouts so that each two words are together in one of them, and apart in others."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

from .layouts import layout

#: The words of which a layout has one, or none.
_CHOICES = (
    ("dp2", "dp4"),
    ("tp2", "tp4"),
    ("pp2", "pp4", "vpp2"),
    ("cp2", "cp4"),
    ("packs",),
    ("fp32", "bf16"),
    ("nosp",),
    ("distopt",),
    ("nooverlap",),
    ("moe", "ep2", "ep4"),
    ("etp1", "etp2"),
    ("mtp",),
    ("tied",),
)
#: Words that came later, and fit to all layouts of these. Each has layouts of its own, so that the
#: others stay as they are, with what docs/layouts.md says of them.
_LATER = ("sequences",)


def grid() -> list[str]:
    """Return names of layouts, few and always the same, that cover all pairs of choices.

    For each two words that fit together there is a layout with both, with the one alone and with
    neither. A fault seldom needs more than two; all layouts that fit on four ranks are thousands.
    FSDP2 is left out, because it is for adapters of its own.

    Example: `certify("mine:Adapter", layouts=grid(), checks=["split-step"])`.
    """
    fitting = {"-".join(filter(None, picked)): picked for picked in _fitting()}
    chosen = _covering(
        {name: itertools.combinations(enumerate(picked), 2) for name, picked in fitting.items()}
    )
    for word in _LATER:  # with each word of each choice, and with none of it
        own = {f"{name}-{word}": enumerate(picked) for name, picked in fitting.items()}
        chosen += _covering(own)
    return chosen


def _covering(candidates: Mapping[str, Iterable[object]]) -> list[str]:
    """Choose few candidates, and always the same, that have all that any of them has."""
    names = list(candidates)
    bits: dict[object, int] = {}
    masks = [
        sum(1 << bits.setdefault(each, len(bits)) for each in found)
        for found in candidates.values()
    ]
    missing, chosen = (1 << len(bits)) - 1, list[str]()
    while missing:
        best = max(range(len(names)), key=lambda index: (masks[index] & missing).bit_count())
        chosen.append(names[best])
        missing &= ~masks[best]
    return chosen


def _fitting() -> Iterator[tuple[str, ...]]:
    """Yield a word of each choice, or "" for none, where they make a layout."""
    for picked in itertools.product(*(("", *words) for words in _CHOICES)):
        if "nosp" in picked and not {"tp2", "tp4"}.intersection(picked):
            continue  # it would say nothing
        if {"fp32", "distopt"} <= set(picked):
            continue  # nor would this
        try:
            made = layout("-".join(filter(None, picked)))
        except ValueError:
            continue
        if "etp" in made.words and made.sizes["etp"] == made.sizes["tp"]:
            continue  # nor would that
        yield picked
