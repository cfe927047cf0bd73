"""A status of a run, for what shows one."""

from megatron_idempotent.rl.controller.protocol import Status


def status(**changes):
    fields = {
        "state": "running",
        "trainer_version": 12,
        "rollout_version": 11,
        "train_steps": 12,
        "outer_steps": 3,
        "epoch": 0,
        "inflight_rollouts": 8,
        "rollouts_permitted": True,
        "ready_groups": 3,
        "step_groups": 2,
        "doing": "waiting for a group",
        "idle_s": 0.25,
        "counts": {"submitted": 61, "trained": 48, "filtered": 0, "running": 13},
    }
    return Status(**{**fields, **changes})
