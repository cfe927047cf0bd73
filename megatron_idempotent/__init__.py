"""Makes NVIDIA Megatron's train path safe to call again, with patches that know its versions.

    import megatron_idempotent
    megatron_idempotent.apply()

Importing the package changes nothing, and imports neither torch nor Megatron. `apply()` imports
neither too: its patches land when Megatron is imported, or at once if it already is.
"""

from __future__ import annotations

import os
import sys

if not os.path.isdir(os.path.join(__path__[0], "patches")):
    from .checkout import load_case_files

    load_case_files(__path__)

from megatron_idempotent.patching.api import apply, report, revert
from megatron_idempotent.patching.base import PatchError, UnknownPatchError, VerificationError
from megatron_idempotent.patching.report import Report, Row

TYPE_CHECKING = False  # importing typing would cost a third of apply()
if TYPE_CHECKING:
    from typing import Any

    from megatron_idempotent.fp8.blockwise import dequantize_blockwise, quantize_blockwise
    from megatron_idempotent.fp8.export import Fp8Export
    from megatron_idempotent.fp8.packing import Pack, TokenAlignment, token_alignment
    from megatron_idempotent.fp8.padding import recover_left_padding, remove_left_padding
    from megatron_idempotent.fp8.settings import fp8_settings
    from megatron_idempotent.logprobs.api import TokenStats, token_logprobs
    from megatron_idempotent.logprobs.kl import TokenKL, token_kl, topk_kl
    from megatron_idempotent.logprobs.model import logprobs_processor, model_logprobs
    from megatron_idempotent.logprobs.request import Sampling
    from megatron_idempotent.logprobs.targets import (
        context_parallel_part,
        context_parallel_whole,
        shift_targets,
    )
    from megatron_idempotent.logprobs.topk import TopK, vocab_topk
    from megatron_idempotent.megatron.replica_check import ReplicaMismatchError
    from megatron_idempotent.patching.scoped import patched
    from megatron_idempotent.patching.verify import verify
    from megatron_idempotent.step.fsdp import FSDPTrainStep
    from megatron_idempotent.step.loss import (
        POLICY_GRADIENT_NORMALIZERS,
        Receipt,
        StepCounts,
        StepLoss,
        StepResult,
    )
    from megatron_idempotent.step.megatron import TrainStep, gpt_forward, gpt_inputs
    from megatron_idempotent.step.microbatches import valid_counts
    from megatron_idempotent.step.packs import (
        all_positions,
        bin_sequences,
        own_positions,
        pack_batches,
    )
    from megatron_idempotent.step.schedule import StepSchedule
    from megatron_idempotent.window.abort import abort_window
    from megatron_idempotent.window.accumulation import accumulation_window
    from megatron_idempotent.window.agreement import SessionPoisoned, WindowAborted, agree
    from megatron_idempotent.window.guard import guarded_window
    from megatron_idempotent.window.params import ensure_params_synced
    from megatron_idempotent.window.rebuild import rebuild_process_groups
    from megatron_idempotent.window.setup import ensure_initialized, seed_all, wire_train_config

__version__ = "0.1.0"

__all__ = [
    "POLICY_GRADIENT_NORMALIZERS",
    "FSDPTrainStep",
    "Fp8Export",
    "Pack",
    "PatchError",
    "Receipt",
    "ReplicaMismatchError",
    "Report",
    "Row",
    "Sampling",
    "SessionPoisoned",
    "StepCounts",
    "StepLoss",
    "StepResult",
    "StepSchedule",
    "TokenAlignment",
    "TokenKL",
    "TokenStats",
    "TopK",
    "TrainStep",
    "UnknownPatchError",
    "VerificationError",
    "WindowAborted",
    "abort_window",
    "accumulation_window",
    "agree",
    "all_positions",
    "apply",
    "bin_sequences",
    "context_parallel_part",
    "context_parallel_whole",
    "dequantize_blockwise",
    "ensure_initialized",
    "ensure_params_synced",
    "fp8_settings",
    "gpt_forward",
    "gpt_inputs",
    "guarded_window",
    "logprobs_processor",
    "model_logprobs",
    "own_positions",
    "pack_batches",
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
    "token_kl",
    "token_logprobs",
    "topk_kl",
    "valid_counts",
    "verify",
    "vocab_topk",
    "wire_train_config",
]

# Loaded on first use: most belong to programs that have torch and Megatron anyway.
_LAZY = {
    "FSDPTrainStep": "step.fsdp",
    "Fp8Export": "fp8.export",
    "Pack": "fp8.packing",
    "POLICY_GRADIENT_NORMALIZERS": "step.loss",
    "Receipt": "step.loss",
    "ReplicaMismatchError": "megatron.replica_check",
    "Sampling": "logprobs.request",
    "SessionPoisoned": "window.agreement",
    "StepCounts": "step.loss",
    "StepLoss": "step.loss",
    "StepResult": "step.loss",
    "StepSchedule": "step.schedule",
    "TokenAlignment": "fp8.packing",
    "TokenKL": "logprobs.kl",
    "TokenStats": "logprobs.api",
    "TopK": "logprobs.topk",
    "TrainStep": "step.megatron",
    "WindowAborted": "window.agreement",
    "abort_window": "window.abort",
    "accumulation_window": "window.accumulation",
    "agree": "window.agreement",
    "all_positions": "step.packs",
    "bin_sequences": "step.packs",
    "context_parallel_part": "logprobs.targets",
    "context_parallel_whole": "logprobs.targets",
    "dequantize_blockwise": "fp8.blockwise",
    "ensure_initialized": "window.setup",
    "ensure_params_synced": "window.params",
    "fp8_settings": "fp8.settings",
    "gpt_forward": "step.megatron",
    "gpt_inputs": "step.megatron",
    "guarded_window": "window.guard",
    "logprobs_processor": "logprobs.model",
    "model_logprobs": "logprobs.model",
    "own_positions": "step.packs",
    "pack_batches": "step.packs",
    "patched": "patching.scoped",
    "quantize_blockwise": "fp8.blockwise",
    "rebuild_process_groups": "window.rebuild",
    "recover_left_padding": "fp8.padding",
    "remove_left_padding": "fp8.padding",
    "seed_all": "window.setup",
    "shift_targets": "logprobs.targets",
    "token_alignment": "fp8.packing",
    "token_kl": "logprobs.kl",
    "token_logprobs": "logprobs.api",
    "topk_kl": "logprobs.kl",
    "valid_counts": "step.microbatches",
    "verify": "patching.verify",
    "vocab_topk": "logprobs.topk",
    "wire_train_config": "window.setup",
}


def __getattr__(name: str) -> Any:
    from .lazy import attributes  # not before it is needed: `apply()` does without

    return attributes(__name__, _LAZY)(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(type(sys)):  # type: ignore[misc]  # the type of modules, without importing types
    """Makes this module pickle as a reference even if the package is pickled by value.

    cloudpickle would copy the module's globals, which lead back to the module, without end.
    """

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return __import__, (self.__name__,)


sys.modules[__name__].__class__ = _Package
