"""Finds a planted bug by its name, in whichever module has it: certify calls it `planted:NAME`."""

from __future__ import annotations

import importlib
from typing import Any

#: The last one needs what not all releases of Megatron have.
MODULES = ("planted_train_step", "planted_more", "planted_steps", "planted_state")


def __getattr__(name: str) -> Any:
    for module in map(importlib.import_module, MODULES):
        if name in vars(module):
            return vars(module)[name]
    raise AttributeError(f"no bug is planted as {name}")
