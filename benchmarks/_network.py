"""A network that takes its time, between ranks that share a machine.

A reduction's handle is wrapped, so that waiting for it ends no sooner than the bytes would have
arrived. Nothing sleeps where a reduction starts: what is computed meanwhile hides the delay, as it
would on a real network.
"""

from __future__ import annotations

import functools
import time
from typing import Any


class Network:
    """A link of `bytes_per_s` that carries one bucket group after the other, each `latency_s` late.

    `exposed_s` adds up what was waited for bytes after the peers' part was there. So a rank that is
    ahead of a slow peer counts too little, and the one that all wait for is exact.
    """

    def __init__(self, *, latency_s: float, bytes_per_s: float) -> None:
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.exposed_s = 0.0
        self._free_at = 0.0

    def install(self) -> None:
        """Have all asynchronous data-parallel reductions of this process go over it, for good."""
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
        """Return the time at which the last of that number of bytes arrives."""
        self._free_at = max(self._free_at, time.perf_counter()) + size / self.bytes_per_s
        return self._free_at + self.latency_s


class _Sent:
    """A reduction's handle."""

    def __init__(self, network: Network, handle: Any, arrives_at: float) -> None:
        self._network = network
        self._handle = handle
        self._arrives_at = arrives_at

    def wait(self) -> None:
        self._handle.wait()
        left_s = max(self._arrives_at - time.perf_counter(), 0.0)
        time.sleep(left_s)
        self._network.exposed_s += left_s
