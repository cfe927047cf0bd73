"""A job whose workers get the patches from Ray's hook; prints what one of them found.

The hook is the driver's own or, with the argument `submitted`, that of the submitted job, while the
driver calls `ray.init` with variables alone, as SkyRL does.
"""

from __future__ import annotations

import json
import sys

import ray

HAZARD = "second-window-not-reduced"


def statuses() -> dict[str, str]:
    """Runs in a worker: a patch's status before and after Megatron is imported."""
    import megatron_idempotent

    before = {row.id: row.status for row in megatron_idempotent.report()}
    import megatron.core.distributed  # noqa: F401

    after = {row.id: row.status for row in megatron_idempotent.report()}
    return {"before": before[HAZARD], "after": after[HAZARD]}


if __name__ == "__main__":
    own = {"worker_process_setup_hook": "megatron_idempotent.apply"}
    if sys.argv[1:] == ["submitted"]:
        own = {"env_vars": {"OMP_NUM_THREADS": "1"}}
    ray.init("local", num_cpus=1, include_dashboard=False, runtime_env=own)
    print(json.dumps(ray.get(ray.remote(statuses).remote(), timeout=120)))
    ray.shutdown()
