"""Applies the patches in programs that nobody edits: through their own options, or by the hook."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # a process that never imports Megatron pays for this module
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from .patching.report import Report

PACKAGES = frozenset(
    {
        *(
            "mcore_adapter",
            "mcore_bridge",
            "megatron",
            "miles",
            "nemo_rl",
            "nvidia_resiliency_ext",
            "roll",
        ),
        *("skyrl", "slime", "swift", "verl"),
    }
)
"""The top-level packages that have patches. The first import of one applies all patches."""


def init(args: object = None) -> Report:
    """Apply the patches.
    It is an entry point for frameworks that call a function named by their user.

    The first training call of a job then checks that all of its ranks have them. slime and miles
    take `--custom-megatron-init-path megatron_idempotent.init`.

    Args:
        args: what the framework passes, such as the parsed command line; it is not read.

    Returns:
        The report of `apply()`.

    Raises:
        PatchError, UnknownPatchError, ValueError: as from `apply()`.
    """
    from .patching.api import apply
    from .patching.install import state

    report = apply()
    if state.selection is not None:
        state.verify_within = state.selection.settings.verify_within
    for row in report.problems:
        _print(f"{row.id}: {row.status} on {row.version} ({row.reason})")
    return report


def watch() -> None:
    """Apply the patches when this process first imports one of the packages in `PACKAGES`.
    Apply them at once if it has imported one already.

    `MEGATRON_IDEMPOTENT=0` turns all of them off. Safe to call any number of times.
    """
    if not PACKAGES.isdisjoint(sys.modules):
        _apply()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch:
    """Import finder that applies the patches at the first import of a package that has patches.

    At Python's start the path is not complete: it lacks the script's own folder, and the folders of
    later `.pth` files. So nothing is decided before such an import. The finder stays in
    `sys.meta_path` afterwards: taking it out during an import would make that import skip the
    next finder.
    """

    waits = True

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self.waits or fullname not in PACKAGES:
            return None
        self.waits = False
        _apply()
        # `apply()` has put its own finder before this one, and this import is past it already.
        from importlib.util import find_spec

        return find_spec(fullname)


def _apply() -> None:
    try:
        init()
    except Exception as error:
        # verl logs an error of a plugin at debug level only.
        _print(f"no patch is in place: {type(error).__name__}: {error}")
        raise


def _print(text: str) -> None:
    print(f"megatron-idempotent: {text}", file=sys.stderr, flush=True)
