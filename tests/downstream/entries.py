"""Starts a framework as its own launcher does, and tells in which processes patches are.

Runs as a program, `python entries.py NAME`, from a new folder, in a process that a door has
reached or not. Its last line is JSON: per process, whether Megatron is imported and which patches
are in place. Frameworks parse their own example's configuration and make their own workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from typing import Any


def told(_actor: object = None) -> dict[str, Any]:
    """Return what this process has: Megatron or not, and the ids of patches in place."""
    import sys

    ours = sys.modules.get("megatron_idempotent")
    rows = ours.report() if ours is not None else ()
    return {
        "megatron": "megatron.core" in sys.modules,
        "patches": sorted(row.id for row in rows if row.status == "applied"),
    }


@contextlib.contextmanager
def ray_node(**given: str) -> Iterator[None]:
    """Run a Ray node on this machine, as `ray start` does, with `given` in its environment."""
    import ray

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--head", "--block", f"--port={port}", "--num-cpus=8", "--num-gpus=2"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
    node = subprocess.Popen(
        [*command, "--include-dashboard=false"],
        env={**os.environ, **given},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert node.stdout is not None
    try:
        shown = list(itertools.takewhile(lambda line: "runtime started" not in line, node.stdout))
        assert node.poll() is None, "".join(shown)
        os.environ["RAY_ADDRESS"] = f"127.0.0.1:{port}"
        yield
    except BaseException:
        traceback.print_exc()  # a client that loses its node ends the process
        raise
    finally:
        ray.shutdown()
        node.terminate()
        node.wait(30)


def roll() -> dict[str, Any]:
    """ROLL: an example's YAML, its `init`, and its clusters of workers; the trainers' strategy."""
    import ray
    from dacite import from_dict
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    from roll.distributed.executor.cluster import Cluster
    from roll.distributed.scheduler.initialize import init
    from roll.distributed.scheduler.resource_manager import ResourceManager
    from roll.pipeline.rlvr.rlvr_config import RLVRConfig

    examples = os.path.join(os.environ["ROLL_SOURCE"], "examples", "qwen2.5-7B-rlvr_megatron")
    with initialize_config_dir(examples, version_base=None):
        found = compose(
            "rlvr_config",
            overrides=[
                *("actor_train.device_mapping='[0,1]'", "actor_infer.device_mapping='[0]'"),
                *("reference.device_mapping='[0]'", "~rewards.llm_judge"),
                "actor_train.model_args.dtype=fp32",  # bf16 asks for a GPU
                "+actor_train.system_envs.MEGATRON_IDEMPOTENT='1'",
            ],
        )
    config = from_dict(RLVRConfig, OmegaConf.to_container(found, resolve=True))
    for each in (config.actor_train, config.actor_infer):
        each.device_mapping = None  # no device here: it places workers by their number alone
    with ray_node():
        init()
        resources = ResourceManager(num_gpus_per_node=0, num_nodes=1)
        clusters = {
            each.name: Cluster(each.name, each.worker_cls, resources, each)
            for each in (config.actor_train, config.actor_infer)
        }

        def strategy(worker: Any) -> None:
            from roll.distributed.strategy.factory import create_strategy

            worker.pipeline_config = config
            create_strategy(worker)

        trainers = clusters["actor_train"].workers
        ray.get([each.__ray_call__.remote(strategy) for each in trainers])
        return asked(ray, {name: each.workers for name, each in clusters.items()})


def areal() -> dict[str, Any]:
    """AReaL: an example's YAML, its Ray scheduler, and an engine on each of its workers."""
    import ray
    from areal.api.cli_args import GRPOConfig, load_expr_config
    from areal.api.scheduler_api import Job
    from areal.infra.scheduler.ray import RayScheduler

    where = os.path.join(os.environ["AREAL_SOURCE"], "examples", "math")
    config, _ = load_expr_config(
        [
            *("--config", os.path.join(where, "gsm8k_grpo_megatron.yaml"), "scheduler.type=ray"),
            *("cluster.n_gpus_per_node=1", f"cluster.fileroot={os.getcwd()}"),
            f"cluster.name_resolve.nfs_record_root={os.getcwd()}/names",
            "++actor.scheduling_spec.0.env_vars.MEGATRON_IDEMPOTENT='1'",
            *(f"++actor.scheduling_spec.0.{what}" for what in ("cpu=1", "gpu=0", "mem=1")),
        ],
        GRPOConfig,
    )
    engines = {
        "actor": ("areal.engine.MegatronPPOActor", config.actor),
        "rollout": ("areal.engine.RemoteSGLangEngine", config.rollout),
    }
    with ray_node():
        ray.init()
        scheduler = RayScheduler(startup_timeout=120, exp_config=config)
        for role, (engine, given) in engines.items():
            tasks = list(given.scheduling_spec)
            (worker,) = scheduler.create_workers(Job(role=role, replicas=1, tasks=tasks))
            asyncio.run(scheduler.create_engine(worker, engine, config=given))
        found = asked(ray, {role: [w.actor for w in scheduler._workers[role]] for role in engines})
        scheduler.delete_workers()  # or its `__del__` looks for a node that has gone
        return found


def skyrl() -> dict[str, Any]:
    """SkyRL: its command line, its `ray.init`, and its group of policy workers."""
    import ray
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils.utils import InfoActor, initialize_ray

    config = SkyRLTrainConfig.from_cli_overrides(
        [
            *("trainer.strategy=megatron", f"trainer.log_path={os.getcwd()}"),
            "trainer.placement.policy_num_gpus_per_node=1",
            "trainer.placement.critic_num_gpus_per_node=1",
            "trainer.placement.ref_num_gpus_per_node=1",
        ]
    )
    with ray_node(MEGATRON_IDEMPOTENT="1"):
        initialize_ray(config)
        from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import PolicyWorker
        from skyrl.backends.skyrl_train.workers.worker import PPORayActorGroup

        group = PPORayActorGroup.__new__(PPORayActorGroup)
        try:
            group.__init__(config.trainer, 1, 1, PolicyWorker)
        except ray.exceptions.RayTaskError as error:  # its actor sets a CUDA device
            if not isinstance(error.cause, RuntimeError) or "NVIDIA" not in str(error.cause):
                raise
        return asked(ray, {"policy": group._actor_handlers, "probe": [InfoActor.remote()]})


def asked(ray: Any, actors: dict[str, list[Any]]) -> dict[str, Any]:
    """Ask each actor, and this driver, what it has."""
    found = {
        f"{role}-{rank}": ray.get(actor.__ray_call__.remote(told))
        for role, each in actors.items()
        for rank, actor in enumerate(each)
    }
    return {**found, "driver": told()}


if __name__ == "__main__":
    # Ray refuses a client that has not the token of the node that it asks.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    print(json.dumps({"roll": roll, "areal": areal, "skyrl": skyrl}[sys.argv[1]]()), flush=True)
