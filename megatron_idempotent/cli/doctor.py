"""Implements `doctor`, which says what would be applied here, and why.

It imports neither torch nor Megatron, unless it is to look at others who patch Megatron, too.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator

from megatron_idempotent.lazy import untried_torch
from megatron_idempotent.patching import api, import_hooks
from megatron_idempotent.patching.api import apply
from megatron_idempotent.patching.catalog import (
    MEGATRON,
    OPEN,
    lost,
    patches,
    untried,
    without_case_file,
)
from megatron_idempotent.patching.decide import installed, supported
from megatron_idempotent.patching.overview import overview
from megatron_idempotent.patching.report import Row
from megatron_idempotent.patching.source import locate
from megatron_idempotent.patching.table import terminal_width
from megatron_idempotent.patching.trees import contents

from .doors import hook_here

#: Those who replace functions of Megatron → what does so, for `--beside`.
_NEIGHBOURS = {
    "liger_kernel": "liger_kernel.megatron:apply_liger_kernel_to_megatron",
    "mcore_bridge": "mcore_bridge",
    "mindspeed": "mindspeed.megatron_adaptor",
}


def doctor(*, as_json: bool, beside: str | None = None) -> int:
    """Print one line that sums up, and then the patches in groups, or all rows as JSON.

    Args:
        as_json: print JSON.
        beside: a module that patches Megatron when it is imported, or `module:function` to call.
            Patches are applied before that, and the rows say who stands at their functions.

    Returns:
        The exit code: 1 if a patch failed, drifted or is in conflict, so that a person has to look;
        else 0.

    Raises:
        ValueError: there is no such module or function, or importing it fails.
    """
    if beside is None:
        report = apply(dry_run=True)
    else:
        module, _, function = beside.partition(":")
        apply()
        try:
            found = importlib.import_module(module)
            if function:
                getattr(found, function)()
        except (ImportError, AttributeError) as error:
            raise ValueError(f"--beside {beside}: {type(error).__name__}: {error}") from error
        report = api.report()
    if as_json:
        print(json.dumps([row.as_dict() | {"files": _files(row)} for row in report], indent=2))
    else:
        print(overview(report, terminal_width(), dry_run=beside is None, notes=notes()))
    return 1 if report.problems else 0


def notes() -> Iterator[str]:
    """Yield what there is to say of this environment beside its patches, a sentence each."""
    yield from _commit()
    yield from map(without_case_file, lost())
    yield from filter(None, [untried_torch(), hook_here()])
    for name, what in _NEIGHBOURS.items():
        if import_hooks.find(name) is not None and name not in sys.modules:
            yield f"{name} patches Megatron, too: `doctor --beside {what}` says where"


def _commit() -> list[str]:
    """Return a line that says so if the installed Megatron is no release that was run."""
    version = installed(MEGATRON)
    if version is not None and supported(version, untried(), OPEN):
        return [f"Nobody has run {version.text}: its functions' contents decided about each patch"]
    found = contents(patches().values())
    if found is None or not found.others:
        return []
    which = f"{found.others} of the {found.functions} functions that patches wrap"
    return [
        f"Megatron says {found.version}, but {which} are not that release's: a development commit, "
        "or a patched one"
    ]


def _files(row: Row) -> dict[str, str | None]:
    return {
        target: None if (path := locate(target.partition(":")[0])) is None else str(path)
        for target in row.targets
    }
