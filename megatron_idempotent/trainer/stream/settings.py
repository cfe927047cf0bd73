"""Makes the controller's settings of the trainer's configuration."""

from __future__ import annotations

from typing import Any

from megatron_idempotent.controller import (
    ControllerSettings,
    Sampler,
    SettingsError,
    load_sampler,
)
from megatron_idempotent.controller.samplers import SamplerError
from megatron_idempotent.trainer.config import Config
from megatron_idempotent.trainer.errors import ConfigError
from megatron_idempotent.trainer.task.reward import import_from_here


def make_sampler(config: Config) -> Sampler:
    """The sampler that the configuration names. Errors: `ConfigError`."""
    controller = config.controller
    options: dict[str, dict[str, Any]] = {
        "windowed": {"max_staleness": controller.max_staleness, "order": controller.order},
        "in_order": {"lookahead": controller.max_staleness},
    }
    import_from_here()
    try:
        return load_sampler(controller.sampler, **options.get(controller.sampler, {}))
    except SettingsError as error:
        raise ConfigError(f"controller.sampler: {error}") from error


def make_settings(config: Config) -> ControllerSettings:
    """Sizes and limits of the run. Errors: `ConfigError`, also for what a sampler cannot meet."""
    controller, loss = config.controller, config.loss
    reference = bool(loss.kl_coefficient) and loss.kl_reference == "initial"
    proximal = loss.old_logprobs == "recomputed"
    asked = {
        (False, False): "none",
        (True, False): "reference",
        (False, True): "policy",
        (True, True): "both",
    }[reference, proximal]
    groups_per_step = config.global_batch_size // config.rollout.group_size
    try:
        settings = ControllerSettings(
            target_groups=config.rollout.prompts,
            group_size=config.rollout.group_size,
            train_global_batch_size=config.global_batch_size,
            logprobs=asked,  # type: ignore[arg-type] # one of the four
            groups_per_call=controller.groups_per_call or max(groups_per_step // 2, 1),
            capacity=controller.capacity,
            concurrency=controller.concurrency,
            step_attempts=controller.step_attempts,
            group_attempts=controller.group_attempts,
            restarts=controller.restarts,
            group_timeout_s=controller.group_timeout_s,
            stall_s=controller.stall_s,
            drain_s=controller.drain_s,
            checkpoint_every=config.run.checkpoint_every,
        )
        settings.checked_capacity(make_sampler(config))
    except (SettingsError, SamplerError) as error:
        raise ConfigError(f"[controller]: {error}") from error
    return settings


def last_version(config: Config) -> int:
    """The version that the run ends with: its optimizer steps."""
    return config.run.rollouts * config.optimizer.steps_per_rollout
