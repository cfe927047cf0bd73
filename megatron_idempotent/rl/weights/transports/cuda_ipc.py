"""Sends buckets through GPU memory, to workers that share the trainer's GPU (CUDA IPC).

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
#: `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the only flag.
_LAZY_PEER_ACCESS = 1
_Pointer = ctypes.c_uint64


class CudaDriver:
    """Calls NVIDIA's driver library to allocate memory on the current device, and to open memory of
    other processes.

    The calling thread needs a current device: call `torch.cuda.set_device` and make a tensor. Every
    method raises `TransportError` with the driver's message.
    """

    def __init__(self, library: str | None = None) -> None:
        """Load NVIDIA's driver library; raise `TransportError` if there is none.

        Args:
            library: the driver's library, by name or path; None for the system's.

        Raises:
            TransportError: the library cannot be loaded.
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
        """Allocate `nbytes` of memory on the current device; return the address."""
        pointer = _Pointer()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), nbytes)
        return pointer.value

    def free(self, pointer: int) -> None:
        """Free memory that `allocate` returned, given its address."""
        self._call("cuMemFree_v2", pointer)

    def handle(self, pointer: int) -> bytes:
        """Return the 64-byte handle with which another process opens memory that `allocate`
        returned.
        """
        handle = self._handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """Map another process's GPU memory, given the memory's handle; return the address of the
        mapping in this process.
        """
        pointer = _Pointer()
        native_handle = self._handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), native_handle, _LAZY_PEER_ACCESS)
        return pointer.value

    def close(self, pointer: int) -> None:
        """Unmap memory that `open` mapped, given its address."""
        self._call("cuIpcCloseMemHandle", pointer)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            message = (text.value or b"an unknown error").decode()
            raise TransportError(f"{name} failed with {status}: {message}")


# Made on demand: a module with such types cannot be pickled by value.
def _handle_type() -> Any:
    """Return the ctypes class `CUipcMemHandle`, a structure with the bytes of a handle, which the
    driver takes by value.
    """
    fields = {"_fields_": (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)}
    return type("CUipcMemHandle", (ctypes.Structure,), fields)


