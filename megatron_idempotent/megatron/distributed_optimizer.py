"""Patch targets in the distributed optimizer's checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_idempotent.engine import Target

_MODULE = "megatron.core.optimizer.distrib_optimizer"
UPSTREAM = (
    "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/optimizer/"
    "distrib_optimizer.py"
)

# Body hash → releases, read by a person for every case file that uses the method.
_REVIEWED = {
    "state_dict": {
        "a8f5b130215d": "0.12.0 to 0.13.1",
        "ed939f25d63c": "0.14.0",
        "517a44685655": "0.15.0 to 0.19.2",
        "7b945c8203df": "slime's patch and miles' fork, August 2026",
    },
    "load_state_dict": {
        "8caa0198d084": "0.12.0 to 0.12.3",
        "4ab433e14e59": "0.13.0 to 0.13.1",
        "bc2722b2d5a9": "0.14.0",
        "94e171bc79ce": "0.15.0 to 0.15.3",
        "cbe25a473496": "0.16.0 to 0.18.2",
        "0bc9f68a4a8c": "0.19.0 to 0.19.2",
        "29e68aa9b850": "miles' fork, August 2026",
        "7e4330203d8a": "dev, August 2026",
    },
}


def target(method: str, wrapper: Callable[..., Any]) -> Target:
    """A method of `DistributedOptimizer`."""
    return Target(
        address=f"{_MODULE}:DistributedOptimizer.{method}",
        wrapper=wrapper,
        reviewed=_REVIEWED[method],
    )


def is_torch_adam(optimizer: Any) -> bool:
    """Returns whether an optimizer counts steps per parameter, as only torch's Adam does."""
    import torch
    from megatron.core.optimizer import distrib_optimizer

    return not distrib_optimizer.HAVE_APEX_OR_TE and isinstance(
        optimizer.optimizer, (torch.optim.Adam, torch.optim.AdamW)
    )
