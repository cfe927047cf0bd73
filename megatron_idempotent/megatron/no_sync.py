"""`no_sync` contexts of a chunk that count how many are open, in DDP and Megatron-FSDP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any

from megatron_idempotent.megatron.ddp import bucket_groups

_ENTRIES = "_megatron_idempotent_no_sync"


class Entries:
    """Counts the `no_sync` contexts that are open on a chunk since its gradients were zeroed."""

    def __init__(self) -> None:
        self.open = 0


class NoSync(ContextDecorator):
    """The context that `ddp.no_sync()` returns. Dropping it without an exit leaves it, too.

    The schedules do that to it at the end of a forward-only pass.
    """

    def __init__(self, chunk: Any) -> None:
        self._chunk = chunk
        self._entries: Entries | None = None

    def _recreate_cm(self) -> NoSync:
        return NoSync(self._chunk)

    def __enter__(self) -> None:
        if self._entries is not None:
            raise RuntimeError(
                "this no_sync() context was entered twice: call ddp.no_sync() for each"
            )
        entries = getattr(self._chunk, _ENTRIES, None)
        if entries is None:
            entries = Entries()
            setattr(self._chunk, _ENTRIES, entries)
        entries.open += 1
        self._entries = entries
        _arm(self._chunk, False)

    def __exit__(self, *exception: object) -> None:
        entries, self._entries = self._entries, None
        if entries is None:
            return
        entries.open -= 1
        now = getattr(self._chunk, _ENTRIES, None)
        # One of an earlier window ends nothing that a later one has entered.
        if now is None or now.open == 0:
            _arm(self._chunk, True)

    def __del__(self) -> None:
        self.__exit__()


def _arm(chunk: Any, armed: bool) -> None:
    if hasattr(chunk, "grad_reduce_pipeline"):  # a MegatronFSDP
        chunk.is_last_microbatch = armed
    for group in bucket_groups(chunk):
        group.is_last_microbatch = armed


def no_sync(original: Callable[..., Any], self: Any) -> NoSync:
    """Instead of upstream's generator."""
    # Never entered; called for the other case files whose wrappers may stand below this one.
    original(self)
    return NoSync(self)


def zero_grad_buffer(original: Callable[..., None], self: Any) -> None:
    """Forget the entries: what is still open belongs to a window that is gone."""
    setattr(self, _ENTRIES, None)
    original(self)
