"""The Ray cluster of an asynchronous run: the one that is there, or one on this machine."""

from __future__ import annotations

import os

from megatron_idempotent.trainer.config import Config
from megatron_idempotent.trainer.errors import ConfigError


def connect(config: Config) -> None:
    """Connect this process, where ranks, engines or groups live on Ray; else nothing.

    Errors: `ConfigError` without Ray, or where no cluster is at the address.
    """
    controller = config.controller
    if controller.cluster != "ray" and controller.plane != "transfer_queue":
        return
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"controller.cluster is {controller.cluster!r} and controller.plane is "
            f"{controller.plane!r}, and Ray is not installed: pip install "
            "'megatron-idempotent[ray]', or [transferqueue]"
        ) from error
    if ray.is_initialized():
        return
    address = controller.ray_address or os.environ.get("RAY_ADDRESS")
    if not address:
        # Counted generously: this machine is shared by all of them, whatever Ray thinks.
        actors = config.run.ranks + controller.engines + 4
        ray.init(
            num_cpus=max(actors, os.cpu_count() or 1), include_dashboard=False, log_to_driver=False
        )
        return
    try:
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"controller.ray_address is {address!r}: {error}; start a cluster there, or leave it "
            "empty for one on this machine"
        ) from error
