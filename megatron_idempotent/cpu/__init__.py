"""The real megatron-core on a CPU: an answer to its calls into `torch.cuda`, and gloo ranks.

    from megatron_idempotent import cpu

    with cpu.enabled():                      # this process
        ...
    losses = cpu.run_ranks(2, train, 10)     # fresh processes, runtime on, gloo group up

Nothing is emulated before `enable()`, everything is back as it was after `disable()`, and
neither importing this package nor the pytest plugin imports torch. What is emulated:

"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megatron_idempotent.cpu.table import EMULATED

if TYPE_CHECKING:
    from megatron_idempotent.cpu.errors import (
        NoDeviceError,
        NotEmulatedError,
        PlacementError,
        RankError,
        RankFailure,
        RankTimeout,
    )
    from megatron_idempotent.cpu.pool import PROGRAM_PRELOAD, RankPool, run_ranks
    from megatron_idempotent.cpu.runtime import disable, enable, enabled, is_enabled

# Resolved at first use: every pytest run of everybody who installs us loads this package.
_HOMES = {
    "errors": (
        *("NoDeviceError", "NotEmulatedError", "PlacementError"),
        *("RankError", "RankFailure", "RankTimeout"),
    ),
    "pool": ("PROGRAM_PRELOAD", "RankPool", "run_ranks"),
    "runtime": ("disable", "enable", "enabled", "is_enabled"),
}

__doc__ = (__doc__ or "") + "\n".join(f"- {names}: {answer}" for names, answer in EMULATED)
__doc__ += "\n\nEvery other public name of `torch.cuda` raises `NotEmulatedError`.\n"

__all__ = [
    "PROGRAM_PRELOAD",
    "NoDeviceError",
    "NotEmulatedError",
    "PlacementError",
    "RankError",
    "RankFailure",
    "RankPool",
    "RankTimeout",
    "disable",
    "enable",
    "enabled",
    "is_enabled",
    "run_ranks",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
