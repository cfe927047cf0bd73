"""Decides if Triton's kernels run: on GPUs that can run them, or where somebody asks for them.

An argument of the call decides first, then the environment variable `MEGATRON_IDEMPOTENT_TRITON`
(1 or 0), then the device. On a CPU kernels run only when asked for, in Triton's interpreter.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

VARIABLE = "MEGATRON_IDEMPOTENT_TRITON"
#: The variable that makes Triton run kernels on a CPU, in NumPy.
INTERPRETER = "TRITON_INTERPRET"


def uses_triton(
    caller: str, device: torch.device, *, triton: bool | None, capability: tuple[int, int]
) -> bool:
    """Decide whether Triton's kernels run for tensors on a device; return True if they do.

    Args:
        caller: the name of the function that asks, for messages.
        device: the device of the tensors.
        triton: the call's argument, which decides if it is True or False; with None the variable
            decides, or the device if the variable is unset.
        capability: the least compute capability that the kernels need, such as (9, 0).

    Raises:
        ValueError: kernels are demanded and cannot run there, or the variable is not 0 or 1.
    """
    forced = triton if triton is not None else _from_environment()
    if forced is False or (forced is None and device.type != "cuda"):
        return False
    missing = _missing(device, capability)
    if missing and forced:
        switch = "triton=True" if triton else f"{VARIABLE}=1"
        raise ValueError(
            f"{caller} was asked for Triton's kernels ({switch}), and {missing}; drop {switch} to "
            "run without them"
        )
    return not missing


def _from_environment() -> bool | None:
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE} is {value!r} in the environment; allowed: 1, 0 or unset")
    return None if not value else value == "1"


def _missing(device: torch.device, least: tuple[int, int]) -> str | None:
    """Return what Triton's kernels lack to run on a device, as a text; None if they can run."""
    if device.type == "cuda":
        capability = _capability(device.index or 0)
        if capability < least:
            return f"{device} has compute capability {capability}, and they need {least}"
    elif os.environ.get(INTERPRETER) != "1":
        return f"{device} is no GPU: set {INTERPRETER}=1 before Triton is imported"
    return None if _is_installed() else "Triton is not installed"


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
