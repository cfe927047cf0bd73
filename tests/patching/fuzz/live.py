"""Add code that goes past each patched function to a process with the real Megatron, and report.

As a script: `python live.py COUNT SEED` draws so many changes, 0 for all, and prints a line for
each that the report gets wrong, and last their number. It imports torch and every module of
Megatron that a patch is for, applies all patches, and forks a child for each change, in which the
function is held as if the program had taken it before.
"""

from __future__ import annotations

import importlib
import logging
import random
import sys
import types
import warnings
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from forks import forked
from past import CLASSES, HOLDERS, RIGHT, run

import megatron_idempotent
from megatron_idempotent.patching import import_hooks, install
from megatron_idempotent.patching.catalog import index_entries
from megatron_idempotent.patching.patch_points import PatchPoint


class Change(NamedTuple):
    """Holds one change, and what the report has to name; nothing if all is well."""

    label: str
    source: str
    site: PatchPoint
    expected: str

    def __str__(self) -> str:
        return f"{self.site.target.address}: {self.label}"


def changes() -> list[Change]:
    """Return every change of every patched function, in a fixed order."""
    every = []
    for _, site in sorted(install.state.sites.items()):
        every += [Change(k, v, site, f"{k} holds upstream's") for k, v in HOLDERS.items()]
        if isinstance(site.owner, type):
            every += [Change(k, v, site, k) for k, v in CLASSES.items()]
            every += [Change(k, v, site, "") for k, v in RIGHT.items()]
    return every


def seen(change: Change, before: dict[str, list[str]]) -> str:
    """Make the change in this process; return what is wrong with two reports, or nothing.

    `before` has the detours without it.
    """
    user, site = types.ModuleType("toy_user"), change.site
    sys.modules["toy_user"] = user
    run(change.source, user, site.original, site.owner, site.name)
    for _ in range(2):
        after = install.detours()
        expected = [change.expected] if change.expected else []
        if after.pop(site.target.address, []) != [*before.get(site.target.address, []), *expected]:
            return f"it is told as {install.detours().get(site.target.address)}"
        same_function = {
            other.target.address
            for other in install.state.sites.values()
            if other.original is site.original or site.original is other.function
        }
        heirs = {
            other.target.address
            for other in install.state.sites.values()
            if other.name == site.name and other.owner is not site.owner
        }
        others = after.keys() - before.keys() - same_function - heirs
        if others:
            return f"it is told of {sorted(others)}, too"
    return ""


def main(count: int, seed: int) -> None:
    """Draw, look and print."""
    for patch in index_entries().values():
        for target in patch.targets:
            if target.module.startswith("megatron.") and import_hooks.find(target.module):
                importlib.import_module(target.module)
    megatron_idempotent.apply()
    drawn = changes()
    if count:
        by_label: dict[str, list[Change]] = {}
        for change in drawn:
            by_label.setdefault(change.label, []).append(change)
        generator = random.Random(seed)
        drawn = [generator.choice(group) for group in by_label.values()][:count]
    before = install.detours()
    for change in drawn:
        answer = forked(lambda change=change: seen(change, before))
        if said := answer.get("error") or answer["value"]:
            print(f"{change}: {said}", flush=True)
    print(len(drawn))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    main(*map(int, sys.argv[1:]))
