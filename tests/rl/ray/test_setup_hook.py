"""Ray's hook for worker processes applies the patches before a worker imports anything."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HOOK = {"runtime_env": {"worker_process_setup_hook": "megatron_idempotent.apply"}}
#: What `ray job submit` sets for its driver.
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


@pytest.mark.parametrize("whose", ["driver", "submitted"])
def test_a_worker_of_a_job_with_the_hook_has_the_patches(whose):
    # A cluster of its own: the hook belongs to the job.
    program = Path(__file__).with_name("hooked_job.py")
    env = {**os.environ, **({JOB: json.dumps(HOOK)} if whose == "submitted" else {})}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), whose],
        env=env,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == {"before": "pending_import", "after": "applied"}
