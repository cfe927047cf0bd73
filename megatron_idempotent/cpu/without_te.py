"""Names that upstream uses without Transformer Engine but defines only with it.

Imported by `enable()` only. Each entry is one upstream oversight; the name gets the value that
upstream's own code tests for. A module that is imported while the runtime is on is completed as
soon as it is loaded.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def _no_quantized_shards(*_args: Any, **_kwargs: Any) -> None:
    """Without Transformer Engine no parameter is quantized, so there is nothing to write back."""


#: module → {name: value}. `te_general_gemm is not None` guards the fused router GEMM (0.14 on);
#: 0.12's optimizer calls `quantize_param_shard` unconditionally after each step.
MISSING: dict[str, dict[str, Any]] = {
    "megatron.core.transformer.moe.moe_utils": {"te_general_gemm": None},
    "megatron.core.optimizer.distrib_optimizer": {"quantize_param_shard": _no_quantized_shards},
}

Complete = Callable[[ModuleType, str, Any], None]


class Completer(importlib.abc.MetaPathFinder):
    """Completes the modules of MISSING right after they are loaded; stands in `sys.meta_path`."""

    def __init__(self, complete: Complete) -> None:
        self._complete = complete

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in MISSING:
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
        complete(module, self._complete)


def complete(module: ModuleType, replace: Complete) -> None:
    """Give `module` the names it lacks; those it has stay."""
    for name, value in MISSING[module.__name__].items():
        if name not in vars(module):
            replace(module, name, value)
