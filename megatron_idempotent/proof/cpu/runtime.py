"""Turns the emulation on and off, and adapts modules of Megatron and torch as they are loaded.

Modules are adapted where upstream needs a full GPU installation by oversight: it uses a name
without Transformer Engine that is defined only with it, or builds something that the wheel ships
built. No such change touches what Megatron computes.

`torch.compile` and `torch.compiler.disable` import the compiler, which takes a quarter of the time
of the import of Megatron, where functions are decorated with both. Under the runtime none of them
runs compiled, so a plain function is decorated only in its first call after the runtime is off.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from megatron_idempotent.patching.base import PerProcess, PerProcessLock

_MISSING = object()


def dressed(original: Any, replacement: Any) -> Any:
    """Return a copy of `replacement` that has the name, signature and attributes of `original`.

    torch reads them: `torch._dynamo` asks for `torch.cuda.use_mem_pool.__wrapped__` while it is
    imported. A replacement that is not a plain function is returned as it is.
    """
    if type(replacement) is not FunctionType or isinstance(original, type):
        return replacement
    copy = FunctionType(
        replacement.__code__,
        replacement.__globals__,
        argdefs=replacement.__defaults__,
        closure=replacement.__closure__,
    )
    copy.__kwdefaults__ = replacement.__kwdefaults__
    functools.update_wrapper(copy, original)
    copy.__dict__.update(getattr(original, "__dict__", {}))  # its own __wrapped__, if it has one
    return copy


class _Active:
    """Puts the emulation in place: `start` replaces names of torch and adapts modules, and `stop`
    undoes both.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[Any, str, Any]] = []
        # (id of an original, id of its replacement) → the one object installed for all its names.
        self._dressed: dict[tuple[int, int], Any] = {}
        self._finder = Completer(self.replace)

    def start(self) -> None:
        from . import collectives, device, placement

        gloo = torch.distributed.ProcessGroupGloo
        # All are computed before any is installed: they look up originals.
        planned = [
            *device.replacements(),
            *placement.tensor_replacements(),
            *collectives.collective_replacements(),
            (gloo, "__init__", collectives.on_one_device(gloo.__init__)),
            (torch, "compile", _later(torch.compile)),
            (torch.compiler, "disable", _later(torch.compiler.disable)),
        ]
        for owner, name, value in planned:
            self.replace(owner, name, value)
        sys.meta_path.insert(0, self._finder)
        for module_name, complete in COMPLETE.items():
            if (module := sys.modules.get(module_name)) is not None:
                complete(module, self.replace)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        # The raw entry: getattr would turn static methods and inherited ones into something else.
        self.entries.append((owner, name, vars(owner).get(name, _MISSING)))
        original = getattr(owner, name, None)
        key = id(original), id(value)
        if key not in self._dressed:
            self._dressed[key] = dressed(original, value)
        setattr(owner, name, self._dressed[key])

    def stop(self) -> None:
        """Set every replaced name back to the original object, the last one first."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        while self.entries:
            owner, name, original = self.entries.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


class _Runtime(PerProcess):
    active: _Active | None = None
    depth = 0


_runtime = _Runtime(__name__, "_runtime")
_lock = PerProcessLock(__name__, "_lock", threading.RLock)


def enable() -> None:
    """Emulate `torch.cuda` on the CPU for Megatron until the matching `disable()`.

    Calls nest: the runtime stays on until `disable()` has been called as often. It is on for the
    whole process, not for one thread.

    Raises:
        RuntimeError: a CUDA device is in reach, so that emulating one would hide it.
    """
    with _lock:
        if _runtime.active is None:
            if torch.cuda.is_available():
                visible = os.environ.get("CUDA_VISIBLE_DEVICES")
                setting = "is not set" if visible is None else f"is {visible!r}"
                raise RuntimeError(
                    "megatron_idempotent.proof.cpu emulates CUDA where there is none, but this "
                    f"process can use {torch.cuda.device_count()} CUDA device(s) "
                    f"(CUDA_VISIBLE_DEVICES {setting}); start it with "
                    'CUDA_VISIBLE_DEVICES="" to use the CPU runtime'
                )
            activation = _Active()
            with contextlib.ExitStack() as undo_if_it_fails:
                undo_if_it_fails.callback(activation.stop)
                activation.start()
                undo_if_it_fails.pop_all()
            _runtime.active = activation
        _runtime.depth += 1


def disable() -> None:
    """Undo one `enable()`; the last one sets every replaced name back to the original object.

    A call without a matching `enable()` does nothing.
    """
    with _lock:
        if _runtime.active is None:
            return
        _runtime.depth -= 1
        if _runtime.depth == 0:
            activation, _runtime.active = _runtime.active, None
            activation.stop()


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Turn the runtime on inside of a block: `with cpu.enabled():`."""
    enable()
    try:
        yield
    finally:
        disable()


def is_enabled() -> bool:
    """Return whether the runtime is on: between `enable()` and its matching `disable()`."""
    return _runtime.active is not None


def replaced_names() -> set[str]:
    """Return the names that are replaced now, e.g. "torch.cuda.synchronize"; empty when off."""
    return {
        f"{getattr(owner, '__module__', None) or ''}.{owner.__qualname__}.{name}"
        if isinstance(owner, type)
        else f"{owner.__name__}.{name}"
        for owner, name, _ in (_runtime.active.entries if _runtime.active else ())
    }


