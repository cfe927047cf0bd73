"""Version-gated patches that make NVIDIA Megatron's train path safe to call again.

    import megatron_idempotent
    megatron_idempotent.apply()

Importing the package changes nothing and pulls in neither torch nor Megatron; nor does `apply()`,
whose patches land when Megatron is imported, or at once where it already is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .engine.control import apply, patched, report, revert
from .engine.errors import PatchError, UnknownPatchError, VerificationError
from .engine.report import Report, Row
from .engine.verify import verify

if TYPE_CHECKING:
    from .logprobs.api import TokenStats, token_logprobs
    from .logprobs.sampling import Sampling
    from .logprobs.targets import context_parallel_part, shift_targets
    from .step.fsdp import FSDPTrainStep
    from .step.megatron import TrainStep
    from .step.records import StepLoss, StepResult
    from .window.abort import abort_window
    from .window.accumulation import accumulation_window
    from .window.agreement import SessionPoisoned, WindowAborted, agree
    from .window.check import ReplicaMismatchError
    from .window.guard import guarded_window
    from .window.params import ensure_params_synced
    from .window.rebuild import rebuild_process_groups
    from .window.setup import ensure_initialized
    from .wiring import seed_all, wire_train_config

__version__ = "0.1.0"

__all__ = [
    "FSDPTrainStep",
    "PatchError",
    "ReplicaMismatchError",
    "Report",
    "Row",
    "Sampling",
    "SessionPoisoned",
    "StepLoss",
    "StepResult",
    "TokenStats",
    "TrainStep",
    "UnknownPatchError",
    "VerificationError",
    "WindowAborted",
    "abort_window",
    "accumulation_window",
    "agree",
    "apply",
    "context_parallel_part",
    "ensure_initialized",
    "ensure_params_synced",
    "guarded_window",
    "patched",
    "rebuild_process_groups",
    "report",
    "revert",
    "seed_all",
    "shift_targets",
    "token_logprobs",
    "verify",
    "wire_train_config",
]

# Loaded on first use, because they belong to programs that have torch and Megatron anyway.
_LAZY = {
    "FSDPTrainStep": "step.fsdp",
    "ReplicaMismatchError": "window.check",
    "Sampling": "logprobs.sampling",
    "SessionPoisoned": "window.agreement",
    "StepLoss": "step.records",
    "StepResult": "step.records",
    "TokenStats": "logprobs.api",
    "TrainStep": "step.megatron",
    "WindowAborted": "window.agreement",
    "abort_window": "window.abort",
    "accumulation_window": "window.accumulation",
    "agree": "window.agreement",
    "context_parallel_part": "logprobs.targets",
    "ensure_initialized": "window.setup",
    "ensure_params_synced": "window.params",
    "guarded_window": "window.guard",
    "rebuild_process_groups": "window.rebuild",
    "seed_all": "wiring",
    "shift_targets": "logprobs.targets",
    "token_logprobs": "logprobs.api",
    "wire_train_config": "wiring",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
