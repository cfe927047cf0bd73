"""Scenarios in processes of their own, see `forks`; and what they ask of a live Megatron."""

from __future__ import annotations

import importlib
import os
import sys
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
            inside = getattr(expected, "body", ())
            for method in {each.name for each in inside if type(each) is ast.FunctionDef}:
                found = source._parse_method(text, name, method)
                checked += 1
                cut += found is not None
                if found and _extent(found) != _extent(source._definition(expected.body, method)):
                    wrong.append(f"{path}: {name}.{method}")
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


def compiled_around_and_below() -> None:
    """Compile upstream's function before and after the patch; look who calls whom."""
    import torch
    from megatron.core.tensor_parallel import layers

    import megatron_idempotent

    upstream, patch_id = layers.linear_with_frozen_weight, "frozen-weight-bias-untrained"

    def trains_its_bias(function: Any) -> bool:
        """The patch is what gives the bias a gradient."""
        weight, bias = torch.ones(5, 4), torch.zeros(5, requires_grad=True)
        data = torch.ones(3, 4, requires_grad=True)
        out = function(data, weight, bias, False, False, False, None)
        out.sum().backward()
        assert torch.equal(out, torch.full((3, 5), 4.0))
        return bias.grad is not None

    def compiled() -> Any:
        return torch.compile(layers.linear_with_frozen_weight, backend="eager")

    def reason() -> str:
        return megatron_idempotent.report()[patch_id].reason

    before = sys.modules["scenarios"].compiled_early = compiled()
    assert not trains_its_bias(before)
    megatron_idempotent.apply(only=[patch_id])
    after = compiled()
    assert trains_its_bias(layers.linear_with_frozen_weight)
    assert trains_its_bias(after)
    assert not trains_its_bias(before)
    assert "scenarios.compiled_early holds upstream's" in reason()
    layers.linear_with_frozen_weight = after
    assert "wrapped by torch.compile: runs outside of ours" in reason()
    assert megatron_idempotent.apply(only=[patch_id])[patch_id].status == "already_applied"
    assert "torch.compile wrapped " in megatron_idempotent.revert()[patch_id].reason
    assert layers.linear_with_frozen_weight is after
    assert not trains_its_bias(after)
    layers.linear_with_frozen_weight = upstream
    layers.linear_with_frozen_weight = before
    megatron_idempotent.apply(only=[patch_id])
    assert "wrapped by torch.compile before us: runs inside of ours" in reason()
    assert trains_its_bias(layers.linear_with_frozen_weight)
    megatron_idempotent.revert()
    assert layers.linear_with_frozen_weight is before
