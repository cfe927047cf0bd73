"""Sends buckets within a GPU's memory, to workers that share the trainer's GPU (CUDA IPC).

Source: CUDA Driver API, "Memory Management" (`cuMemAlloc`, `cuIpcGetMemHandle`, ...).
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron_idempotent.rl.weights.records import Bucket, UpdateDamaged, WeightUpdate, field
from megatron_idempotent.rl.weights.staging import SideStream

from .base import Announcement, Receiver, Sender, TransportError, TwoSegments, opened_field
from .layout import REMEDY, BucketLayout

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
            library: the driver's library, by name or path; None for the system's.

        Errors: `TransportError` if it cannot be loaded.
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
        """Return the address of fresh memory on the current device."""
        pointer = _Pointer()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), nbytes)
        return pointer.value

    def free(self, pointer: int) -> None:
        """Give back what `allocate` gave."""
        self._call("cuMemFree_v2", pointer)

    def handle(self, pointer: int) -> bytes:
        """Return 64 bytes with which another process opens memory that `allocate` gave."""
        handle = self._handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """Return the address, in this process, of another one's memory."""
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
    """Make the type `CUipcMemHandle`, which the driver takes by value."""
    fields = {"_fields_": (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)}
    return type("CUipcMemHandle", (ctypes.Structure,), fields)


