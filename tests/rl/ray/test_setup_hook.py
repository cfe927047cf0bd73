"""Ray's hook for worker processes applies the patches before a worker imports anything."""

import json
import sys
from pathlib import Path

import pytest
from starts import started

HOOK = {"runtime_env": {"worker_process_setup_hook": "megatron_idempotent.apply"}}
#: What `ray job submit` sets for its driver.
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


@pytest.mark.parametrize("whose", ["driver", "submitted"])
def test_a_worker_of_a_job_with_the_hook_has_the_patches(whose):
    # A cluster of its own: the hook belongs to the job.
    program = Path(__file__).with_name("hooked_job.py")
    given = {JOB: json.dumps(HOOK)} if whose == "submitted" else {}
    done = started(sys.executable, "-W", "ignore", program, whose, timeout_s=180, **given)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == {"before": "pending_import", "after": "applied"}
