"""Chooses the device of a pool's ranks. Free of torch: a pool chooses before it starts any.

On "cpu" the runtime answers for CUDA. On "cuda" nothing is emulated: ranks compute on the GPUs of
this machine, over NCCL where each has a GPU of its own, and else over gloo and host memory, since
NCCL refuses two ranks on one GPU. "checked" is the CPU, where ranks refuse what a GPU would refuse
(`cpu.checked`).
"""

from __future__ import annotations

import os
from typing import Literal

Device = Literal["cpu", "cuda", "checked"]
DEVICES: tuple[Device, ...] = ("cpu", "cuda", "checked")
#: For whoever starts ranks without naming a device.
VARIABLE = "MEGATRON_IDEMPOTENT_DEVICE"


def chosen(device: str | None = None) -> Device:
    """Return the device that is asked for, by argument, else by the environment, else the CPU.

    Raises:
        ValueError: none of DEVICES.
    """
    asked, said_by = (
        (device, "device") if device is not None else (os.environ.get(VARIABLE) or "cpu", VARIABLE)
    )
    for known in DEVICES:
        if asked == known:
            return known
    raise ValueError(f"{said_by} is {asked!r}; allowed: {', '.join(DEVICES)}")
