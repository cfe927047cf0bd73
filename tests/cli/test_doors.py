"""`hook`, `run`, `init` and `auto` bring patches into programs that nobody edits."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from importlib import metadata
from pathlib import Path

import pytest

import megatron_idempotent
from megatron_idempotent.cli.doors import HOOK, LINE
from megatron_idempotent.cli.main import main
from megatron_idempotent.hook import PACKAGES
from megatron_idempotent.patching.catalog import outlines

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "megatron_idempotent")
LOADED = "import sys; print(*sorted(m for m in sys.modules if m.startswith('megatron')))"


def environment(**given: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MEGATRON_IDEMPOTENT")}
    return {**kept, **given}


def run(*command: object, **given: str) -> subprocess.CompletedProcess[str]:
    """Run the command below `megatron-idempotent run`."""
    return subprocess.run(
        [*COMMAND, "run", "--", *map(str, command)],
        capture_output=True,
        text=True,
        env=environment(**given),
        timeout=120,
        check=False,
    )


def test_every_package_that_has_patches_is_waited_for():
    targets = [target for each in outlines().values() for target in each.targets]
    assert {target.address.partition(".")[0] for target in targets} <= PACKAGES


def test_a_function_that_a_framework_calls_with_its_arguments():
    try:
        report = megatron_idempotent.init(argparse.Namespace(lr=0.1))
        assert {row.id for row in report} == set(outlines())
        assert megatron_idempotent.init() == report
    finally:
        megatron_idempotent.revert()


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment of its own that finds this package, and has the hook."""
    folder = tmp_path_factory.mktemp("hooked")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "a_checkout.pth").write_text(f"{ROOT}\n")
    assert main(["hook", "install", "--into", str(packages)]) == 0
    return packages


def loaded_in(packages: Path, *options: str, **given: str) -> list[str]:
    python = packages.parents[2] / "bin" / "python"
    shown = subprocess.run(
        [python, *options, "-c", LOADED],
        capture_output=True,
        text=True,
        env=environment(**given),
        timeout=60,
        check=True,
    )
    assert shown.stderr == ""
    return shown.stdout.split()


WATCHES = ["auto", "checkout", "hook", "lazy"]


@pytest.mark.parametrize(
    ("options", "value", "expected"),
    [
        ((), None, []),
        ((), "", []),
        ((), "0", []),
        ((), "1", WATCHES),
        ((), "TRUE", WATCHES),
        (("-I",), "1", WATCHES),
        (("-E",), "1", WATCHES),
        (("-S",), "1", []),
    ],
)
def test_the_hook_waits_for_megatron_and_loads_nothing_else(elsewhere, options, value, expected):
    given = {} if value is None else {"MEGATRON_IDEMPOTENT": value}
    found = loaded_in(elsewhere, *options, **given)
    own = {name.removeprefix("megatron_idempotent.") for name in found} - {"megatron_idempotent"}
    assert own - {"patches", "checkout"} == set(expected) - {"checkout"}


def test_the_hook_is_shown_repaired_and_removed(elsewhere, capsys):
    into = ["--into", str(elsewhere)]
    assert main(["hook", "status", *into]) == 0
    (elsewhere / HOOK).write_text("import os\n")
    assert main(["hook", "status", *into]) == 1
    assert "is of another version" in capsys.readouterr().out
    assert main(["hook", "install", *into]) == 0
    assert sorted(elsewhere.glob("zz_*")) == [elsewhere / HOOK]
    assert main(["hook", "remove", *into]) == main(["hook", "remove", *into]) == 0
    assert main(["hook", "status", *into]) == 1
    assert loaded_in(elsewhere, MEGATRON_IDEMPOTENT="1") == []
    assert main(["hook", "install", *into]) == 0


