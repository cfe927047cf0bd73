"""A deadline for collectives in which a rank may wait for one that has failed."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def bounded(groups: Sequence[Any], timeout_s: float) -> Iterator[None]:
    """Have operations of these process groups end after `timeout_s`, where gloo carries them.

    NCCL's are ended by its watchdog, after the timeout that the groups were made with, and end the
    process: nothing is changed for them.
    """
    changed = []
    timeout = datetime.timedelta(seconds=timeout_s)
    for group in groups:
        for device in group._device_types:
            backend = group._get_backend(torch.device(device))
            if type(backend).__name__ != "ProcessGroupGloo":
                continue
            before = backend.options._timeout
            if before > timeout:
                changed.append((backend, before))
                backend._set_default_timeout(timeout)
    try:
        yield
    finally:
        for backend, before in changed:
            backend._set_default_timeout(before)
