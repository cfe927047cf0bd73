"""Watches the forwards of a rank's chunks: fails in one, reads what they compute with, notes modes.

Hooks on the innermost modules see the forwards of every framework, however it calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from .protocol import Planted

Where = Literal["forward", "backward"]


class Forwards:
    """Counts the training forwards of this rank's first chunk, and acts on them.

    Example: `with forwards.failing(2, "backward"): adapter.microbatch(rows)`.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        """Put hooks on the chunks, below what wraps them."""
        self.evaluated: str | None = None
        """A module through which a gradient came after a forward in eval mode; None if none did."""
        self.met = False
        """True if the failure that was asked for has come."""
        self._plan: tuple[int, Where] | None = None
        self._seen = 0
        self._read: Callable[[int], None] | None = None
        self._read_of: set[int] = set()
        for index, chunk in enumerate(chunks):
            inner = innermost(chunk)
            inner.register_forward_hook(self._after(index))

    @contextmanager
    def failing(self, after: int | None, where: Where) -> Iterator[None]:
        """Raise `Planted` in the block once so many training forwards of the first chunk are done.

        It is raised at the end of the next one's forward, or at the beginning of its backward. None
        raises nothing.
        """
        self._plan = None if after is None else (after, where)
        self._seen, self.met = 0, False
        try:
            yield
        finally:
            self._plan = None

    @contextmanager
    def reading(self, read: Callable[[int], None]) -> Iterator[None]:
        """Call `read` with a chunk's number after its first training forward in the block.

        The parameters are then those that the forward has computed with: whatever was pending for
        them has come, and nobody has waited for it but the framework.
        """
        self._read, self._read_of = read, set()
        try:
            yield
        finally:
            self._read = None

    def _after(self, index: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            trained = [each for each in _tensors(output) if each.requires_grad]
            if not torch.is_grad_enabled() or not trained:
                return
            left = _left_in_eval(module)
            if left is not None:
                _on_gradient(trained[0], lambda: self._note(left))
            if self._read is not None and index not in self._read_of:
                self._read_of.add(index)
                self._read(index)
            if index == 0 and self._plan is not None:
                self._fail_at(trained[0])

        return hook

    def _note(self, name: str) -> None:
        self.evaluated = self.evaluated or name

    def _fail_at(self, output: Tensor) -> None:
        assert self._plan is not None
        after, where = self._plan
        self._seen += 1
        if self._seen != after + 1:
            return
        if where == "forward":
            self._raise("forward")
        _on_gradient(output, lambda: self._raise("backward"))

    def _raise(self, where: Where) -> None:
        self.met = True
        raise Planted(f"the {where} of the model fails, as the check asks")


def innermost(chunk: Any) -> Any:
    """Return the module that DDP and other wrappers are around."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _left_in_eval(module: Any) -> str | None:
    for name, each in module.named_modules():
        if not each.training:
            return name or "the model"
    return None


def _tensors(output: Any) -> Iterable[Tensor]:
    parts = output if isinstance(output, (tuple, list)) else [output]
    return (each for each in parts if isinstance(each, Tensor))


def _on_gradient(output: Any, act: Callable[[], None]) -> None:
    output.register_hook(lambda _: act())
