"""The other process of the transport tests: does what it is told, one line of JSON after another.

`weight_peers.py` gives commands by the standard input. Run as a program with a socket's number,
it has imported torch, and forks such a process for each three streams that come by that socket.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import sys
import time
from typing import Any

import host_gpu
import torch

from megatron_idempotent.rl.weights import Bucket, WeightUpdate, checksum, transports
from megatron_idempotent.rl.weights.transports import cuda_ipc

_SENDERS = {
    "disk": transports.DiskSender,
    "shared_memory": transports.SharedMemorySender,
    "process_group": transports.ProcessGroupSender,
    "cuda_ipc": transports.CudaIpcSender,
}


def described(bucket: Bucket) -> dict[str, Any]:
    """Return what a test compares: every tensor's type, shape, bytes, and whether it owns its
    memory."""
    return {
        "index": bucket.index,
        "checksums": dict(bucket.checksums),
        "tensors": [
            [
                name,
                str(tensor.dtype),
                list(tensor.shape),
                digest(tensor),
                tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes,
            ]
            for name, tensor in bucket.tensors.items()
        ],
    }


def digest(tensor: torch.Tensor) -> str:
    bytes_N = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(bytes_N.numpy()).hexdigest()


class Peer:
    def __init__(self) -> None:
        self._receivers: dict[str, transports.Receiver] = {}
        self._senders: list[transports.Sender] = []

    def hello(self) -> dict[str, Any]:
        heavy = [name for name in ("megatron", "transformers") if name in sys.modules]
        return {"python": sys.version, "torch": torch.__version__, "heavy": heavy}

    def open(self, name: str, opened: dict[str, Any], rank: int) -> None:
        self._receivers[name] = transports.receiver(opened, rank=rank, bucket="/")

    def receive(self, name: str, announced: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        bucket = self._receivers[name].receive(announced)
        seconds = time.perf_counter() - began
        for tensor_name, tensor in bucket.tensors.items():
            assert checksum(tensor) == bucket.checksums[tensor_name], tensor_name
        return {**described(bucket), "seconds": seconds}

    def close(self, name: str) -> None:
        self._receivers[name].close()

    def send(self, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Open an update and announce a bucket, and leave it at that."""
        sender = _SENDERS[kind](**arguments)
        self._senders.append(sender)
        bucket = Bucket.of(0, {"w": torch.arange(1000.0)})

        async def begin() -> dict[str, Any]:
            opened = await sender.open(WeightUpdate(id="left", version=1))
            return {"opened": opened, "announced": await sender.announce(bucket)}

        return asyncio.run(begin())

    def transmit(self) -> None:
        """Send the bucket of the last `send`."""
        asyncio.run(self._senders[-1].transmit(Bucket.of(0, {"w": torch.arange(1000.0)})))


def fork(orders: socket.socket) -> None:
    """Fork a process for each order, and tell its id; return in those, and once the orders end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a process that ends is no zombie
    while True:
        order, streams, _, _ = socket.recv_fds(orders, 1, 3)
        if not order:
            sys.exit()
        child = os.fork()
        if child == 0:
            orders.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            for place, stream in enumerate(streams):
                os.dup2(stream, place)
        else:
            orders.send(child.to_bytes(8, "little"))
        for stream in streams:
            os.close(stream)
        if child == 0:
            return


def main() -> None:
    if host_gpu.VARIABLE in os.environ:
        cuda_ipc.Gpu = host_gpu.HostGpu
    fork(socket.socket(fileno=int(sys.argv[1])))
    peer = Peer()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"ok": getattr(peer, command["do"])(**command["with"])}
        except Exception as error:  # noqa: BLE001 - all that a command raises is its answer
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
