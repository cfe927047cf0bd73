"""Keeps apart the steps of several tenants over the same modules.

A tenant trains some of a model's parameters, adapters mostly, in a DDP and with an optimizer of its
own, while steps of other tenants over the same modules are open. DDP and optimizer keep gradients,
reductions and updates apart. All else exists once for all tenants: buffers, random states, what
layers log, and which parameters get gradients. So each tenant has a state of its own, which is in
force only during its calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_idempotent.megatron.ddp import bucket_groups
from megatron_idempotent.window.open_contexts import close_contexts

from .snapshot import LogSnapshot, MegatronSnapshot, ModuleSnapshot, keep_random, keep_tracker


class TenantState:
    """Keeps one tenant's state of modules and process, from when its `TrainStep` is made.

    Random states are a stream of the tenant's own, which goes on from call to call. Buffers are a
    copy while a step is open; between steps only those that its steps have changed. Logs begin each
    step at zero, and are added to the process's when the step ends. In the tenant's calls only
    parameters in its DDP get gradients.
    """

    def __init__(self, name: str, chunks: Sequence[Any]) -> None:
        self.name = name
        self._chunks = list(chunks)
        self._own = {id(p): p for chunk in chunks for p in chunk.param_to_bucket_group}
        self._random = keep_random()
        self._trackers = keep_tracker()
        self._logs = LogSnapshot(empty=True)
        self._changed: dict[int, tuple[Tensor, Tensor]] = {}
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._is_open = False
        self._in_force = False
        # To be put back: what the process has meanwhile, and which parameters get gradients there.
        self._outside: MegatronSnapshot | None = None
        self._trained: list[tuple[Any, bool]] = []

    def open(self) -> None:
        """Begin a step with the buffers that the tenant's earlier steps have left.

        Raises:
            RuntimeError: a gradient of the tenant's parameters is in the buffers of another DDP.
        """
        self._check_owned()
        self._buffers = dict(self._changed)
        self._is_open = True

    def close(self, before: ModuleSnapshot | None) -> None:
        """End the step, aborted or not; `before` has the buffers as the step found them."""
        if not self._is_open:
            return
        self._is_open = False
        for buffer, value in before.buffers if before is not None else ():
            _, now = self._buffers.get(id(buffer), (buffer, value))
            if id(buffer) in self._changed or not _same(value, now):
                self._changed[id(buffer)] = buffer, now
        self._buffers = {}
        self._logs.add()
        self._logs = LogSnapshot(empty=True)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Give modules and process this tenant's state inside, and their own back afterwards."""
        if self._in_force:
            yield
            return
        self._leave()  # an exit may have been interrupted
        self._outside = MegatronSnapshot(self._chunks, hooks=False)
        entered = False
        try:
            self._in_force = True
            self._enter()
            entered = True
            yield
        except BaseException as error:
            close_contexts(error)  # what they put back comes before what is put back here
            raise
        finally:
            self._in_force = False
            if entered and self._is_open:
                self._take()
            self._leave()

    def _enter(self) -> None:
        known = {id(p): p for chunk in self._chunks for p in chunk.parameters()}
        for key, parameter in known.items():
            wanted = key in self._own
            if parameter.requires_grad is not wanted:
                self._trained.append((parameter, parameter.requires_grad))
                parameter.requires_grad_(wanted)
        with torch.no_grad():
            for buffer, value in (self._buffers if self._is_open else self._changed).values():
                buffer.copy_(value)
        self._random()
        self._trackers()
        self._logs.restore()

    def _take(self) -> None:
        assert self._outside is not None
        self._random = keep_random()
        self._trackers = keep_tracker()
        self._logs = LogSnapshot()
        self._buffers = {id(b): (b, b.clone()) for b, _ in self._outside.modules.buffers}

    def _leave(self) -> None:
        if self._outside is None:
            return
        self._outside.restore()
        for parameter, wanted in self._trained:
            parameter.requires_grad_(wanted)
        self._trained, self._outside = [], None

    def _check_owned(self) -> None:
        """Raise unless the gradients of this tenant's parameters are in its own DDP's buffers."""
        groups = [group for chunk in self._chunks for group in bucket_groups(chunk)]
        for bucket in (bucket for group in groups for bucket in group.buckets):
            held = bucket.grad_data.untyped_storage().data_ptr()
            for parameter in bucket.params_list:
                if parameter.main_grad.untyped_storage().data_ptr() != held:
                    raise RuntimeError(
                        f"begin(): a parameter of tenant {self.name!r}, of shape "
                        f"{tuple(parameter.shape)}, is in a DDP that was built later too, and has "
                        "its gradient there: freeze what belongs to others while a DDP is built"
                    )


def check_neighbours(mine: str | None, chunks: Sequence[Any], windows: Sequence[Any]) -> None:
    """Raise `RuntimeError` if this step would disturb an open one over the same modules.

    `windows` have `chunks` and the name of their `tenant`; `mine` is the name of this one's.
    """
    if not windows:
        return
    modules = _modules(chunks)
    for window in windows:
        if modules.isdisjoint(_modules(window.chunks)):
            continue
        if mine is None or window.tenant is None:
            raise RuntimeError(
                "begin(): a TrainStep is open for another DDP over the same modules, and to abort "
                "one of the two would undo what the other has done: make both with a name, "
                "TrainStep(…, tenant=…), or finish() or abort() the open one first"
            )
        if mine == window.tenant:
            raise RuntimeError(
                f"begin(): a step of tenant {mine!r} is open over the same modules: give each "
                "TrainStep another name, by which ranks know that they are in the same one"
            )


def _modules(chunks: Sequence[Any]) -> set[int]:
    return {id(module) for chunk in chunks for module in chunk.modules()}


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    as_bytes = [each.reshape(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*as_bytes)
