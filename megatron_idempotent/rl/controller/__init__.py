"""Runs sampling and training at once: groups train as they arrive, and engines get new weights.

`Controller` is the loop, and `controller.protocol` defines the parts that it is made of. `Fleet`
makes a generator of engines, and samplers bound how old weights may be. Nothing is imported before
it is used: the simulator runs all of this without a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_idempotent.lazy import attributes

if TYPE_CHECKING:
    from megatron_idempotent.rl.metrics.loggers import Logger, SettingsError

    from .controller import Controller, Evaluate
    from .data_plane import MemoryPlane
    from .fleet import Fleet
    from .optimizer_step import train
    from .protocol import (
        AbortingSampler,
        Admission,
        ControllerError,
        Counts,
        DataPlane,
        EnginesLost,
        Generating,
        Generator,
        Held,
        LogprobsOf,
        OneShotPolicy,
        PoisonedPrompt,
        Policy,
        Prompts,
        PublishFailed,
        Ready,
        Recipe,
        RolloutGroup,
        Sampler,
        Stalled,
        Status,
        StepFailed,
        StepOutcome,
        Store,
    )
    from .samplers import (
        FirstReadySampler,
        InOrderSampler,
        StrictSampler,
        WindowedSampler,
        load_sampler,
    )
    from .settings import ControllerSettings

_HOMES = {
    "AbortingSampler": "protocol",
    "Admission": "protocol",
    "Controller": "controller",
    "ControllerError": "protocol",
    "ControllerSettings": "settings",
    "Counts": "protocol",
    "DataPlane": "protocol",
    "EnginesLost": "protocol",
    "Evaluate": "controller",
    "FirstReadySampler": "samplers",
    "Fleet": "fleet",
    "Generating": "protocol",
    "Generator": "protocol",
    "Held": "protocol",
    "InOrderSampler": "samplers",
    "Logger": ".metrics.loggers",
    "LogprobsOf": "protocol",
    "MemoryPlane": "data_plane",
    "OneShotPolicy": "protocol",
    "PoisonedPrompt": "protocol",
    "Policy": "protocol",
    "Prompts": "protocol",
    "PublishFailed": "protocol",
    "Ready": "protocol",
    "Recipe": "protocol",
    "RolloutGroup": "protocol",
    "Sampler": "protocol",
    "SettingsError": ".metrics.loggers",
    "Stalled": "protocol",
    "Status": "protocol",
    "StepFailed": "protocol",
    "StepOutcome": "protocol",
    "Store": "protocol",
    "StrictSampler": "samplers",
    "WindowedSampler": "samplers",
    "load_sampler": "samplers",
    "train": "optimizer_step",
}

__all__ = [
    "AbortingSampler",
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
    "Generating",
    "Generator",
    "Held",
    "InOrderSampler",
    "Logger",
    "LogprobsOf",
    "MemoryPlane",
    "OneShotPolicy",
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
    "train",
]


__getattr__ = attributes(__name__, _HOMES)
