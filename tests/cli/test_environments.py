"""The hook works in environments that pip, uv and Ray make from the wheel, beside other hooks."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import uv
from starts import IMPORTS, ROOT, hooked_python, started

from megatron_idempotent.cli.hook import PTH

pytestmark = pytest.mark.exhaustive

UV = uv.find_uv_bin()


def said(*command: object, **given: str) -> str:
    """Run a command outside of the repository; return its errors and what it printed."""
    done = started(*command, cwd="/", timeout_s=280, **given)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stderr + done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel of this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    said(sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture
def fresh(wheel: Path, tmp_path: Path) -> Path:
    """Return the Python of a new environment with the wheel, coverage, setuptools and the hook."""
    folder = tmp_path / "fresh"
    said(UV, "venv", "--quiet", "--python", sys.executable, folder)
    python = folder / "bin" / "python"
    said(UV, "pip", "install", "--quiet", "--python", python, wheel, "coverage", "setuptools")
    assert "is in place" in said(folder / "bin" / "megatron-idempotent", "hook", "install")
    return python


def test_coverage_and_setuptools_start_beside_the_hook_in_both_orders(fresh, tmp_path):
    (hook,) = fresh.parents[1].glob(f"lib/python*/site-packages/{PTH}")
    others = {path.name for path in hook.parent.glob("*.pth")} - {PTH, "_virtualenv.pth"}
    assert {name.partition(".")[0].lstrip("a1_") for name in others} >= {"coverage"}
    (tmp_path / "settings").write_text(f"[run]\ndata_file = {tmp_path / 'counted'}\n")
    given = {"MEGATRON_IDEMPOTENT": "1", "COVERAGE_PROCESS_START": str(tmp_path / "settings")}
    program = f"{IMPORTS}\nprint(*[type(each).__name__ for each in sys.meta_path])"
    for name in (PTH, f"a0_{PTH}"):
        hook = hook.rename(hook.with_name(name))
        found = said(fresh, "-W", "ignore", "-c", program, **given)
        assert found.splitlines()[0] == "True"
        assert "DistutilsMetaFinder" in found
        assert (tmp_path / "counted").exists()
        (tmp_path / "counted").unlink()


def test_uv_run_has_the_hook_of_its_environment_also_below_another_one(fresh):
    program = ("python", "-c", IMPORTS)
    for more in ((), ("--with", "iniconfig")):
        command = (UV, "run", "--quiet", "--no-project", "--python", fresh, *more, *program)
        assert said(*command, MEGATRON_IDEMPOTENT="1") == "True\n"


def test_after_an_uninstall_an_import_of_megatron_says_so_in_a_line(fresh):
    said(UV, "pip", "uninstall", "--quiet", "--python", fresh, "megatron-idempotent")
    on = {"MEGATRON_IDEMPOTENT": "1"}
    assert said(fresh, "-c", "pass", **on) == ""
    assert said(fresh, "-c", IMPORTS, **on).splitlines() == [
        f"megatron-idempotent: no patches by {PTH}: No module named 'megatron_idempotent'",
        "False",
    ]


IN_RAY = """
import json, ray, sys
IMPORTS, wheel, python = sys.argv[1:]
@ray.remote
def told():
    import contextlib, io
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(IMPORTS, {})
    return said.getvalue().strip(), sys.prefix
on = {"env_vars": {"MEGATRON_IDEMPOTENT": "1"}}
ways = {
    "none": {},
    "variable": on,
    "pip": {"pip": [wheel], **on},
    "uv": {"uv": [wheel], **on},
    "py_executable": {"py_executable": python + " -I", **on},
}
ray.init("local", num_cpus=1, include_dashboard=False, logging_level="error", log_to_driver=False)
found = {way: ray.get(told.options(runtime_env=env).remote()) for way, env in ways.items()}
print(json.dumps(found))
"""


def test_ray_s_environments_have_the_hook_of_the_one_that_ray_runs_in(fresh, wheel):
    needs = ("ray[default]>=2.40", "pip", "virtualenv", "uv")
    said(UV, "pip", "install", "--quiet", "--python", fresh, *needs)
    path = os.pathsep.join([str(fresh.parent), os.environ["PATH"]])
    given = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "PATH": path}
    told = said(fresh, "-c", IN_RAY, IMPORTS, wheel, fresh, **given)
    found = json.loads(told.splitlines()[-1])
    patched = {way: value for way, (value, _) in found.items()}
    assert patched == {"none": "False", **dict.fromkeys(list(found)[1:], "True")}
    made = {prefix for way, (_, prefix) in found.items() if way in ("pip", "uv")}
    assert len(made) == 2
    assert str(fresh.parents[1]) not in made


TRAINS = """
from megatron_idempotent.proof import cpu
cpu.enable()
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron_idempotent.proof.cpu import tiny
torch.distributed.init_process_group("gloo")
parallel_state.initialize_model_parallel()
tensor_parallel.model_parallel_cuda_manual_seed(1)
tiny.build().forward_backward(1, data_seed=3)
torch.distributed.barrier()
"""


@pytest.fixture(scope="module")
def trains(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the Python of an environment with the hook, and a program that trains."""
    folder = tmp_path_factory.mktemp("trains")
    (folder / "train.py").write_text(TRAINS)
    return hooked_python(folder / "hooked"), folder / "train.py"


def by_torchrun(trains: tuple[Path, Path], start: str, **given: object):
    """Run a script on two ranks, with the variable on; $0 is the Python, and $1 the program."""
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python", "bash", "-c")
    return started(trains[0], *ranks, start, *trains, cwd="/", MEGATRON_IDEMPOTENT=1, **given)


def test_the_ranks_of_torchrun_have_patches_and_rank_0_says_so(trains):
    done = by_torchrun(trains, 'exec "$0" "$1"')
    assert done.returncode == 0, done.stderr
    (count,) = re.findall(r"megatron-idempotent: (\d+) patches on all 2 ranks\n", done.stderr)
    assert int(count) > 0


def test_a_rank_of_torchrun_without_a_door_ends_the_job_with_its_number(trains):
    start = '[ "$RANK" = 0 ] || unset MEGATRON_IDEMPOTENT; exec "$0" "$1"'
    done = by_torchrun(trains, start, MEGATRON_IDEMPOTENT_VERIFY=2)
    assert done.returncode == 1
    assert "VerificationError: no patches on rank 1, 2 s after the first training" in done.stderr
    assert "MEGATRON_IDEMPOTENT=1 where `megatron-idempotent hook install` has run" in done.stderr
