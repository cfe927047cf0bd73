"""Chooses layouts so that each two words are together in one of them, and apart in others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .layouts import layout

#: The words of which a layout has one, or none.
_CHOICES = (
    ("dp2",),
    ("tp2",),
    ("pp2", "vpp2"),
    ("cp2",),
    ("packs",),
    ("fp32", "bf16", "fp16"),
    ("nosp",),
    ("distopt",),
    ("nooverlap",),
    ("moe", "ep2"),
    ("etp1", "etp2"),
    ("mtp",),
    ("tied",),
    ("sequences",),
)
#: More ranks of one kind leave no room for another.
_FOUR = ("dp4", "tp4", "pp4", "cp4", "ep4")


def grid() -> list[str]:
    """Return names of layouts, few and always the same, that cover all pairs of choices.

    For each two words that fit together there is a layout with both, with the one alone and with
    neither. A fault seldom needs more than two; all layouts that fit on four ranks are thousands.
    Four ranks of one kind are a layout by themselves. FSDP2 is left out, because it is for adapters
    of its own.

    Example: `certify("mine:Adapter", layouts=grid(), checks=["split-step"])`.
    """
    names, masks = [], []
    bits: dict[object, int] = {}
    for picked in sorted(_fitting(), key=_is_late):
        pairs = itertools.combinations(enumerate(picked), 2)
        names.append("-".join(filter(None, picked)))
        masks.append(sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs))
        if not _is_late(picked):
            early, first = len(names), (1 << len(bits)) - 1
    chosen, covered = [], 0
    for candidates, wanted in ((early, first), (len(names), (1 << len(bits)) - 1)):
        while missing := wanted & ~covered:
            best = max(range(candidates), key=lambda index: (masks[index] & missing).bit_count())
            chosen.append(names[best])
            covered |= masks[best]
    return [*chosen, *_FOUR]


def _is_late(picked: tuple[str, ...]) -> bool:
    """Return whether the words are covered after all others.

    Packs of auxiliary losses came later. So the other layouts are those that were run before.
    """
    words = {word.rstrip("0123456789") for word in picked}
    return bool(
        (words & {"moe", "ep", "etp", "mtp"} and "packs" in words) or {"mtp", "cp"} <= words
    )


def _fitting() -> Iterator[tuple[str, ...]]:
    """Yield a word of each choice, or "" for none, where they make a layout."""
    for picked in itertools.product(*(("", *words) for words in _CHOICES)):
        if "nosp" in picked and "tp2" not in picked:
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
