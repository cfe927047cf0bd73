"""`no_sync()` ends with whichever exit comes first: an inner one, or one of a dead window.

Symptom:
    Inside of `with ddp.no_sync():` gradients are reduced all the same as soon as a pipeline
    schedule has run in it. And after a window that raised, a later window reduces before its last
    microbatch, when the exception is freed: wrong gradients without an error from 0.16 on,
    `AssertionError: Cannot set grad twice` before.

Cause:
    The context manager is a generator that turns one flag off and on again. It does not count
    entries. The schedules enter it by hand; where they raise, the traceback keeps the suspended
    generator, and closing that turns the flag on, whatever window is running by then.

Affects:
    Every release, with overlap_grad_reduce. What the patch does: `no_sync` counts its entries per
    chunk, and the last exit turns synchronisation on. `zero_grad_buffer` starts a new count, as it
    always turned synchronisation on: an exit of an entry before it ends nothing of a later one. So
    call `zero_grad_buffer` first and hold `no_sync` then.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/distributed_data_parallel.py,
    `no_sync`.

Remove when:
    `no_sync` counts its entries and the schedules leave it in a `finally`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any

from megatron_idempotent.engine import UNTRIED, Patch, Reproduction

from ._ddp import UPSTREAM, bucket_groups, ddp_target

_ENTRIES = "_megatron_idempotent_no_sync"


class Entries:
    """How many `no_sync` contexts are open on a chunk since its gradients were zeroed."""

    def __init__(self) -> None:
        self.open = 0


class NoSync(ContextDecorator):
    """What `ddp.no_sync()` returns. A context that is dropped without an exit is left, too.

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


def reproduce() -> None:
    """A window inside of `no_sync`, then an exit in the middle of the window after the next."""
    from megatron_idempotent.cpu import tiny

    model = tiny.build(distributed_optimizer=False)
    (chunk,) = model.chunks
    with chunk.no_sync():
        with chunk.no_sync():
            pass
        _expect_held(chunk, "after an inner no_sync()")
    stale = chunk.no_sync()
    stale.__enter__()
    chunk.zero_grad_buffer()
    with chunk.no_sync():
        stale.__exit__(None, None, None)
        _expect_held(chunk, "after the exit of an earlier window")


def _expect_held(chunk: Any, when: str) -> None:
    if any(group.is_last_microbatch for group in bucket_groups(chunk)):
        raise RuntimeError(f"gradients are reduced inside of no_sync() {when}")


def neighbour() -> object:
    """Contexts one after another: left by an exception, as a decorator, made and never entered."""
    from . import _neighbours

    model = _neighbours.build(overlap=True, distributed=True, wired=False)
    (chunk,) = model.chunks
    held = chunk.no_sync()(model.forward_backward)
    found = []
    for data_seed in range(3):
        chunk.zero_grad_buffer()
        chunk.no_sync()
        held(2, data_seed=data_seed, zero_first=False)
        held(data_seed + 1, data_seed=data_seed, zero_first=False)
        try:
            with chunk.no_sync():
                raise KeyError
        except KeyError:
            pass
        model.forward_backward(1, data_seed=data_seed, zero_first=False)
        chunk.finish_grad_sync()
        model.step()
        found.append(model.parameters().numpy().tobytes())
    return found


PATCH = Patch(
    id="no-sync-ends-early",
    summary="no_sync() ends at an inner exit, or at one of a window that raised: reduced too early",
    since="0.12",
    before=UNTRIED,
    groups=("overlap", "abort"),
    targets=(
        ddp_target("no_sync", no_sync),
        ddp_target("zero_grad_buffer", zero_grad_buffer),
    ),
    upstream=UPSTREAM,
    reproduction=Reproduction(
        run=reproduce,
        neighbour=neighbour,
        ranks=2,
        stock_error=r"RuntimeError: gradients are reduced inside of no_sync\(\)",
    ),
)
