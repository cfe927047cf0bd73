"""Defines the messages between a pool, its launcher and its ranks; functions go by reference.

Importing this does not import torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import pickle
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import RankFailure
from .gpu import Device

#: The name multiprocessing gives the parent's main module in a child; importing multiprocessing
#: makes it an alias of `__main__` in the parent, so that pickles travel both ways.
MAIN_IN_RANK = "__mp_main__"


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionRef:
    """Names a function by the place where it is written.

    Example: `FunctionRef(module="tests.cpu.x", qualname="train_twice", file="/…/x.py")`.
    """

    module: str
    qualname: str
    #: The source file; None for functions without one.
    file: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Asks for one run of a function on all ranks."""

    function: FunctionRef
    #: Pickled (args, kwargs), which can be read only once the rank has the caller's sys.path.
    arguments: bytes
    world_size: int
    timeout_s: float
    distributed: bool
    sys_path: tuple[str, ...]
    cwd: str
    environ: dict[str, str]
    #: The file of the caller's `__main__`, for arguments whose classes are defined there.
    main_file: str | None
    device: Device = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Holds the outcome of a call. `results` is complete exactly if nothing failed or hung."""

    #: The pickled return value of each rank.
    results: dict[int, bytes]
    #: The failures in the order in which they came.
    failures: list[RankFailure]
    #: The stacks of ranks that missed the deadline, or were ended because a peer had failed.
    stacks: dict[int, str]
    #: True if the deadline passed.
    timed_out: bool


def refer(function: Callable[..., Any]) -> FunctionRef:
    """Return a reference to a module-level function.

    Raises:
        ValueError: a lambda, a closure or anything else a rank could not look up.
    """
    module = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", None)
    if module is None or qualname is None:
        raise ValueError(
            f"ranks look functions up by name, and {function!r} has none; pass a function defined "
            f"at the top of a module, and its data as arguments"
        )
    if "<lambda>" in qualname or "<locals>" in qualname:
        raise ValueError(
            f"ranks look functions up by name, and {module}.{qualname} exists only inside "
            f"another function; define it at the top of the module and pass what it closes over "
            f"as arguments"
        )
    if _lookup(sys.modules[module], qualname) is not function:
        raise ValueError(
            f"{module}.{qualname} names another object than the function passed; pass the one "
            f"that the module holds under that name"
        )
    file = getattr(sys.modules[module], "__file__", None)
    return FunctionRef(module=module, qualname=qualname, file=file and os.path.abspath(file))


_importing: list[str] = []
"""The module that this rank imports for a call, while it does."""


def refuse_if_importing() -> None:
    """Raise where a module starts ranks while a rank imports it, each of which would do the same.

    Raises:
        RuntimeError: it is imported for a call.
    """
    if _importing:
        raise RuntimeError(
            f"{_importing[0]} starts ranks while a rank imports it, and each of those would import "
            'it again: put what starts them under `if __name__ == "__main__":`'
        )


def resolve(ref: FunctionRef) -> Callable[..., Any]:
    """Return the function of a reference, in a rank; import its module, if needed from a file."""
    _importing.append(ref.file or ref.module)
    try:
        if ref.module == "__main__":
            module = load_main(ref.file)
        elif ref.file is None or _known_file(ref.module) == ref.file:
            module = importlib.import_module(ref.module)
        else:
            module = _load_file(ref.module, ref.file)
    finally:
        _importing.clear()
    found: Callable[..., Any] = _lookup(module, ref.qualname)
    return found


def load_main(file: str | None) -> ModuleType:
    """Load the caller's main module, without what it guards by `__name__ == "__main__"`."""
    if file is None:
        raise ValueError(
            "the function lives in a __main__ without a file (an interactive session); put it "
            "into a module"
        )
    module = sys.modules.get(MAIN_IN_RANK)
    if module is None or getattr(module, "__file__", None) != file:
        module = _load_file(MAIN_IN_RANK, file)
        sys.modules["__main__"] = module
    return module


def load_arguments(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a call, in a rank."""
    if b"__main__" in call.arguments and call.main_file is not None:
        load_main(call.main_file)
    args, kwargs = pickle.loads(call.arguments)
    return args, kwargs


class PicklableStruct(struct.Struct):
    """Adds pickling to `struct.Struct`, for callers who send this package by value."""

    def __reduce__(self) -> tuple[type[PicklableStruct], tuple[str]]:
        return type(self), (self.format,)


class StoragePickler(pickle.Pickler):
    """Keeps Megatron out of results: importing it replaces the function that storages name."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, (torch.TypedStorage, torch.UntypedStorage)):
            _, arguments = obj.__reduce__()
            return _load_storage, arguments
        return NotImplemented


def _load_storage(data: bytes) -> Any:
    import torch

    # The caller may have no device, and would start the driver for one that it has.
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def dump_result(result: Any) -> bytes:
    """Pickle a rank's result so that the caller need not import Megatron to read it."""
    out = io.BytesIO()
    StoragePickler(out).dump(result)
    return out.getvalue()


def _known_file(name: str) -> str | None:
    """Return the file that importing `name` would load; None if it cannot be imported."""
    if (module := sys.modules.get(name)) is not None:
        origin = getattr(module, "__file__", None)
    else:
        parent = name.rpartition(".")[0]
        if parent and _known_file(parent) is None:
            return None
        spec = importlib.util.find_spec(name)
        origin = spec.origin if spec is not None else None
    return origin and os.path.abspath(origin)


def _load_file(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} (for module {name}) is not a Python source file")
    module = importlib.util.module_from_spec(spec)
    # Before execution and under its own name: pickling looks classes up there.
    sys.modules[name] = module
    sys.path.insert(0, str(Path(file).parent))
    spec.loader.exec_module(module)
    return module


def _lookup(module: ModuleType, qualname: str) -> Any:
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found
