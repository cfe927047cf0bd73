"""A Ray cluster of this machine, and TransferQueue on it, for all tests: started once, when asked
for, as they take ten and thirty seconds."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
FOUND = importlib.util.find_spec("ray")
if FOUND is None or FOUND.origin is None:  # where tests/ is on the path, this folder is found
    WHY = "ray is not installed; `make test-ray` brings it"
elif os.environ.get("MEGATRON_IDEMPOTENT_RAY") != "1":
    WHY = "tests on a Ray cluster run where MEGATRON_IDEMPOTENT_RAY=1; `make test-ray` sets it"
else:
    WHY = ""
    # The contracts, and what they are made of, live beside the other kinds that keep them.
    for folder in ("workers", "controller", "trainer"):
        sys.path.append(str(TESTS / folder))
    pytest.register_assert_rewrite("contract_plane", "contract_ranks")


class Skipped(pytest.Module):
    """A file of which nothing is imported."""

    def collect(self):
        pytest.skip(WHY, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    """Files here are not imported where they cannot run."""
    return Skipped.from_parent(parent, path=module_path) if WHY else None


@pytest.fixture(scope="session")
def cluster():
    """A cluster on this machine that imports what the tests do."""
    import ray

    paths = os.pathsep.join(filter(None, sys.path))
    ray.init(
        "local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
    )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def queue(cluster):
    """TransferQueue on that cluster."""
    from megatron_idempotent.rl.controller.data_plane import connect

    if importlib.util.find_spec("transfer_queue") is None:
        pytest.skip("TransferQueue is not installed; `make test-ray` brings it")
    transfer_queue = connect()
    yield transfer_queue
    transfer_queue.close()
