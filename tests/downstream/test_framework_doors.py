"""Each framework's own code that loads what a door names brings the patches into its process."""

import json
import os
import sys

import pytest
from starts import hooked_python, started

pytestmark = pytest.mark.full

TELLS = """
import json, sys
from megatron_idempotent import report
print(json.dumps({row.id: row.status for row in report()}))
"""
SLIME = """
from argparse import Namespace
from {package}.utils.misc import load_function
import megatron.core.pipeline_parallel.schedules
load_function("megatron_idempotent.init")(Namespace(lr=0.1))
"""
#: Framework → (variable that names its source, its code that opens the door, environment).
DOORS = {
    "slime": ("SLIME_SOURCE", SLIME.format(package="slime"), {}),
    "miles": ("MILES_SOURCE", SLIME.format(package="miles"), {}),
    "verl": ("VERL_SOURCE", "import verl\nimport megatron.core.pipeline_parallel.schedules\n", {}),
    "verl, by its older variable": (
        "VERL_SOURCE",
        "import verl\nimport megatron.core.pipeline_parallel.schedules\n",
        {
            "VERL_USE_EXTERNAL_MODULES": "megatron_idempotent.auto",
            "VERL_USE_EXTERNAL_PLUGINS": "none",
        },
    ),
    # `init_ray` hands this process's environment to all workers.
    "nemo-rl": (
        "NEMO_RL_SOURCE",
        """
import ray
from nemo_rl.distributed.virtual_cluster import init_ray
init_ray()
@ray.remote
def told():
    import megatron.core.pipeline_parallel.schedules
    from megatron_idempotent import report
    return {row.id: row.status for row in report()}
print(json.dumps(ray.get(told.remote())))
""",
        {"MEGATRON_IDEMPOTENT": "1", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},
    ),
}


@pytest.mark.parametrize("framework", DOORS)
def test_a_door_brings_the_patches_in(framework, tmp_path):
    variable, opens, given = DOORS[framework]
    source = os.environ.get(variable)
    if not source:
        pytest.skip(f"{variable} names no checkout")
    if framework != "slime":  # the others import Ray first
        pytest.importorskip("ray", reason="`nox -s entries` has what these frameworks import")
    if "init_ray" in opens:  # Ray makes environments of workers with what this extra brings
        pytest.importorskip("aiohttp_cors", reason="`pip install 'ray[default]'`")
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    program = opens if "told" in opens else opens + TELLS
    # The variable of a driver turns the hook on, in it and in the workers that it starts.
    python = hooked_python(tmp_path / "e") if "MEGATRON_IDEMPOTENT" in given else sys.executable
    done = started(
        python,
        "-c",
        "import json\n" + program,
        cwd=tmp_path,
        timeout_s=300,
        **given,
        PYTHONPATH=path,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["timers-left-running"] in ("applied", "pending_import")
    assert found["aux-loss-scale-left-set"] == "applied", done.stderr
