"""The calls of NVIDIA's driver that torch does not offer: device memory that other processes open.

Source: CUDA Driver API, "Memory Management" (`cuMemAlloc`, `cuIpcGetMemHandle`, ...).
"""

from __future__ import annotations

import ctypes
from typing import Any

from .errors import TransportError

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
#: `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the one flag that there is.
_LAZY_PEER_ACCESS = 1
_Pointer = ctypes.c_uint64


class CudaDriver:
    """Allocates memory on the current device, and opens what other processes have allocated.

    Each call needs a current device in its thread: torch makes one with `torch.cuda.set_device`
    and a first tensor. Every method raises `TransportError` with the driver's own words.
    """

    def __init__(self, library: str | None = None) -> None:
        """
        Args:
            library: the driver's, by name or path; None for the system's.

        Errors: `TransportError` where it cannot be loaded.
        """
        try:
            self._library = ctypes.CDLL(library or LIBRARY)
        except OSError as error:
            raise TransportError(
                f"there is no NVIDIA driver here: {error}; use SharedMemorySender or "
                "ProcessGroupSender"
            ) from error
        self._handle = _handle_type()
        for name, arguments in _arguments(self._handle).items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int

    def allocate(self, nbytes: int) -> int:
        """The address of fresh memory on the current device."""
        pointer = _Pointer()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), nbytes)
        return pointer.value

    def free(self, pointer: int) -> None:
        """Give back what `allocate` gave."""
        self._call("cuMemFree_v2", pointer)

    def handle(self, pointer: int) -> bytes:
        """64 bytes by which another process opens the memory at an address that was allocated."""
        handle = self._handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """The address, in this process, of another one's memory."""
        pointer = _Pointer()
        given = self._handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), given, _LAZY_PEER_ACCESS)
        return pointer.value

    def close(self, pointer: int) -> None:
        """Give up an address that `open` gave."""
        self._call("cuIpcCloseMemHandle", pointer)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            said = (text.value or b"an error that it has no words for").decode()
            raise TransportError(f"{name} failed with {status}: {said}")


# Made when they are needed: a module that holds such types does not travel pickled by value.
def _handle_type() -> Any:
    """`CUipcMemHandle`, which the driver takes by value."""
    fields = {"_fields_": (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)}
    return type("CUipcMemHandle", (ctypes.Structure,), fields)


def _arguments(handle: Any) -> dict[str, tuple[Any, ...]]:
    """The types of each function's arguments."""
    return {
        "cuMemAlloc_v2": (ctypes.POINTER(_Pointer), ctypes.c_size_t),
        "cuMemFree_v2": (_Pointer,),
        "cuIpcGetMemHandle": (ctypes.POINTER(handle), _Pointer),
        "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_Pointer), handle, ctypes.c_uint),
        "cuIpcCloseMemHandle": (_Pointer,),
        "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    }
