"""A run on Ray in which a rank, all ranks or the driver die goes on to the bits of one here."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import recovery_cases
from kill_points import PLAN, RUNNER

pytestmark = recovery_cases.MARKS
WATCHED = Path(recovery_cases.__file__).parent / "watched"


@pytest.fixture(scope="session")
def launched(cluster, megatron_rank_pool, tmp_path_factory):
    """Ranks of a job have its environment, with which each is watched from its start."""

    def launched(runner, mode, *kills):
        folder, more = tmp_path_factory.mktemp("r"), ()
        with pytest.MonkeyPatch.context() as patch:
            if runner == "ray":
                environ = {
                    PLAN: str(folder / "plan"),
                    RUNNER: runner,
                    "PYTHONPATH": os.pathsep.join(filter(None, [str(WATCHED), *sys.path])),
                    "OMP_NUM_THREADS": "1",
                }
                job = {"runtime_env": {"env_vars": environ}}
                patch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
                address = cluster.get_runtime_context().gcs_address
                more = (
                    "controller.cluster=ray",
                    f"controller.ray_address={address}",
                    "controller.call_timeout_s=60",
                )
            return recovery_cases.launch(
                megatron_rank_pool, folder, runner, mode, *kills, more=more
            )

    return launched


@pytest.fixture(scope="session")
def whole(launched):
    """Return what a run in which nothing dies has and leaves, whose ranks are not on Ray."""
    run = launched("embedded", "async")
    return run.found(), {name for name in run.left() if not name.startswith("logs/")}


@pytest.mark.parametrize(
    ("runner", "mode", "turn", "first"),
    recovery_cases.pieces("ray", short={("ray", "async", 0, 30)}),
)
def test_a_run_on_ray_that_is_killed_ends_with_the_bits_of_an_embedded_one(
    runner, mode, turn, first, launched, whole, cluster
):
    kills = recovery_cases.piece(runner, mode, turn, first)
    recovery_cases.check(launched(runner, mode, *kills), *whole)
    # Nor is anything of it left in the cluster.
    until = time.monotonic() + 20
    while left := [
        *(each for each in cluster.state.actors().values() if each["State"] != "DEAD"),
        *(
            each
            for each in cluster.util.placement_group_table().values()
            if each["state"] != "REMOVED"
        ),
    ]:
        assert time.monotonic() < until, left
        time.sleep(0.1)
