"""Simulates a slow network between ranks on one machine.

The handle of each reduction is wrapped: `wait()` returns no earlier than the time at which a
network with the given latency and bandwidth would have delivered the bytes. Starting a reduction
does not block, so computation overlaps with the delay, as on a real network.
"""

from __future__ import annotations

import functools
import time
from typing import Any


class Network:
    """A network link with a bandwidth and a latency, which sends one bucket group at a time.

    `exposed_s` is the total time that `wait()` slept after the real reduction had ended. It is
    exact on the slowest rank, and too low on a rank that also waited for a slower one.
    """

    def __init__(self, *, latency_s: float, bytes_per_s: float) -> None:
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.exposed_s = 0.0
        self._free_at = 0.0

    def install(self) -> None:
        """Delay all asynchronous gradient reductions of this process from now on: the `wait` of a
        reduction returns only when the simulated link has delivered the bytes.
        """
        from megatron.core.distributed import param_and_grad_buffer

        groups = param_and_grad_buffer._ParamAndGradBucketGroup
        start = groups.start_grad_sync

        @functools.wraps(start)
        def start_grad_sync(group: Any, *args: Any, **kwargs: Any) -> None:
            before = group.grad_reduce_handle
            start(group, *args, **kwargs)
            if group.grad_reduce_handle is not before:
                size = sum(bucket.grad_data.nbytes for bucket in group.buckets)
                group.grad_reduce_handle = _Sent(self, group.grad_reduce_handle, self._send(size))

        groups.start_grad_sync = start_grad_sync

    def _send(self, size: int) -> float:
        """Queue `size` bytes on the link; return the time at which the last byte arrives."""
        self._free_at = max(self._free_at, time.perf_counter()) + size / self.bytes_per_s
        return self._free_at + self.latency_s


class _Sent:
    """The handle of a reduction, whose `wait()` includes the simulated delay."""

    def __init__(self, network: Network, handle: Any, arrives_at: float) -> None:
        self._network = network
        self._handle = handle
        self._arrives_at = arrives_at

    def wait(self) -> None:
        self._handle.wait()
        left_s = max(self._arrives_at - time.perf_counter(), 0.0)
        time.sleep(left_s)
        self._network.exposed_s += left_s
