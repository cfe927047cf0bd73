"""Frameworks started by their own code through their doors: who has patches, and who has not.

`entries.py` is the driver of those that use Ray; it runs in an environment that has the hook beside
what is installed here. Transformer Engine, which has no build without CUDA, is a stand-in there.
The others are started by their commands, and end where they import it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from starts import hooked_python, started

from megatron_idempotent.patching.rows import PROBLEMS

pytestmark = pytest.mark.full

TRANSFORMER_ENGINE = """
import sys
from megatron_idempotent.patches.frameworks import _standins
_standins._finder.packages.add(__name__)
sys.meta_path.insert(0, _standins._finder)
__version__ = "1.0.0"
def __getattr__(name):
    return _standins._standin_for(sys.modules[__name__], name)
"""
#: Framework → (variables of its sources, what it imports, who trains, who does not and whether
#: Megatron is there all the same).
DRIVEN = {
    "roll": (
        ("ROLL_SOURCE", "MCORE_ADAPTER_SOURCE"),
        ("ray", "codetiming", "dacite", "hydra", "pybase64", "imageio"),
        {"actor_train-0", "actor_train-1"},
        # Its configuration and its actors import Megatron everywhere.
        {"actor_infer-0": True, "driver": True},
    ),
    "areal": (
        ("AREAL_SOURCE", "BRIDGE_SOURCE"),
        ("ray", "colorlog", "lark", "mbridge", "numba", "openai", "tenacity", "tensorboardX"),
        {"actor-0"},
        {"rollout-0": False, "driver": False},
    ),
    # Its driver names the class of the workers, and has not the variable of the node here.
    "skyrl": (
        ("SKYRL_SOURCE", "SKYRL_GYM_SOURCE", "SKYRL_MEGATRON_SOURCE", "BRIDGE_SOURCE"),
        ("ray", "cloudpathlib", "jaxtyping", "loguru", "pybase64", "zstandard"),
        {"policy-0"},
        {"probe-0": False, "driver": True},
    ),
}


def path_of(variables, modules=()) -> list[str]:
    """Return the sources that these variables name; skip where one, or a module, is missing."""
    for variable in variables:
        if not os.environ.get(variable):
            pytest.skip(f"{variable} names no checkout")
    for module in modules:
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed, which this framework imports")
    return [os.environ[variable] for variable in variables]


def ran(*command: object, path: Iterable[object], **given: object) -> CompletedProcess[str]:
    """Run a command with these folders on the path; return what it printed."""
    folders = os.pathsep.join(filter(None, [*map(str, path), os.environ.get("PYTHONPATH")]))
    binaries = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    given |= {"PATH": binaries, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "OMP_NUM_THREADS": "1"}
    return started(*command, timeout_s=600, **given, PYTHONPATH=folders)


@pytest.fixture(scope="module")
def hooked(tmp_path_factory) -> Path:
    """Return the Python of an environment that has the hook, and what is installed here."""
    return hooked_python(tmp_path_factory.mktemp("hooked"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("framework", DRIVEN)
def test_its_own_workers_have_the_patches_if_they_train(framework, hooked, tmp_path):
    variables, modules, trainers, others = DRIVEN[framework]
    sources = path_of(variables, modules)
    (standin := tmp_path / "standin" / "transformer_engine").mkdir(parents=True)
    (standin / "__init__.py").write_text(TRANSFORMER_ENGINE)
    path = [standin.parent, *sources] if "BRIDGE_SOURCE" in variables else sources
    entries = Path(__file__).with_name("entries.py")
    done = ran(hooked, entries, framework, path=path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-8000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == trainers | others.keys()
    for name in trainers:
        assert found[name]["megatron"]
        assert "aux-loss-scale-left-set" in found[name]["patches"], name
    for name, megatron in others.items():
        assert found[name] == {"megatron": megatron, "patches": []}, name


#: Framework → (variable of its source, what it imports first, the arguments of its Python).
LAUNCHED = {
    "ms-swift": (
        "MS_SWIFT_SOURCE",
        ("transformers", "modelscope", "json_repair", "mcore_bridge"),
        ("-m", "swift.cli._megatron.main", "sft", "--model", "none", "--dataset", "none"),
    ),
    "megatron-bridge": (
        "BRIDGE_SOURCE",
        ("transformers", "omegaconf", "diffusers"),
        (
            *("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port={port}"),
            *("{source}/../scripts/training/run_recipe.py", "--model", "llama32_1b"),
            *("--mode", "pretrain", "--dataset", "mock"),
        ),
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("framework", LAUNCHED)
def test_its_own_command_has_the_patches_on_its_ranks(framework, hooked, tmp_path):
    variable, modules, command = LAUNCHED[framework]
    (source,) = path_of([variable], modules)
    if find_spec("transformer_engine") is not None:
        pytest.skip("with Transformer Engine it goes on to train, which takes a GPU")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    arguments = [argument.format(source=source, port=port) for argument in command]
    given = {"NPROC_PER_NODE": 2, "MASTER_PORT": port, "MEGATRON_IDEMPOTENT": 1}
    given["MEGATRON_IDEMPOTENT_REPORT"] = tmp_path / "report-{rank}.json"
    done = ran(hooked, *arguments, path=[source], cwd=tmp_path, **given)
    assert "No module named 'transformer_engine'" in done.stderr, done.stderr[-8000:]
    for rank in range(2):
        rows = json.loads((tmp_path / f"report-{rank}.json").read_text())
        assert any(row["status"] == "applied" for row in rows)
        assert [row for row in rows if row["status"] in PROBLEMS] == []
