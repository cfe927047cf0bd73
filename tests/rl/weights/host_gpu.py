"""A GPU that is host memory, for the transport between processes that share one.

NVIDIA's driver cannot be called without its device. In its place is a library of the same
functions over shared memory (`driver_in_host_memory.c`); all else is what runs on a GPU.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import shutil
import subprocess
import tempfile

import torch

from megatron_idempotent.rl.weights.transports import cuda_ipc
from megatron_idempotent.rl.weights.transports.cuda_ipc import CudaDriver

#: The library, for the other processes of a test too.
VARIABLE = "DRIVER_IN_HOST_MEMORY"
COMPILER = shutil.which("cc")
WITHOUT = "the stand-in for NVIDIA's driver needs a C compiler (cc)"
_SOURCE = pathlib.Path(__file__).with_name("driver_in_host_memory.c")


def build() -> None:
    """Compile the library, once in a session, and name it to processes that start from now on."""
    if COMPILER is None or VARIABLE in os.environ:
        return
    target = pathlib.Path(tempfile.mkdtemp()) / "libcuda.so"
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-o", str(target), str(_SOURCE), "-lrt"]
    subprocess.run(command, check=True)
    os.environ[VARIABLE] = str(target)


class HostGpu(cuda_ipc.Gpu):
    """Two of them, whose memory is the host's."""

    SEEN = ("GPU-a", "GPU-b")

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.device = torch.device("cpu")

    @staticmethod
    def _load() -> CudaDriver:
        return CudaDriver(os.environ[VARIABLE])

    @classmethod
    def _seen(cls) -> list[str]:
        return list(cls.SEEN)

    @staticmethod
    def _current() -> int:
        return 1

    def _free_bytes(self) -> int:
        return 1 << 30

    def enter_thread(self) -> None:
        pass

    def bytes_at(self, pointer: int, nbytes: int) -> torch.Tensor:
        memory = (ctypes.c_uint8 * nbytes).from_address(pointer)
        return torch.frombuffer(memory, dtype=torch.uint8)


def left_behind() -> list[str]:
    """Memory of this process that nobody has freed."""
    return [path.name for path in pathlib.Path("/dev/shm").glob(f"driver-*.{os.getpid()}.*")]
