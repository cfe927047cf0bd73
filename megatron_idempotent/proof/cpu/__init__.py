"""Runs the real megatron-core on a CPU: answers its calls into `torch.cuda`, and makes gloo ranks.

    from megatron_idempotent.proof import cpu

    with cpu.enabled():                      # this process
        ...
    losses = cpu.run_ranks(2, train, 10)     # fresh processes, runtime on, gloo group up

Nothing is emulated before `enable()`, everything is back as it was after `disable()`, and
neither importing this package nor the pytest plugin imports torch. What is emulated:

"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_idempotent.lazy import attributes

from .table import EMULATED

if TYPE_CHECKING:
    from .errors import (
        NoDeviceError,
        NotEmulatedError,
        PlacementError,
        RankError,
        RankFailure,
        RankTimeout,
    )
    from .pool import PROGRAM_PRELOAD, RankPool, run_ranks
    from .runtime import disable, enable, enabled, is_enabled

# Resolved at first use: every pytest run of everybody who installs us loads this package.
_HOMES = {
    "NoDeviceError": "errors",
    "NotEmulatedError": "errors",
    "PROGRAM_PRELOAD": "pool",
    "PlacementError": "errors",
    "RankError": "errors",
    "RankFailure": "errors",
    "RankPool": "pool",
    "RankTimeout": "errors",
    "disable": "runtime",
    "enable": "runtime",
    "enabled": "runtime",
    "is_enabled": "runtime",
    "run_ranks": "pool",
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


__getattr__ = attributes(__name__, _HOMES)
