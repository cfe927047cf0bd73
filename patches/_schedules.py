"""What the case files about Megatron's three pipeline schedules share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_idempotent.engine import Target

MODULE = "megatron.core.pipeline_parallel.schedules"
UPSTREAM = (
    "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/pipeline_parallel/"
    "schedules.py"
)

# Body hash → releases, read by a person for every case file that wraps the function at its entry
# and exit. All three take keyword arguments only.
_REVIEWED = {
    "forward_backward_no_pipelining": {
        "b4079b4206f0": "0.12.0 to 0.12.3",
        "b9465cf928ad": "0.13.0 to 0.13.1",
        "c5025eae2e28": "0.14.0",
        "9c17d0663b39": "0.15.0 to 0.15.3",
        "b7585baf001f": "0.16.0 to 0.16.1",
        "646a080b3db1": "0.17.0 to 0.17.1",
        "2c49cb331e8d": "0.18.0 to 0.18.2",
        "435a74b6b813": "0.19.0 to 0.19.2",
    },
    "forward_backward_pipelining_with_interleaving": {
        "eb66840aae6f": "0.12.0 to 0.12.3",
        "f2756d868726": "0.13.0 to 0.13.1",
        "95432080c07c": "0.14.0",
        "f8cd1c9128c8": "0.15.0 to 0.15.3",
        "c45f2fa8238f": "0.16.0 to 0.16.1",
        "6f7ec825a910": "0.17.0 to 0.17.1",
        "461e897b86c0": "0.18.0 to 0.18.2",
        "6e2a29a1bb6a": "0.19.0 to 0.19.2",
    },
    "forward_backward_pipelining_without_interleaving": {
        "6f2e7fd96991": "0.12.0 to 0.12.3",
        "1c8b211f82a3": "0.13.0 to 0.13.1",
        "2072a36d9b5e": "0.14.0",
        "211214bcf7da": "0.15.0 to 0.15.3",
        "cd40e3c43be6": "0.16.0 to 0.16.1",
        "2bf74c3ba384": "0.17.0 to 0.17.1",
        "8bbd4a22d807": "0.18.0 to 0.18.2",
        "2b029f54786b": "0.19.0 to 0.19.2",
    },
}


def targets(wrapper: Callable[..., Any], *names: str) -> tuple[Target, ...]:
    """The schedules called `names`, all three by default, under one wrapper."""
    return tuple(
        Target(address=f"{MODULE}:{name}", wrapper=wrapper, reviewed=_REVIEWED[name])
        for name in names or _REVIEWED
    )


def chunks(model: Any) -> list[Any]:
    """The model chunks of a schedule's `model` argument, which may be one chunk alone."""
    return list(model) if isinstance(model, list) else [model]
