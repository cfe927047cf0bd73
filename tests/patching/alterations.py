"""Alters Megatron: the source of a copy, or `model_parallel_cuda_manual_seed` where it lives.

Functions of a module replace that one as others do, and return what stands there then.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "model_parallel_cuda_manual_seed"


def alter(root: Path, file: str, old: str, new: str) -> None:
    """Put another text into a file of a copy of Megatron, whose files are hard links."""
    path = root / file
    text = path.read_text()
    assert old in text
    path.unlink()
    path.write_text(text.replace(old, new))


def polite(module: ModuleType) -> Any:
    """Wrap it with functools.wraps."""
    original = getattr(module, NAME)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    setattr(module, NAME, wrapper)
    return wrapper


def wrapt_proxy(module: ModuleType) -> Any:
    """Wrap it with wrapt, which says that it is a function."""
    import wrapt

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    proxy = wrapt.FunctionWrapper(getattr(module, NAME), wrapper)
    setattr(module, NAME, proxy)
    return proxy


def replacement(module: ModuleType) -> Any:
    """Put another function in its place."""

    def model_parallel_cuda_manual_seed(seed: int) -> None:
        """Not upstream's."""

    setattr(module, NAME, model_parallel_cuda_manual_seed)
    return model_parallel_cuda_manual_seed


def recompiled(module: ModuleType) -> Any:
    """Compile altered source in upstream's own globals, as source patchers do."""
    exec(f"def {NAME}(seed):\n    '''Not upstream's.'''\n", vars(module))
    return getattr(module, NAME)


def removed(module: ModuleType) -> Any:
    """Delete it."""
    delattr(module, NAME)
    module.model_parallel_cuda_manual_seed = None  # for the comparison afterwards
    return None


def nothing(module: ModuleType) -> Any:
    """Leave it alone."""
    return getattr(module, NAME)
