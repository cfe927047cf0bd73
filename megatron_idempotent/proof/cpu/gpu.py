"""Chooses the device of a pool's ranks, and readies ranks on real GPUs.

A CUDA context does not survive a fork, and neither does the driver once a process has started it.
So the launcher imports torch and Megatron, and leaves the driver alone: NVML, for which torch has
an option, answers the one question that Megatron asks while it is imported,
`torch.cuda.is_available()`. A rank starts the driver for itself. Functions here import torch, the
module does not, nor anything else that takes time: every pytest run imports it, by the plugin.

On "cpu" the runtime emulates CUDA. On "cuda" nothing is emulated: ranks compute on the GPUs of this
machine, over NCCL where each has a GPU of its own, and else over gloo and host memory, since NCCL
refuses two ranks on one GPU. "checked" is the CPU, where ranks refuse what a GPU would refuse
(`cpu.placement`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

Device = Literal["cpu", "cuda", "checked"]
DEVICES: tuple[Device, ...] = ("cpu", "cuda", "checked")
#: The variable that names the device, for callers that start ranks without naming one.
VARIABLE = "MEGATRON_IDEMPOTENT_DEVICE"


def chosen_device(device: str | None = None) -> Device:
    """Return the device that `device` names; if it is None, the one that the environment variable
    MEGATRON_IDEMPOTENT_DEVICE names; if that is not set, "cpu".

    Raises:
        ValueError: a name that is not in DEVICES.
    """
    requested, source = (
        (device, "device") if device is not None else (os.environ.get(VARIABLE) or "cpu", VARIABLE)
    )
    for allowed in DEVICES:
        if requested == allowed:
            return allowed
    raise ValueError(f"{source} is {requested!r}; allowed: {', '.join(DEVICES)}")


#: The launcher's environment, in which torch counts devices without the driver.
ENVIRONMENT: Mapping[str, str] = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
#: The answer of `cuDeviceGetCount` in a process that has not called `cuInit`.
_NOT_INITIALIZED = 3


def prepare() -> None:
    """Replace torch's collectives in the launcher, before it imports Megatron, so that ranks can
    share a GPU.

    Megatron binds collectives by names of its own while it is imported, so they are replaced here;
    each is torch's until a rank calls `collectives.begin`.

    Raises:
        NoDeviceError: this torch can use no GPU of this machine.
    """
    from . import collectives, runtime

    require()
    for owner, name, value in collectives.replacements():
        setattr(owner, name, value)
    # A GPU machine may lack Transformer Engine and Apex too.
    sys.meta_path.insert(0, runtime.Completer(setattr))


def require() -> None:
    """Raise NoDeviceError if torch finds no GPU. The check does not start the CUDA driver in a
    launcher.
    """
    import torch

    from .errors import NoDeviceError

    if torch.version.cuda is None:
        raise NoDeviceError(
            f"no NVIDIA GPU here: torch {torch.__version__} is built without CUDA; install a build "
            f"with it, or leave out device='cuda' and {VARIABLE}=cuda to run ranks on the CPU"
        )
    if not torch.cuda.device_count():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        setting = "is not set" if visible is None else f"is {visible!r}"
        raise NoDeviceError(
            f"no NVIDIA GPU here: torch {torch.__version__}, built for CUDA {torch.version.cuda}, "
            f"finds none (CUDA_VISIBLE_DEVICES {setting}); without device='cuda' and "
            f"{VARIABLE}=cuda ranks run on the CPU"
        )


def check_untouched(module: str) -> None:
    """Raise `RuntimeError` in the launcher if the import of `module` has started the CUDA driver.

    Raises:
        RuntimeError: naming the module that has started it.
    """
    import torch

    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if initialized or driver_started():
        raise RuntimeError(
            f"importing {module} has started the CUDA driver, and ranks that are forked from this "
            f"process could not use it; take {module} out of `preload`, so that ranks import it"
        )


def driver_started(maps: Path = Path("/proc/self/maps")) -> bool:
    """Return whether this process has called `cuInit`; False if it has not even loaded libcuda."""
    if "libcuda.so" not in maps.read_text(encoding="utf-8"):
        return False
    import ctypes

    count = ctypes.c_int()
    answer: int = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count))
    return answer != _NOT_INITIALIZED


def settle(rank: int, world_size: int) -> None:
    """Select this rank's GPU, and turn on deterministic kernels, since ranks are compared bit by
    bit. Ranks that outnumber the GPUs get collectives over gloo.

    Kernels that have no deterministic form run all the same. LOCAL_RANK becomes the GPU's number,
    because programs use it as such.
    """
    # Read when cuBLAS is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    from . import collectives

    require()
    devices = torch.cuda.device_count()
    os.environ["LOCAL_RANK"] = str(rank % devices)
    torch.cuda.set_device(rank % devices)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # The filling would add a kernel to each allocation, to show reads of unwritten memory.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 (untyped)
    if world_size > devices:
        collectives.begin("cuda")


def group_options(world_size: int) -> dict[str, Any]:
    """Return keyword arguments for `init_process_group`, once `settle` has selected this rank's
    GPU: gloo if there are more ranks than GPUs, else NCCL on that GPU.
    """
    import torch

    if world_size > torch.cuda.device_count():
        return {"backend": "gloo"}
    return {"backend": "nccl", "device_id": torch.device("cuda", torch.cuda.current_device())}