def _arguments(handle: Any) -> dict[str, tuple[Any, ...]]:
    """Return the argument types of each driver function that `CudaDriver` calls, by the function's
    name.
    """
    return {
        "cuMemAlloc_v2": (ctypes.POINTER(_Pointer), ctypes.c_size_t),
        "cuMemFree_v2": (_Pointer,),
        "cuIpcGetMemHandle": (ctypes.POINTER(handle), _Pointer),
        "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_Pointer), handle, ctypes.c_uint),
        "cuIpcCloseMemHandle": (_Pointer,),
        "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    }


KIND = "cuda_ipc"
#: Segment sizes are multiples of this: the driver shares device memory in pages of 2 MiB.
_GRAIN = 1 << 21


class CudaIpcSender(Sender):
    """Copies each bucket to a segment of GPU memory, which workers open and copy from.

    It is the GPU counterpart of `SharedMemorySender`; no byte passes through the host. Up to two
    segments are allocated while an update is open, and a bucket occupies its segment until
    `release(bucket)`. Both ends copy on separate streams. Workers are other processes on the same
    machine that see this GPU under any index, in the same container or IPC namespace; workers on
    another GPU copy from it. It was run on one H100, not between two GPUs.
    """

    kind = KIND

    def __init__(self, device: int | None = None) -> None:
        """Select the GPU on which segments are allocated: the one with the index `device`, or the
        current one.

        Args:
            device: the index of the weights' GPU; None for the current one.

        Raises:
            TransportError: there is no such GPU.
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
    """A segment of GPU memory that this process shares with other processes; torch's allocator does
    not manage it.
    """

    def __init__(self, nbytes: int, gpu: Gpu) -> None:
        """Allocate a segment of at least `nbytes` on a GPU.

        Raises:
            TransportError: there is not enough GPU memory.
        """
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
        """Return the JSON with which a receiver opens the segment: its handle and size."""
        return {"handle": self._handle.hex(), "segment_bytes": self.nbytes}

    def unlink(self) -> None:
        """Free the segment's GPU memory; `flat_N` must not be used afterwards."""
        del self.flat_N
        self._gpu.driver.free(self._pointer)


class CudaIpcReceiver(Receiver):
    """Copies buckets from the trainer's segments of GPU memory to the current GPU of this process.

    A segment is open only while it is copied, so that the trainer may free it once all workers have
    received the bucket.
    """

    def __init__(self, opened: Announcement) -> None:
        super().__init__(opened)
        try:
            self._gpu = Gpu.of(opened_field(opened, "gpu", str))  # the trainer's GPU
            self._own_gpu = Gpu.current()
        except TransportError as error:
            raise UpdateDamaged(f"update {self._update_id} cannot be received: {error}") from error
        self._side: SideStream | None = None

    def _receive(self, layout: BucketLayout, announced: Announcement) -> Bucket:
        # To the GPU that was current in the constructor.
        subject = f"update {self._update_id}: bucket {layout.index}"
        handle, nbytes = _segment_of(announced, layout, subject)
        try:
            self._gpu.enter_thread()
            if self._side is None:
                self._side = SideStream(self._own_gpu.device)
            with self._opened(handle, nbytes) as flat_N:
                self._own_gpu.enter_thread()
                with self._side.complete():
                    return layout.unpack(flat_N, device=self._own_gpu.device)
        except (TransportError, RuntimeError) as error:
            raise UpdateDamaged(
                f"{subject} cannot be read from the trainer's GPU: {error}; is this another "
                "process in the same container, and is the update still open?"
            ) from error

    @contextlib.contextmanager
    def _opened(self, handle: bytes, nbytes: int) -> Iterator[torch.Tensor]:
        pointer = self._gpu.driver.open(handle)
        try:
            yield self._gpu.bytes_at(pointer, nbytes)
        finally:
            self._gpu.driver.close(pointer)


class Gpu:
    """One GPU of this process, given by its index; allocates memory on the GPU without torch's
    allocator.
    """

    def __init__(self, index: int) -> None:
        """Load NVIDIA's driver library, and look up the UUID of the GPU with this index.

        Raises:
            TransportError: there is no driver, or no such GPU.
        """
        self.driver = self._load()
        uuids = self._seen()
        if not 0 <= index < len(uuids):
            raise TransportError(f"there is no GPU {index} here: torch sees {len(uuids)}")
        self.index, self.uuid = index, uuids[index]
        self.device = torch.device("cuda", index)

    @classmethod
    def current(cls) -> Gpu:
        """Return the calling thread's current GPU.

        Raises:
            TransportError: as in `Gpu`.
        """
        return cls(cls._current() if cls._seen() else 0)

    @classmethod
    def of(cls, uuid: str) -> Gpu:
        """Return this process's GPU with a UUID, which is the same in all processes. Raise
        `TransportError` if the process does not see that GPU.

        Raises:
            TransportError: this process does not see that GPU.
        """
        uuids = cls._seen()
        if uuid not in uuids:
            raise TransportError(
                f"the trainer's weights are on GPU {uuid}, and this process sees "
                f"{', '.join(uuids) or 'none'}; let it see that one (CUDA_VISIBLE_DEVICES), or use "
                "SharedMemorySender or ProcessGroupSender"
            )
        return cls(uuids.index(uuid))

    # Overridden by tests without a GPU:

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
        torch.empty(1, device=self.device)  # creates the context if torch has not yet

    def bytes_at(self, pointer: int, nbytes: int) -> torch.Tensor:
        """Return a uint8 tensor [nbytes] over GPU memory at the address `pointer`; the caller has
        to free the memory.
        """
        return torch.as_tensor(_Array(pointer, nbytes), device=self.device)

    def allocate(self, nbytes: int) -> int:
        """Allocate `nbytes` on this GPU, after emptying torch's cache if there is too little
        memory; return the address.

        Raises:
            TransportError: there is not enough GPU memory.
        """
        try:
            return self.driver.allocate(nbytes)
        except TransportError:
            torch.cuda.empty_cache()  # torch does the same when it runs out of memory
        try:
            return self.driver.allocate(nbytes)
        except TransportError as error:
            raise TransportError(
                f"no room for a segment of {nbytes / 1e6:.0f} MB on GPU {self.index}, which has "
                f"{self._free_bytes() / 1e6:.0f} MB free: {error}; send smaller buckets"
            ) from error


class _Array:
    """Describes GPU memory at an address to torch, by the CUDA array interface (version 3)."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def _segment_of(announced: Announcement, layout: BucketLayout, subject: str) -> tuple[bytes, int]:
    """Check the announcement of a bucket, and return the handle and size of its segment of GPU
    memory.

    Raises:
        UpdateDamaged: a field is malformed.
    """
    text = field(announced, "handle", str, subject, REMEDY)
    nbytes: int = field(announced, "segment_bytes", int, subject, REMEDY)
    if not re.fullmatch(f"[0-9a-f]{{{2 * HANDLE_BYTES}}}", text) or nbytes < layout.nbytes:
        raise UpdateDamaged(
            f"{subject} has the handle {text[:40]!r} (it has to be of {HANDLE_BYTES} bytes) to "
            f"{nbytes} bytes (it has to be {layout.nbytes} or more); {REMEDY}"
        )
    return bytes.fromhex(text), nbytes
