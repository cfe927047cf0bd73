"""Imports frameworks from checkouts, and loads the adapters of `examples/` for their steps."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_idempotent.patches.frameworks import _standins

EXAMPLES = Path(__file__).parents[2] / "examples"
#: The model of packs, with which no position ids come, and whose sizes differ.
PACKED = {
    "exact_attention": True,
    "model_overrides": {"position_embedding_type": "rope"},
    "config_overrides": {
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_aux_loss_coeff": 1.0,
    },
}


def import_from(source: str, package: str, names: Sequence[str], *absent: str) -> dict[str, Any]:
    """Import modules of a framework from its checkout, in this order; return name → module.

    Stand-ins replace ray, the rest of the framework, and what is `absent` and not installed.
    """
    if source not in sys.path:
        sys.path.insert(0, source)
        _standins.replace("ray")
    return _standins.import_all(package, names, *absent)


def same_bits(run: Callable[..., Any], cases: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Run each case with the adapter and without it; return whether both outcomes are equal.

    `run(adapted, **options)` returns an outcome; `cases` are the options by name.
    """
    return {name: run(True, **options) == run(False, **options) for name, options in cases.items()}


def adapter(name: str) -> Any:
    """The module `examples/<name>_step.py`; its framework has to be on the path."""
    file = EXAMPLES / f"{name}_step.py"
    spec = importlib.util.spec_from_file_location(f"adapter_for_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