def _arguments(handle: Any) -> dict[str, tuple[Any, ...]]:
    """Return the types of each function's arguments."""
    return {
        "cuMemAlloc_v2": (ctypes.POINTER(_Pointer), ctypes.c_size_t),
        "cuMemFree_v2": (_Pointer,),
        "cuIpcGetMemHandle": (ctypes.POINTER(handle), _Pointer),
        "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_Pointer), handle, ctypes.c_uint),
        "cuIpcCloseMemHandle": (_Pointer,),
        "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    }


KIND = "cuda_ipc"
#: Segments are a multiple of it in bytes: the driver shares device memory by pages of 2 MiB.
_GRAIN = 1 << 21


class CudaIpcSender(Sender):
    """Copies each bucket within the GPU's memory, into a segment that workers open and copy from.

    It does on the GPU what `SharedMemorySender` does on the host, which no byte passes through. Up
    to two segments are on the GPU while an update is open, and a bucket's segment is taken until
    `release(bucket)`. Copies run on streams of their own at both ends. Workers are other processes
    of the same machine that see this GPU under any index, in the same container or with its IPC
    namespace; those whose own GPU is another one copy from it. It has not been run on a GPU yet.
    """

    kind = KIND

    def __init__(self, device: int | None = None) -> None:
        """
        Args:
            device: the index of the GPU that the weights are on; None for the current one.

        Errors: `TransportError` without a GPU.
        """
        super().__init__()
        self._gpu = Gpu.current() if device is None else Gpu(device)

    def _begin(self, update: WeightUpdate) -> tuple[TwoSegments, Mapping[str, Any]]:
        self._gpu.enter_thread()
        side = SideStream(self._gpu.device)
        session = TwoSegments(
            update.id, make=lambda nbytes: _Segment(nbytes, self._gpu), copying=side.complete
        )
        return session, {"gpu": self._gpu.uuid}


class _Segment:
    """Holds memory of this process on a GPU, which torch does not manage."""

    def __init__(self, nbytes: int, gpu: Gpu) -> None:
        """Allocate at least `nbytes`. Errors: `TransportError` if there is no room."""
        self.nbytes = max(1, -(-nbytes // _GRAIN)) * _GRAIN
        self._gpu = gpu
        self._pointer = gpu.allocate(self.nbytes)
        try:
            self._handle = gpu.driver.handle(self._pointer)
        except TransportError:
            gpu.driver.free(self._pointer)
            raise
        self.flat_N = gpu.bytes_at(self._pointer, self.nbytes)

    def announced(self) -> Mapping[str, Any]:
        """See `SharedMemory.announced`."""
        return {"handle": self._handle.hex(), "segment_bytes": self.nbytes}

    def unlink(self) -> None:
        """See `SharedMemory.unlink`."""
        del self.flat_N
        self._gpu.driver.free(self._pointer)


class CudaIpcReceiver(Receiver):
    """Copies buckets out of a trainer's segments, into memory of its own on its current GPU.

    A segment is open no longer than its copy takes, so that the trainer may free it once all
    workers have answered.
    """

    def __init__(self, opened: Announcement) -> None:
        super().__init__(opened)
        try:
            self._gpu = Gpu.of(opened_field(opened, "gpu", str))  # the trainer's
            self._mine = Gpu.current()
        except TransportError as error:
            raise UpdateDamaged(f"update {self._update_id} cannot be received: {error}") from error
        self._side: SideStream | None = None

    def _receive(self, layout: BucketLayout, announced: Announcement) -> Bucket:
        # Onto the GPU that was current when this was made.
        where = f"update {self._update_id}: bucket {layout.index}"
        handle, nbytes = _segment_of(announced, layout, where)
        try:
            self._gpu.enter_thread()
            if self._side is None:
                self._side = SideStream(self._mine.device)
            with self._opened(handle, nbytes) as flat_N:
                self._mine.enter_thread()
                with self._side.complete():
                    return layout.unpack(flat_N, device=self._mine.device)
        except (TransportError, RuntimeError) as error:
            raise UpdateDamaged(
                f"{where} cannot be read from the trainer's GPU: {error}; is this another process "
                "in the same container, and is the update still open?"
            ) from error

    @contextlib.contextmanager
    def _opened(self, handle: bytes, nbytes: int) -> Iterator[torch.Tensor]:
        pointer = self._gpu.driver.open(handle)
        try:
            yield self._gpu.bytes_at(pointer, nbytes)
        finally:
            self._gpu.driver.close(pointer)


class Gpu:
    """Finds a GPU by its index in this process, and allocates memory on it beside torch's."""

    def __init__(self, index: int) -> None:
        """Load the driver. Errors: `TransportError` without one, or without such a GPU."""
        self.driver = self._load()
        seen = self._seen()
        if not 0 <= index < len(seen):
            raise TransportError(f"there is no GPU {index} here: torch sees {len(seen)}")
        self.index, self.uuid = index, seen[index]
        self.device = torch.device("cuda", index)

    @classmethod
    def current(cls) -> Gpu:
        """Return the calling thread's GPU. Errors: those of `Gpu`."""
        return cls(cls._current() if cls._seen() else 0)

    @classmethod
    def of(cls, uuid: str) -> Gpu:
        """Return the GPU of this UUID, by which another process names it.

        Errors: `TransportError` if this process does not see it.
        """
        seen = cls._seen()
        if uuid not in seen:
            raise TransportError(
                f"the trainer's weights are on GPU {uuid}, and this process sees "
                f"{', '.join(seen) or 'none'}; let it see that one (CUDA_VISIBLE_DEVICES), or use "
                "SharedMemorySender or ProcessGroupSender"
            )
        return cls(seen.index(uuid))

    # What a test without a GPU answers in place of torch:

    @staticmethod
    def _load() -> CudaDriver:
        return CudaDriver()

    @staticmethod
    def _seen() -> list[str]:
        """Return the UUID of each GPU that this process sees, by index."""
        count = torch.cuda.device_count()
        return [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]

    @staticmethod
    def _current() -> int:
        return torch.cuda.current_device()

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.index)[0]

    def enter_thread(self) -> None:
        """Make this GPU the calling thread's device, for torch and for the driver."""
        torch.cuda.set_device(self.index)
        torch.empty(1, device=self.device)  # makes its context, where torch has not yet

    def bytes_at(self, pointer: int, nbytes: int) -> torch.Tensor:
        """Return the memory at an address, uint8 [nbytes]; it stays the caller's to free."""
        return torch.as_tensor(_Array(pointer, nbytes), device=self.device)

    def allocate(self, nbytes: int) -> int:
        """Return the address of `nbytes` new bytes. Errors: `TransportError` without room."""
        try:
            return self.driver.allocate(nbytes)
        except TransportError:
            torch.cuda.empty_cache()  # what torch keeps for later, as it does for itself
        try:
            return self.driver.allocate(nbytes)
        except TransportError as error:
            raise TransportError(
                f"no room for a segment of {nbytes / 1e6:.0f} MB on GPU {self.index}, which has "
                f"{self._free_bytes() / 1e6:.0f} MB free: {error}; send smaller buckets"
            ) from error


class _Array:
    """Describes memory to torch by the CUDA array interface (version 3)."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def _segment_of(announced: Announcement, layout: BucketLayout, where: str) -> tuple[bytes, int]:
    """Return the handle and size of a bucket's segment.

    Errors: `UpdateDamaged` for malformed ones.
    """
    text = field(announced, "handle", str, where, REMEDY)
    nbytes: int = field(announced, "segment_bytes", int, where, REMEDY)
    if not re.fullmatch(f"[0-9a-f]{{{2 * HANDLE_BYTES}}}", text) or nbytes < layout.nbytes:
        raise UpdateDamaged(
            f"{where} has the handle {text[:40]!r} (it has to be of {HANDLE_BYTES} bytes) to "
            f"{nbytes} bytes (it has to be {layout.nbytes} or more); {REMEDY}"
        )
    return bytes.fromhex(text), nbytes