def replaced_name_in(error: BaseException) -> str | None:
    """Return the emulated name, such as "torch.cuda.Event", in the source line that raised `error`,
    or None.
    """
    raised = traceback.extract_tb(error.__traceback__)[-1:]
    names = [name for frame in raised for name in replaced_names() if name in (frame.line or "")]
    return max(names, key=len, default=None)


Complete = Callable[[ModuleType, str, Any], None]


def _optimizer(module: ModuleType, replace: Complete) -> None:
    # Called after each step of the distributed optimizer with the list of quantized parameters.
    # Without Transformer Engine that list is empty, and 0.12 raises before it looks.
    original = vars(module).get("quantize_param_shard")
    if original is None:
        return

    @functools.wraps(original)
    def quantize_param_shard(model_params: Any, *args: Any, **kwargs: Any) -> None:
        if model_params:
            original(model_params, *args, **kwargs)

    replace(module, "quantize_param_shard", quantize_param_shard)


def _optimizer_config(module: ModuleType, replace: Complete) -> None:
    # 0.13 to 0.15 compare the version of Transformer Engine, which is None without it, though an
    # optimizer on the host needs none.
    if "is_te_min_version" in vars(module) and not importlib.util.find_spec("transformer_engine"):
        replace(module, "is_te_min_version", lambda *_args, **_kwargs: False)


def _moe(module: ModuleType, replace: Complete) -> None:
    # 0.14 on: the router tests `te_general_gemm is not None` before it uses it.
    if "te_general_gemm" not in vars(module):
        replace(module, "te_general_gemm", None)


def _datasets(module: ModuleType, replace: Complete) -> None:
    folder = Path(str(module.__file__)).parent
    if not (folder / "Makefile").exists() and any(folder.glob("helpers_cpp.*")):
        replace(module, "compile_helpers", lambda: None)  # the wheel ships them built


def _compiler(module: ModuleType, replace: Complete) -> None:
    # What torch.compiler.set_stance("force_eager") sets, without importing the compiler for it
    # (7 s): Megatron's `jit_fuser` is torch.compile, bound when Megatron is imported, and the
    # stance reaches functions that were decorated before.
    if "_stance" in vars(module):  # torch 2.6 on
        replace(module, "_stance", module.DynamoStance("force_eager"))


class _Forked:
    """Stands in for the module `torch.multiprocessing`, and forks all processes that a CPU rank
    starts.

    One that is spawned would import Megatron, which takes some ten seconds, without this runtime.
    On a GPU it has to be spawned: a fork cannot use the driver.
    """

    def get_context(self, method: str | None = None) -> Any:
        return torch.multiprocessing.get_context("fork" if is_enabled() else method)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.multiprocessing, name)


def _writers(module: ModuleType, complete: Complete) -> None:
    """Replace `mp`, torch.multiprocessing, in a module that saves checkpoints asynchronously, so
    that a CPU rank forks the processes that write them.
    """
    complete(module, "mp", _Forked())


_STRATEGIES = "megatron.core.dist_checkpointing.strategies"
_EXTENSION = "nvidia_resiliency_ext.checkpointing.async_ckpt"
COMPLETE: dict[str, Callable[[ModuleType, Complete], None]] = {
    f"{_STRATEGIES}.async_utils": _writers,
    f"{_STRATEGIES}.filesystem_async": _writers,
    f"{_EXTENSION}.core": _writers,
    f"{_EXTENSION}.filesystem_async": _writers,
    "torch._dynamo.eval_frame": _compiler,
    "megatron.core.datasets.utils": _datasets,
    "megatron.core.optimizer.distrib_optimizer": _optimizer,
    "megatron.core.optimizer.optimizer_config": _optimizer_config,
    "megatron.core.transformer.moe.moe_utils": _moe,
}


class Completer(importlib.abc.MetaPathFinder):
    """An import finder in `sys.meta_path` that changes certain modules of torch and Megatron, those
    in COMPLETE, right after they are loaded.
    """

    def __init__(self, complete: Complete) -> None:
        self._complete = complete

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in COMPLETE:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)):
                break
        else:
            return None
        if (loader := spec.loader) is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                COMPLETE[fullname](module, self._complete)

            # On this loader alone: source lookup goes through it, and a reload makes another.
            setattr(loader, "exec_module", exec_module)  # noqa: B010 (mypy: a method)
        return spec


def _later(decorate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a decorator so that it postpones its work on a plain function: the function runs
    undecorated while the runtime is on, and is decorated at its first call with the runtime off.
    Other objects are decorated at once.
    """

    @functools.wraps(decorate)
    def decorator(*args: Any, **options: Any) -> Any:
        if not args and not options.keys() & {"model", "fn"}:
            return functools.partial(decorator, **options)
        if len(args) != 1 or type(args[0]) is not FunctionType:
            return decorate(*args, **options)
        (plain,) = args
        decorated = functools.cache(lambda: decorate(plain, **options))

        # It binds as a method, and pickles by name.
        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (plain if is_enabled() else decorated())(*args, **kwargs)

        return call

    return decorator
