"""A job whose workers get the patches from Ray's hook; prints what one of them found."""

from __future__ import annotations

import json

import ray

HAZARD = "second-window-not-reduced"


def statuses() -> dict[str, str]:
    """Run in a worker: a patch's status before and after Megatron is imported."""
    import megatron_idempotent

    before = {row.id: row.status for row in megatron_idempotent.report()}
    import megatron.core.distributed  # noqa: F401

    after = {row.id: row.status for row in megatron_idempotent.report()}
    return {"before": before[HAZARD], "after": after[HAZARD]}


if __name__ == "__main__":
    hook = {"worker_process_setup_hook": "megatron_idempotent.apply"}
    ray.init(num_cpus=1, include_dashboard=False, runtime_env=hook)
    print(json.dumps(ray.get(ray.remote(statuses).remote(), timeout=120)))
    ray.shutdown()
