"""Combines the parts of a bucket that several senders send concurrently."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from megatron_idempotent.rl.weights.records import Bucket, UpdateDamaged, field

from .base import Announcement, Receiver, opened_field
from .layout import FORMAT, REMEDY

KIND = "several"


def opened_together(announcements: Sequence[Announcement]) -> Announcement:
    """Combine the announcements of several senders, which each send a part of one update. A single
    announcement is returned unchanged.
    """
    if len(announcements) == 1:
        return announcements[0]
    update = announcements[0]["update"]
    return {"format": FORMAT, "kind": KIND, "update": update, "senders": list(announcements)}


def announced_together(parts: Sequence[Announcement]) -> Announcement:
    """Combine the senders' announcements for the parts of one bucket, in the order of the senders.
    A single announcement is returned unchanged.
    """
    return parts[0] if len(parts) == 1 else {"parts": list(parts)}


class SeveralReceiver(Receiver):
    """Receives each bucket in parts from several senders, in a thread per sender, and joins the
    parts.
    """

    def __init__(self, opened: Announcement, make: Callable[[Announcement], Receiver]) -> None:
        """Make a receiver and a thread for each of the announced senders.

        Args:
            opened: the result of `opened_together`.
            make: makes a receiver, given the announcement of one sender.
        """
        super().__init__(opened)
        senders = opened_field(opened, "senders", list)
        kinds = [sender.get("kind") for sender in senders if isinstance(sender, Mapping)]
        if not senders or KIND in kinds:
            raise UpdateDamaged(
                f"update {self._update_id}: {len(senders)} senders are announced, of kinds "
                f"{reprlib.repr(kinds)}; allowed: 1 or more, none of them {KIND!r}; pass on what "
                "open() gave"
            )
        self._receivers = [make(sender) for sender in senders]
        on_device: tuple[Any, ...] = ()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            on_device = (torch.cuda.set_device, (torch.cuda.current_device(),))
        self._threads = ThreadPoolExecutor(len(senders), "weight-receive", *on_device)

    def receive(self, announced: Announcement) -> Bucket:
        """Receive all parts of a bucket concurrently, and return them as one bucket; see
        `Receiver.receive`.

        If parts fail, the first error is raised once all parts have ended.
        """
        subject = f"update {self._update_id}: an announced bucket"
        announced_parts: list[Any] = field(announced, "parts", list, subject, REMEDY)
        if len(announced_parts) != len(self._receivers):
            raise UpdateDamaged(
                f"{subject} has {len(announced_parts)} parts, and {len(self._receivers)} senders "
                f"were opened; {REMEDY}"
            )
        receiving = [
            self._threads.submit(receiver.receive, part)
            for receiver, part in zip(self._receivers, announced_parts, strict=True)
        ]
        errors = [error for part in receiving if (error := part.exception()) is not None]
        if errors:
            raise errors[0]
        buckets = [part.result() for part in receiving]
        if len({bucket.index for bucket in buckets}) > 1:
            indices = ", ".join(str(bucket.index) for bucket in buckets)
            raise UpdateDamaged(f"{subject} has parts of buckets {indices}; {REMEDY}")
        tensors: dict[str, torch.Tensor] = {}
        checksums: dict[str, int] = {}
        for bucket in buckets:
            if repeated := sorted(tensors.keys() & bucket.tensors.keys()):
                raise UpdateDamaged(f"{subject} has {repeated[0]} of several senders; {REMEDY}")
            tensors.update(bucket.tensors)
            checksums.update(bucket.checksums)
        return Bucket(index=buckets[0].index, tensors=tensors, checksums=checksums)

    def close(self) -> None:
        """Close the receivers of all parts, and end their threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for receiver in self._receivers:
            receiver.close()
