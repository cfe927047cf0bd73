"""Version-gated patches that make NVIDIA Megatron's train path safe to call again.

    import megatron_idempotent
    megatron_idempotent.apply()

Importing the package changes nothing and pulls in neither torch nor Megatron; nor does `apply()`,
whose patches land when Megatron is imported, or at once where it already is.
"""

from __future__ import annotations

import os
import sys

if not os.path.isdir(os.path.join(__path__[0], "patches")):
    from .checkout import load_case_files

    load_case_files(__path__)

from .engine.control import apply, report, revert
from .engine.errors import PatchError, UnknownPatchError, VerificationError
from .engine.report import Report, Row

TYPE_CHECKING = False  # importing typing would cost a third of apply()
if TYPE_CHECKING:
    from typing import Any

    from .engine.scoped import patched
    from .engine.verify import verify
    from .fp8.alignment import TokenAlignment, token_alignment
    from .fp8.blockwise import dequantize_blockwise, quantize_blockwise
    from .fp8.export import Fp8Export
    from .fp8.gates import fp8_settings
    from .fp8.packing import Pack
    from .fp8.padding import recover_left_padding, remove_left_padding
    from .logprobs.api import TokenStats, token_logprobs
    from .logprobs.model import logprobs_processor, model_logprobs
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
    "Fp8Export",
    "Pack",
    "PatchError",
    "ReplicaMismatchError",
    "Report",
    "Row",
    "Sampling",
    "SessionPoisoned",
    "StepLoss",
    "StepResult",
    "TokenAlignment",
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
    "dequantize_blockwise",
    "ensure_initialized",
    "ensure_params_synced",
    "fp8_settings",
    "guarded_window",
    "logprobs_processor",
    "model_logprobs",
    "patched",
    "quantize_blockwise",
    "rebuild_process_groups",
    "recover_left_padding",
    "remove_left_padding",
    "report",
    "revert",
    "seed_all",
    "shift_targets",
    "token_alignment",
    "token_logprobs",
    "verify",
    "wire_train_config",
]

# Loaded on first use: most belong to programs that have torch and Megatron anyway.
_LAZY = {
    "FSDPTrainStep": "step.fsdp",
    "Fp8Export": "fp8.export",
    "Pack": "fp8.packing",
    "ReplicaMismatchError": "window.check",
    "Sampling": "logprobs.sampling",
    "SessionPoisoned": "window.agreement",
    "StepLoss": "step.records",
    "StepResult": "step.records",
    "TokenAlignment": "fp8.alignment",
    "TokenStats": "logprobs.api",
    "TrainStep": "step.megatron",
    "WindowAborted": "window.agreement",
    "abort_window": "window.abort",
    "accumulation_window": "window.accumulation",
    "agree": "window.agreement",
    "context_parallel_part": "logprobs.targets",
    "dequantize_blockwise": "fp8.blockwise",
    "ensure_initialized": "window.setup",
    "ensure_params_synced": "window.params",
    "fp8_settings": "fp8.gates",
    "guarded_window": "window.guard",
    "logprobs_processor": "logprobs.model",
    "model_logprobs": "logprobs.model",
    "patched": "engine.scoped",
    "quantize_blockwise": "fp8.blockwise",
    "rebuild_process_groups": "window.rebuild",
    "recover_left_padding": "fp8.padding",
    "remove_left_padding": "fp8.padding",
    "seed_all": "wiring",
    "shift_targets": "logprobs.targets",
    "token_alignment": "fp8.alignment",
    "token_logprobs": "logprobs.api",
    "verify": "engine.verify",
    "wire_train_config": "wiring",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        from .missing import naming_the_remedy

        with naming_the_remedy(f"{__name__}.{name}"):
            return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(type(sys)):  # type: ignore[misc]  # the type of modules, without importing types
    """This module, which pickles as a reference also where the package is pickled by value.

    cloudpickle copies a module's globals, which lead back to the module, without end.
    """

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return __import__, (self.__name__,)


sys.modules[__name__].__class__ = _Package
