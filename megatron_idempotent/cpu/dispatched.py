"""Records the collectives that start while something runs, under any name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def watching_collectives(see: Callable[[str, list[Any]], None]) -> Iterator[None]:
    """Inside, `see` is called before each collective of torch, with its operation and arguments.

    Messages between two ranks count too. The arguments are the leaves of them all: tensors, the
    process group, options. It is torch's dispatcher that tells, on this thread and in backwards.

    Example:
        names = []
        with watching_collectives(lambda name, _: names.append(name)):
            model.step()
    """
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "c10d":
                see(func._opname, tree_leaves((args, kwargs)))
            return func(*args, **(kwargs or {}))

    with Watching():  # type: ignore[no-untyped-call]
        yield
