"""Scenarios in processes of their own; see `forks`. Each returns something JSON can carry."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

SEED = "megatron.core.tensor_parallel.random"
OPTIMIZER = "megatron.core.optimizer"
DDP = "megatron.core.distributed.distributed_data_parallel"


def live() -> dict[str, Any]:
    """Raw objects at the targets outside of megatron.training, by a short name."""
    ddp = vars(sys.modules[DDP].DistributedDataParallel)
    return {
        "seed": sys.modules[SEED].model_parallel_cuda_manual_seed,
        "optimizer": sys.modules[OPTIMIZER].get_megatron_optimizer,
        "disable": ddp["disable_forward_pre_hook"],
        "enable": ddp["enable_forward_pre_hook"],
    }


def stock(name: str) -> bool:
    """Return whether upstream's own function stands there."""
    return live()[name].__code__.co_filename.endswith(
        ("random.py", "optimizer/__init__.py", "distributed_data_parallel.py")
    )


def import_megatron() -> None:
    """Import what the patches outside of megatron.training need."""
    for name in (SEED, OPTIMIZER, DDP):
        importlib.import_module(name)


def outcomes(
    path: str | None = None,
    environ: dict[str, str] | None = None,
    bare: bool = False,
    first: list[dict[str, Any]] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Rows of `apply(**arguments)`, with Megatron taken from `path`; imports nothing of it."""
    os.environ |= environ or {}
    if bare:
        sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry]
    if path:
        sys.path.insert(0, path)
    import megatron_idempotent

    for earlier in first or ():
        megatron_idempotent.apply(**earlier)
    try:
        report = megatron_idempotent.apply(**arguments)
    except (ValueError, TypeError, megatron_idempotent.PatchError) as error:
        left = {row.id: row.status for row in megatron_idempotent.report()}
        return {"raised": type(error).__name__, "message": str(error), "left": left}
    assert not any(name.split(".")[0] in ("megatron", "torch") for name in sys.modules)
    return {row.id: row.as_dict() for row in report}


def order(steps: str) -> dict[str, Any]:
    """Do `steps` in this order: i import, a apply, r revert; then say what stands there."""
    import megatron_idempotent

    actions = {
        "i": import_megatron,
        "a": megatron_idempotent.apply,
        "r": megatron_idempotent.revert,
    }
    seen: dict[str, set[int]] = {}
    for step in steps:
        actions[step]()
        if SEED in sys.modules:
            for name, value in live().items():
                if not stock(name):
                    seen.setdefault(name, set()).add(id(value))
    return {
        "stock": [stock(name) for name in live()],
        "objects": [len(ids) for ids in seen.values()],
        "statuses": {row.id: row.status for row in megatron_idempotent.report()},
        "bound early": _bound_early_is(live()["seed"]),
    }


def _bound_early_is(function: Any) -> bool:
    import megatron.core.tensor_parallel

    return megatron.core.tensor_parallel.model_parallel_cuda_manual_seed is function


def copy_is_imported(path: str, **arguments: Any) -> dict[str, Any]:
    """Import Megatron from `path`, then apply."""
    sys.path.insert(0, path)
    import_megatron()
    assert str(Path(sys.modules[SEED].__file__ or "")).startswith(path)
    import megatron_idempotent

    report = megatron_idempotent.apply(**arguments)
    return {row.id: row.as_dict() | {"stock": stock("seed")} for row in report}


def fresh_modules() -> dict[str, Any]:
    """Return the modules that importing the package and `apply()` pull in."""
    before = set(sys.modules)
    import megatron_idempotent

    imported = sorted(set(sys.modules) - before)
    finders = list(sys.meta_path)
    megatron_idempotent.apply()
    return {
        "imported": imported,
        "applied": sorted(set(sys.modules) - before),
        "finders added": [type(f).__name__ for f in sys.meta_path if f not in finders],
    }


def source_properties(every: int) -> dict[str, Any]:
    """Cut all top-level functions and classes out of every n-th file of Megatron, and compare."""
    import ast
    import types

    from megatron_idempotent.patching import source

    info = source.locate("megatron.core.package_info")
    assert info is not None
    checked, wrong, cut = 0, [], 0
    parsed: list[str] = []
    source.ast = types.SimpleNamespace(**vars(ast))  # type: ignore[assignment]
    source.ast.parse = lambda text: parsed.append(text) or ast.parse(text)  # type: ignore[assignment]
    for path in sorted(info.parents[1].rglob("*.py"))[::every]:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        whole = {n.name for n in tree.body if isinstance(n, source._Definition)}
        for name in sorted(whole):
            expected = source._definition(tree.body, name)
            found = source._parse_definition(text, name)
            checked += 1
            cut += text not in parsed
            parsed.clear()
            if _extent(found) != _extent(expected):
                wrong.append(f"{path}: {name}")
    return {"checked": checked, "wrong": wrong, "cut": cut}


def _extent(node: Any) -> tuple[Any, ...]:
    # Both come from the same text and have the same name, so the same extent is the same code.
    return (
        type(node).__name__,
        len(node.decorator_list),
        node.lineno,
        node.end_lineno,
        node.end_col_offset,
        len(node.body),
    )


def live_outcome(prepare: str, **arguments: Any) -> dict[str, Any]:
    """Import Megatron, do something to it, apply, and tell everything."""
    import_megatron()
    import alterations

    expected = getattr(alterations, prepare)(sys.modules[SEED])
    import megatron_idempotent

    raised = None
    try:
        megatron_idempotent.apply(**arguments)
    except megatron_idempotent.PatchError as error:
        raised = str(error)
    return {
        "raised": raised,
        "rows": {row.id: row.as_dict() for row in megatron_idempotent.report()},
        "untouched": [stock(name) for name in live() if name != "seed"],
        "seed untouched": expected is live()["seed"],
    }
