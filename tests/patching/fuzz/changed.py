"""The installed Megatron with changed sources, and what the engine decides of it as a commit."""

from __future__ import annotations

import functools
from collections.abc import Callable

from megatron_idempotent.cli.trees import installed_trees
from megatron_idempotent.patching.base import MEGATRON
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.decide import Verdict, judge
from megatron_idempotent.patching.record import Patch
from megatron_idempotent.patching.trees import SourceTree

TREES = installed_trees()


class Changed(SourceTree):
    """The installed Megatron after a change, which takes a module and its text or None."""

    def __init__(self, change: Callable[[str, str | None], str | None]) -> None:
        vars(self).update(vars(TREES[0]), _texts={}, change=change)

    def text(self, module: str) -> str | None:
        if module not in self._texts:
            self._texts[module] = self.change(module, TREES[0].text(module))
        return self._texts[module]


def verdict(patch: Patch, tree: SourceTree) -> Verdict:
    """Return what the engine decides about a patch on the tree."""
    bodies = {t.address: tree.body(t.module, t.qualname) for t in patch.targets}
    return judge(patch, bodies, tree, None, named=False)


@functools.cache
def applied() -> list[Patch]:
    """Return the patches of Megatron that the installed one gets."""
    ours = (patch for patch in patches().values() if patch.distribution == MEGATRON)
    return [patch for patch in ours if verdict(patch, TREES[0]).status is None]
