"""Modules that are adapted as soon as they are loaded: torch's compiler, and upstream oversights.

An oversight is what upstream needs of a full GPU installation for no reason of its own: a name
that is used without Transformer Engine but defined only with it, or a build step for something
that the wheel ships built. None of them changes what Megatron computes. Free of torch.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def _already_compiled() -> None:
    """`initialize_megatron` runs make for a library that the wheel ships built."""


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


def _moe(module: ModuleType, replace: Complete) -> None:
    # 0.14 on: the router tests `te_general_gemm is not None` before it uses it.
    if "te_general_gemm" not in vars(module):
        replace(module, "te_general_gemm", None)


def _datasets(module: ModuleType, replace: Complete) -> None:
    folder = Path(str(module.__file__)).parent
    if not (folder / "Makefile").exists() and any(folder.glob("helpers_cpp.*")):
        replace(module, "compile_helpers", _already_compiled)


def _compiler(module: ModuleType, replace: Complete) -> None:
    # What torch.compiler.set_stance("force_eager") sets, without importing the compiler for it
    # (7 s): Megatron's `jit_fuser` is torch.compile, bound when Megatron is imported, and the
    # stance reaches functions that were decorated before.
    if "_stance" in vars(module):  # torch 2.6 on
        replace(module, "_stance", module.DynamoStance("force_eager"))


COMPLETE: dict[str, Callable[[ModuleType, Complete], None]] = {
    "torch._dynamo.eval_frame": _compiler,
    "megatron.core.datasets.utils": _datasets,
    "megatron.core.optimizer.distrib_optimizer": _optimizer,
    "megatron.core.transformer.moe.moe_utils": _moe,
}


class Completer(importlib.abc.MetaPathFinder):
    """Completes the modules of COMPLETE right after they are loaded; stands in `sys.meta_path`."""

    def __init__(self, complete: Complete) -> None:
        self._complete = complete

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in COMPLETE:
            return None
        spec = None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)):
                break
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._complete)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader, complete: Complete) -> None:
        self._inner = inner
        self._complete = complete

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its ordinary loader: source lookup and reload go through it.
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        COMPLETE[module.__name__](module, self._complete)