def test_doctor_says_where_a_variable_meets_no_hook(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.delenv("MEGATRON_IDEMPOTENT", raising=False)
    main(["doctor"])
    assert "hook install" not in capsys.readouterr().out
    monkeypatch.setenv("MEGATRON_IDEMPOTENT", "1")
    main(["doctor"])
    assert f"no hook in {tmp_path}: `megatron-idempotent hook install`" in capsys.readouterr().out
    (tmp_path / HOOK).write_text(LINE)
    main(["doctor"])
    assert f"{tmp_path / HOOK} is in place" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    assert main(["hook", "install", "--into", str(tmp_path / "none")]) == 2
    assert "No such file or directory; give a folder" in capsys.readouterr().err


def test_verls_loader_finds_the_plugin_and_it_waits():
    (plugin,) = metadata.entry_points(group="verl.plugins", name="megatron_idempotent")
    assert plugin.value == "megatron_idempotent.auto"
    program = (
        "from importlib.metadata import entry_points\n"
        "[each.load() for each in entry_points(group='verl.plugins')]\n" + LOADED
    )
    shown = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    assert "megatron_idempotent.hook" in shown.stdout.split()
    assert not any("patching" in name for name in shown.stdout.split())


TRAINS = """
import os, sys, warnings
warnings.simplefilter("ignore")
from megatron.core.distributed import DistributedDataParallel
import megatron_idempotent
rows = {row.id: row.status for row in megatron_idempotent.report()}
print(os.environ["RANK"], rows["no-sync-func-reentry"], rows["pending-gather-dropped"])
"""


def test_ranks_of_torchrun_have_patches_and_one_line_says_so(tmp_path):
    (tmp_path / "train.py").write_text(TRAINS)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")
    done = run(*torchrun, tmp_path / "train.py")
    assert done.returncode == 0, done.stderr
    assert sorted(line[0] for line in done.stdout.splitlines()) == ["0", "1"]
    assert all("applied" in line for line in done.stdout.splitlines()), done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith("megatron-idempotent: ")
    assert last.endswith("patches in place in 2 processes (ranks 0-1); missing: none")


def test_a_command_without_megatron_keeps_its_exit_code_and_loads_nothing():
    done = run(sys.executable, "-c", f"{LOADED}; sys.exit(7)")
    assert done.returncode == 7
    assert not any("patching" in name for name in done.stdout.split())
    assert "no process on this machine imported Megatron" in done.stderr


def test_another_sitecustomize_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.path.append('of-another')\n")
    program = "import sys; print(sys.path[-1], sys.modules['sitecustomize'].__file__)"
    done = run(sys.executable, "-c", program, PYTHONPATH=str(tmp_path))
    assert done.stdout.split() == ["of-another", str(tmp_path / "sitecustomize.py")]


def test_signals_reach_the_command_and_its_end_by_one_is_told(tmp_path):
    program = (
        "import signal, sys\n"
        "def told(number, frame):\n"
        "    print('told', number, flush=True)\n"
        "    signal.signal(number, signal.SIG_DFL)\n"
        "signal.signal(signal.SIGTERM, told)\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()\n"
    )
    process = subprocess.Popen(
        [*COMMAND, "run", "--", sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == f"told {signal.SIGTERM:d}\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    process.communicate()


@pytest.mark.parametrize(
    ("command", "said"),
    [((), "no command; write"), (("no-such-command",), "no command 'no-such-command' on the PATH")],
)
def test_a_command_that_is_not_there(command, said, capsys):
    assert main(["run", "--", *command]) == 2
    assert said in capsys.readouterr().err


def test_the_line_names_what_is_missing_and_where(monkeypatch, tmp_path):
    program = (
        "import json, os, sys\n"
        "folder = os.environ['MEGATRON_IDEMPOTENT_RUN']\n"
        "def tell(name, *rows):\n"
        "    keys = ('id', 'status', 'reason')\n"
        "    with open(os.path.join(folder, name), 'w') as file:\n"
        "        json.dump([dict(zip(keys, row)) for row in rows], file)\n"
        "on = ('a', 'applied', '')\n"
        "tell('0-1.json', on, ('b', 'applied', ''))\n"
        "tell('1-2.json', on, ('b', 'drifted', 'new body'))\n"
        "tell('none-3.json', ('a', 'pending_import', ''))\n"
    )
    done = run(sys.executable, "-c", program)
    assert done.stderr == (
        "megatron-idempotent: 1 or 2 patches in place in 2 processes (ranks 0-1); "
        "missing: b (drifted: new body) on ranks 1\n"
    )


def test_an_error_in_the_environment_is_told_before_verl_swallows_it():
    program = "import sys; sys.modules['megatron'] = sys\nimport megatron_idempotent.auto"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment(MEGATRON_IDEMPOTENT_ONLY="no-such-patch"),
        check=False,
    )
    assert done.returncode == 1
    assert "megatron-idempotent: no patch is in place: UnknownPatchError:" in done.stderr
    assert json.dumps("no-such-patch")[1:-1] in done.stderr
