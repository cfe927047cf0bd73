"""Decide whether Triton's kernels run: on GPUs that have what they need, or where one says so.

An argument of the call comes first, then the environment variable `MEGATRON_IDEMPOTENT_TRITON`
(1 or 0), then the device. On a CPU kernels run only when asked for, in Triton's interpreter.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

VARIABLE = "MEGATRON_IDEMPOTENT_TRITON"
#: Triton's own switch: kernels run in NumPy.
INTERPRETER = "TRITON_INTERPRET"


def uses_triton(
    caller: str, device: torch.device, *, asked: bool | None, capability: tuple[int, int]
) -> bool:
    """Decide it for tensors on this device, where kernels want this compute capability.

    Raises:
        ValueError: kernels were asked for where they cannot run, or the variable is neither.
    """
    forced = asked if asked is not None else _from_environment()
    if forced is False or (forced is None and device.type != "cuda"):
        return False
    missing = _missing(device, capability)
    if missing and forced:
        how = "triton=True" if asked else f"{VARIABLE}=1"
        raise ValueError(f"{caller} was asked for Triton's kernels ({how}), and {missing}")
    return not missing


def _from_environment() -> bool | None:
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={value!r} in the environment: 1, 0 or nothing")
    return None if not value else value == "1"


def _missing(device: torch.device, capability: tuple[int, int]) -> str | None:
    """Say what the kernels lack there; None if nothing."""
    if device.type == "cuda":
        found = _capability(device.index or 0)
        if found < capability:
            return f"{device} has compute capability {found}, they want {capability}"
    elif os.environ.get(INTERPRETER) != "1":
        return f"{device} is no GPU: set {INTERPRETER}=1 before Triton is imported, or drop it"
    return None if _is_installed() else "Triton is not installed"


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
