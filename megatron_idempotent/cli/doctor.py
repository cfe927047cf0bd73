"""Implements `doctor`, which lists the patches that would be applied here, and the reasons.

It imports neither torch nor Megatron, unless `--beside` names another package that patches
Megatron.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator

from megatron_idempotent.lazy import untried_torch
from megatron_idempotent.patching import api, import_hooks
from megatron_idempotent.patching.api import apply
from megatron_idempotent.patching.base import generated
from megatron_idempotent.patching.catalog import lost, without_case_file
from megatron_idempotent.patching.decide import is_older_than_all
from megatron_idempotent.patching.overview import overview
from megatron_idempotent.patching.releases import TABLE, OnPath, Table, compared
from megatron_idempotent.patching.rows import Row
from megatron_idempotent.patching.source import locate
from megatron_idempotent.patching.table import terminal_width

from .hook import hook_here

#: A package that replaces functions of Megatron → the argument of `--beside` for it.
_NEIGHBOURS = {
    "liger_kernel": "liger_kernel.megatron:apply_liger_kernel_to_megatron",
    "mcore_bridge": "mcore_bridge",
    "mindspeed": "mindspeed.megatron_adaptor",
}

#: The most files that one line names.
_NAMED = 3


def doctor(*, as_json: bool, neighbour: str | None = None) -> int:
    """Print the patches that apply to the installed Megatron: a line of summary and patches in
    groups, or all rows as JSON.

    Args:
        as_json: True to print JSON.
        neighbour: another package's module that patches Megatron when it is imported, or
            `module:function` to call. It runs after our patches are applied, and the rows name the
            packages that wrap the same functions.

    Returns:
        The exit code: 1 if a patch failed, drifted or is in conflict, or if the installed Megatron
        gets no patch; else 0.

    Raises:
        ValueError: `neighbour` names no module or function, or importing it fails.
    """
    if neighbour is None:
        report = apply(dry_run=True)
    else:
        apply()
        _patch_by(neighbour)
        report = api.report()
    nothing = api.nothing_lands(report)
    if as_json:
        print(json.dumps([row.as_dict() | {"files": _files(row)} for row in report], indent=2))
    else:
        lines = [*filter(None, [nothing]), *notes()]
        print(
            overview(
                report, report.incomplete, terminal_width(), dry_run=neighbour is None, notes=lines
            )
        )
    return 1 if report.problems or nothing else 0


def _patch_by(neighbour: str) -> None:
    """Import the module that `--beside` names, another package that patches Megatron.
    For `module:function` also call the function.

    Raises:
        ValueError: the module or function does not exist, or the module cannot be imported.
    """
    name, _, function = neighbour.partition(":")
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"--beside {neighbour}: {name!r} is no module: write MODULE[:FUNCTION]")
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        above = [name.rsplit(".", count)[0] for count in range(name.count(".") + 1)]
        reason = f"importing {name} raises {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name in above:
            reason = (
                f"no module {error.name!r} on the path of {sys.executable}: write "
                "MODULE[:FUNCTION] as in an import statement, and set PYTHONPATH to the folder "
                "that holds it"
            )
        raise ValueError(f"--beside {neighbour}: {reason}") from error
    if function:
        if not callable(getattr(module, function, None)):
            raise ValueError(
                f"--beside {neighbour}: the module {name} has no function {function!r}: write the "
                "one that patches Megatron, or nothing after the module if its import does so"
            )
        getattr(module, function)()


def notes() -> Iterator[str]:
    """Yield sentences about this environment: Megatron's commit, torch, the hook, other patchers.
    Other patchers are packages that patch Megatron, too.
    """
    yield from _commit()
    yield from map(without_case_file, lost())
    yield from filter(None, [untried_torch(), hook_here()])
    for name, patcher in _NEIGHBOURS.items():
        if import_hooks.find(name) is not None and name not in sys.modules:
            yield f"{name} patches Megatron, too: `doctor --beside {patcher}` says where"


def _commit() -> Iterator[str]:
    """Yield a sentence if the installed Megatron's files are not those of the release it claims."""
    comparison = compared()
    if comparison is None:
        return
    claimed, table = comparison.claimed.text, Table(generated(TABLE))
    if comparison.release is not None:
        if comparison.release.version != claimed:
            yield f"Megatron says {claimed}, and has the files of {comparison.release.version}"
        return
    if is_older_than_all(comparison.claimed):
        yield f"Megatron says {claimed}, which is older than every release that we have read"
        return
    release = table.release(claimed)
    if release is None:
        yield (
            f"Megatron says {claimed}, which is no release that we have read: its functions' "
            "contents decide"
        )
        return
    differing = [*release.differing(OnPath())]
    files = ", ".join(differing[:_NAMED]) + (", …" if differing[_NAMED:] else "")
    yield (
        f"Megatron says {claimed}, but {len(differing)} of the {len(release.digests)} files that "
        f"patches read are not that release's ({files}): a development commit, or a changed "
        "release. Its functions' contents decide"
    )


def _files(row: Row) -> dict[str, str | None]:
    return {
        target: None if (path := locate(target.partition(":")[0])) is None else str(path)
        for target in row.targets
    }
