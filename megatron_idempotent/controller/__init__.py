"""The asynchronous controller: rollouts stream in, groups train as they arrive, weights go out.

`Controller` is the loop, and what it is made of are the protocols of `controller.protocol`. `Fleet`
makes a generator of engines, and samplers bound how old weights may be. Nothing is imported before
it is used: the simulator runs all of this without a model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .controller import Controller
    from .data_plane import MemoryPlane
    from .errors import (
        ControllerError,
        EnginesLost,
        PoisonedPrompt,
        PublishFailed,
        SettingsError,
        Stalled,
        StepFailed,
    )
    from .evaluation import Evaluate
    from .fleet import Fleet
    from .protocol import (
        DataPlane,
        Generator,
        Logger,
        LogprobsOf,
        Policy,
        Prompts,
        Ready,
        Recipe,
        Sampler,
        Store,
    )
    from .records import Admission, Counts, Held, RolloutGroup, Status, StepOutcome
    from .samplers import (
        FirstReadySampler,
        InOrderSampler,
        StrictSampler,
        WindowedSampler,
        load_sampler,
    )
    from .settings import ControllerSettings

_HOMES = {
    "controller": ("Controller",),
    "evaluation": ("Evaluate",),
    "data_plane": ("MemoryPlane",),
    "errors": (
        "ControllerError",
        "EnginesLost",
        "PoisonedPrompt",
        "PublishFailed",
        "SettingsError",
        "Stalled",
        "StepFailed",
    ),
    "fleet": ("Fleet",),
    "protocol": (
        "DataPlane",
        "Generator",
        "Logger",
        "LogprobsOf",
        "Policy",
        "Prompts",
        "Ready",
        "Recipe",
        "Sampler",
        "Store",
    ),
    "records": ("Admission", "Counts", "Held", "RolloutGroup", "Status", "StepOutcome"),
    "samplers": (
        "FirstReadySampler",
        "InOrderSampler",
        "StrictSampler",
        "WindowedSampler",
        "load_sampler",
    ),
    "settings": ("ControllerSettings",),
}

__all__ = [
    "Admission",
    "Controller",
    "ControllerError",
    "ControllerSettings",
    "Counts",
    "DataPlane",
    "EnginesLost",
    "Evaluate",
    "FirstReadySampler",
    "Fleet",
    "Generator",
    "Held",
    "InOrderSampler",
    "Logger",
    "LogprobsOf",
    "MemoryPlane",
    "PoisonedPrompt",
    "Policy",
    "Prompts",
    "PublishFailed",
    "Ready",
    "Recipe",
    "RolloutGroup",
    "Sampler",
    "SettingsError",
    "Stalled",
    "Status",
    "StepFailed",
    "StepOutcome",
    "Store",
    "StrictSampler",
    "WindowedSampler",
    "load_sampler",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            from megatron_idempotent.missing import naming_the_remedy

            with naming_the_remedy(f"{__name__}.{name}"):
                return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
