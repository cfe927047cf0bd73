"""Writes `texts.txt`: which texts of functions are known, so that nothing has to be parsed.

A text is known if it was read in some tree and parsed to a body that `reviewed.txt` has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import _checkout  # noqa: F401  # before what it finds

from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.record import reviewed
from megatron_idempotent.patching.source import cut, hash_of, parse_function
from megatron_idempotent.patching.trees import SourceTree


def renewed_texts(known: Sequence[str], trees: Iterable[SourceTree]) -> list[str]:
    """Return the lines of `texts.txt`, renewed by these trees, without bodies that are gone."""
    bodies = {name for names in reviewed().bodies.values() for name in names}
    found = dict(line.split() for line in known)
    found = {digest: name for digest, name in found.items() if name in bodies}
    places = {(t.module, t.qualname) for patch in patches().values() for t in patch.targets}
    for tree in trees:
        for module, qualname in places:
            text = tree.text(module)
            piece = None if text is None else cut(text, qualname)
            function = None if text is None else parse_function(text, qualname)
            if piece is None or function is None:
                continue
            name = hash_of(function)
            if name in bodies:
                found[piece.digest] = name
    return [f"{digest} {name}" for digest, name in sorted(found.items())]
