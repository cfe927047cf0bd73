"""Messages between a pool, its launcher and its ranks: functions by reference, and records.

Free of torch.
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
    """A function by where it is written.

    Example: `FunctionRef(module="tests.cpu.x", qualname="train_twice", file="/…/x.py")`.
    """

    module: str
    qualname: str
    #: None for functions without a source file.
    file: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One run of a function on all ranks."""

    function: FunctionRef
    #: Pickled (args, kwargs): opaque until the rank has the caller's sys.path.
    arguments: bytes
    world_size: int
    timeout_s: float
    distributed: bool
    sys_path: tuple[str, ...]
    cwd: str
    environ: dict[str, str]
    #: File of the caller's `__main__`, for arguments whose classes live there.
    main_file: str | None
    device: Device = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a call. `results` is complete exactly when nothing failed or hung."""

    #: Pickled return value per rank.
    results: dict[int, bytes]
    #: In the order in which they came.
    failures: list[RankFailure]
    #: Stacks per rank, where the deadline passed or a peer of a failed rank had to be ended.
    stacks: dict[int, str]
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


def resolve(ref: FunctionRef) -> Callable[..., Any]:
    """Returns the function of a reference, in a rank; imports its module, by file if need be."""
    if ref.module == "__main__":
        module = load_main(ref.file)
    elif ref.file is None or _known_file(ref.module) == ref.file:
        module = importlib.import_module(ref.module)
    else:
        module = _load_file(ref.module, ref.file)
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
    """One that can be pickled, for who sends this package by value."""

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
    """Return the file that importing `name` would give; None where it cannot be imported."""
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
