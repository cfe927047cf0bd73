"""One real vLLM server for all tests of this folder, which are skipped where there is no vLLM.

`make test-vllm` makes an environment with a vLLM for CPUs and runs them there.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "engines"))

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    pytest.register_assert_rewrite("contract", "contract_base")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        reason = "vLLM is not installed here; `make test-vllm` makes an environment with it"
        for item in items:
            if item.nodeid.startswith("tests/rl/engines_vllm/"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def make_model(tmp_path_factory):
    """`make_model(seed=1)` writes a checkpoint once and returns its directory."""
    from tiny import checkpoints

    return checkpoints(tmp_path_factory, hidden=128)  # attention on CPUs wants heads of 32


@pytest.fixture(scope="session")
def shared(make_model):
    """The server, started at the first test that wants it. See `served.Served`."""
    from served import Served

    with Served(make_model(family="qwen2", vocabulary=64)) as served:
        yield served
