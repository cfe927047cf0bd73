"""Updates `texts.txt`: digests of functions' texts, by which `apply()` avoids parsing them.

It has the text of a function in a source tree if that parses to a body in `reviewed.txt`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import _checkout  # noqa: F401  # before what it finds

from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.record import reviewed
from megatron_idempotent.patching.source import cut, hash_of, parse_function
from megatron_idempotent.patching.trees import SourceTree


def renewed_texts(lines: Sequence[str], trees: Iterable[SourceTree]) -> list[str]:
    """Return the updated lines of `texts.txt`: a digest of a function's text, its body's hash.
    Functions in `trees` whose bodies are reviewed are added; lines of other bodies are dropped.
    """
    bodies = {name for names in reviewed().bodies.values() for name in names}
    texts = dict(line.split() for line in lines)
    texts = {digest: name for digest, name in texts.items() if name in bodies}
    functions = {(t.module, t.qualname) for patch in patches().values() for t in patch.targets}
    for tree in trees:
        for module, qualname in functions:
            text = tree.text(module)
            piece = None if text is None else cut(text, qualname)
            function = None if text is None else parse_function(text, qualname)
            if piece is None or function is None:
                continue
            name = hash_of(function)
            if name in bodies:
                texts[piece.digest] = name
    return [f"{digest} {name}" for digest, name in sorted(texts.items())]
