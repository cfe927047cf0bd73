"""Patch targets in `megatron.training.training`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_idempotent.engine import Target

#: Upstream adds it to the seed of each pipeline stage.
STAGE_OFFSET = 100
MODULE = "megatron.training.training"
UPSTREAM = "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/training.py"

# Releases before 0.17 carry the module in a source checkout only; others than these go by
# relies_on.
_REVIEWED = {
    "train": {
        "3c1de857b92b": "0.12.0 to 0.12.3",
        "c486bddf8304": "0.13.0 to 0.13.1",
        "2d2e7f215a86": "0.14.0",
        "94a7fb9cdd81": "0.15.0 to 0.15.3",
        "08dd7c5bd589": "0.16.0 to 0.16.1",
        "27b38390540b": "0.17.0 to 0.17.1",
        "dd755bb11482": "0.18.0 to 0.18.2",
        "d6566fce2b15": "0.19.0 to 0.19.2",
    },
    "train_step": {
        "2007c94ab63b": "0.12.0 to 0.12.3",
        "465161e8904e": "0.13.0 to 0.13.1",
        "a059530984b7": "0.14.0 to 0.15.3",
        "c16d41019278": "0.16.0 to 0.17.1",
        "f67c1aed60e8": "dev, December 2025",
        "b031b31b4a39": "dev, February 2026",
        "fd9a6f35844e": "0.18.0 to 0.18.2",
        "da942a64d76d": "0.19.0 to 0.19.2",
        "d7550a88655d": "main, 12 August 2026",
        "c0ec140d6a0f": "main, August 2026",
        "fe3e90c01d89": "dev, August 2026",
        "b394b33345b2": "main, July 2026",
    },
    "evaluate": {
        "b9cd3754b083": "0.12.0 to 0.12.3",
        "1602dd7f5f85": "0.13.0 to 0.13.1",
        "8bf1b995d7cb": "0.14.0",
        "8096035c2029": "0.15.0 to 0.15.3",
        "88feb1d816dc": "0.16.0 to 0.16.1",
        "3be707183415": "0.17.0 to 0.17.1",
        "1db542aaa4e0": "0.18.0 to 0.18.2",
        "7f7223f7c8e9": "0.19.0 to 0.19.2",
    },
}


def target(
    wrapper: Callable[..., Any],
    *relies_on: str,
    function: str = "train",
    parts: Mapping[str, str],
) -> Target:
    """Upstream's `train`, `train_step` or `evaluate`, wrapped at entry and exit."""
    return Target(
        address=f"{MODULE}:{function}",
        wrapper=wrapper,
        reviewed=_REVIEWED[function],
        relies_on=relies_on,
        parts=parts,
    )


def locals_of(function: str, error: BaseException) -> Mapping[str, Any] | None:
    """Upstream's local variables where `error` left `function`; None where it was not inside.

    `train` keeps its counters in local variables and hands them out only where it returns.
    """
    link = error.__traceback__
    while link is not None:
        frame = link.tb_frame
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == MODULE:
            # From Python 3.13 on a proxy, whose keys() are a list that no set compares with.
            return dict(frame.f_locals)
        link = link.tb_next
    return None
