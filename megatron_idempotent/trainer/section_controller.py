"""The section of the asynchronous run; see `sections` for the others, and for how they are made."""

from __future__ import annotations

import dataclasses

from megatron_idempotent.trainer.setting import check_section, setting


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ControllerConfig:
    """The run with `run.mode = "async"`. Example: `ControllerConfig(sampler="strict")`.

    A rollout is then an outer step: `rollout.prompts` groups, which train in
    `optimizer.steps_per_rollout` optimizer steps, and new weights for the engines.
    """

    sampler: str = setting("windowed")
    """Which groups train next: windowed, strict, first_ready, in_order, or a path
    `package.module:Class`."""
    max_staleness: int = setting(2, low=0)
    """Most optimizer steps between the weights that sampled a group and those it trains; for
    windowed and in_order."""
    order: str = setting("freshest", choices=("freshest", "oldest"))
    """Which groups windowed takes first."""
    capacity: int = setting(0, low=0)
    """Groups that may be generating or complete at once; 0 for what the sampler needs."""
    concurrency: int = setting(0, low=0)
    """Groups that may be generating at once; 0 for as many as the capacity."""
    groups_per_call: int = setting(1, low=1)
    """Groups that are handed to the ranks at once, where as many are there."""
    drop_tied: bool = setting(False)
    """Leave out groups whose rewards are all equal; others are sampled in their place."""
    cluster: str = setting("embedded", choices=("embedded", "torchrun", "ray"))
    """Where ranks and engines run: on this machine, under torchrun, or on a Ray cluster."""
    ray_address: str = setting("")
    """Of the Ray cluster, as `ray.init` takes it; empty for RAY_ADDRESS or one on this machine."""
    engines: int = setting(1, low=1, high=4096)
    """Engines of rollout.engine transformers; on Ray, actors."""
    plane: str = setting("memory", choices=("memory", "transfer_queue"))
    """Where complete groups wait: in the controller's memory, or in TransferQueue."""
    step_attempts: int = setting(3, low=1)
    """Of an optimizer step that fails, with the same groups."""
    group_attempts: int = setting(3, low=1)
    """Of a group that cannot be sampled, before it is dropped and reported."""
    restarts: int = setting(3, low=0)
    """Of lost ranks, without a step in between."""
    group_timeout_s: float = setting(300.0, above=0)
    """For all samples of a group, in one attempt."""
    call_timeout_s: float = setting(600.0, above=0)
    """For one call on the ranks, such as a microbatch or a checkpoint; behind it they count as
    lost."""
    stall_s: float = setting(1200.0, above=0)
    """Without any progress, before the run ends with an error that says where it stands."""
    drain_s: float = setting(60.0, above=0)
    """For the open step to end behind SIGTERM; behind it the step is undone."""
    loggers: str = setting("")
    """More loggers, separated by commas: wandb, or `package.module:callable`."""
    timeline: bool = setting(True)
    """Record what every pump does, as a trace and a picture."""

    def __post_init__(self) -> None:
        check_section(self, "controller")
