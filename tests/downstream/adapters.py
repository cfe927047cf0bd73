"""Loads the adapters of `examples/` for frameworks' own steps, by the names of the frameworks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

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


def adapter(name: str) -> Any:
    """The module `examples/<name>_step.py`; its framework has to be on the path."""
    file = EXAMPLES / f"{name}_step.py"
    spec = importlib.util.spec_from_file_location(f"adapter_for_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
