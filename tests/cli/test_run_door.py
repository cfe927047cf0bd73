"""`run` brings patches into a command and all below it, and is otherwise not noticed."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
import venv

import pytest
from starts import COMMAND, IMPORTS, LOADED, environment, started

from megatron_idempotent.cli.main import main


def run(*command: object, **given: str) -> subprocess.CompletedProcess[str]:
    """Run the command below `megatron-idempotent run`."""
    return started(*COMMAND, "run", "--", *command, **given)


TRAINS = """
import os, warnings
warnings.simplefilter("ignore")
import megatron.core.pipeline_parallel.schedules, megatron.core.distributed
import megatron_idempotent
print(os.environ["RANK"], any(row.status == "applied" for row in megatron_idempotent.report()))
"""


# torchrun imports torch a third time; what it does to its ranks, `env` does to one.
@pytest.mark.parametrize(
    ("starts", "who"),
    [
        (("env", "RANK=0", sys.executable), "1 process (rank 0)"),
        pytest.param(
            (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            "2 processes (ranks 0-1)",
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["a rank", "torchrun"],
)
def test_ranks_have_patches_and_one_line_says_so(tmp_path, starts, who):
    pytest.importorskip("megatron.core")
    (tmp_path / "train.py").write_text(TRAINS)
    done = run(*starts, tmp_path / "train.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 True", "1 True"][: int(who[0])]
    last = done.stderr.splitlines()[-1]
    assert last.startswith("megatron-idempotent: ")
    assert last.endswith(f"patches in place in {who}; missing: none")


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


COUNTED = "megatron-idempotent: no process on this machine imported Megatron"
BELOW = (*COMMAND, "run", "--")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("bash", "-c", "exit 5"), 5),
        (("bash", "-c", "kill -TERM $$"), 128 + signal.SIGTERM),
        (("bash", "-c", "kill -KILL $$"), 128 + signal.SIGKILL),
        ((*BELOW, *BELOW, "bash", "-c", "exit 5"), 5),
    ],
)
def test_the_exit_code_is_the_command_s_and_one_line_is_told(command, code):
    done = run(*command)
    assert done.returncode == code
    (line,) = done.stderr.splitlines()
    assert line.startswith(COUNTED)


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ((), 2, "no command; write megatron-idempotent run -- torchrun"),
        (("no-such-command",), 127, "not on the PATH: no-such-command; write"),
        (("./none",), 127, "no file ./none; write"),
        (("plain",), 127, "plain is no command, as it is not on the PATH"),
        (("./of-none",), 127, "./of-none is no command, as its first line #! names no program"),
        (("./plain",), 126, "./plain cannot be executed: Permission denied"),
        (("./headless",), 126, "./headless has no first line #!"),
    ],
)
def test_a_command_that_cannot_start_is_told_as_shells_do(
    monkeypatch, tmp_path, capfd, command, code, said
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEGATRON_IDEMPOTENT", raising=False)
    (tmp_path / "plain").write_text("exit\n")
    for name, text in (("of-none", "#!/no/such/program\n"), ("headless", "exit\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    assert main(["run", "--", *command]) == code
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"megatron-idempotent run: {said}")


@pytest.mark.parametrize(
    ("value", "code", "said"),
    [
        ("0", 5, "megatron-idempotent: MEGATRON_IDEMPOTENT=0, so no patch is in place"),
        ("maybe", 2, "megatron-idempotent run: MEGATRON_IDEMPOTENT='maybe' is neither on nor off"),
    ],
)
def test_an_operator_s_variable_wins(monkeypatch, capfd, value, code, said):
    monkeypatch.setenv("MEGATRON_IDEMPOTENT", value)
    monkeypatch.delenv("MEGATRON_IDEMPOTENT_RUN", raising=False)
    asked = 'test "$MEGATRON_IDEMPOTENT" = 0 -a -z "$MEGATRON_IDEMPOTENT_RUN" && exit 5'
    assert main(["run", "--", "bash", "-c", asked]) == code
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(said)


def test_a_machine_without_a_temporary_folder_runs_the_command_all_the_same(monkeypatch, capfd):
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(tempfile, "tempdir", "/no/such/folder")
        assert main(["run", "--", "bash", "-c", "exit 5"]) == 5
    told = capfd.readouterr().err
    assert told.startswith("megatron-idempotent: patches are not counted ([Errno 2] No such file")
    assert told.endswith(": set TMPDIR to a folder\n")


def test_grandchildren_have_patches_and_one_that_sets_its_own_path_goes_without(tmp_path):
    (tmp_path / "deep.py").write_text(
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {IMPORTS!r}], check=True)\n"
        f"exec({IMPORTS!r})\n"
    )
    python = f"{sys.executable} {tmp_path / 'deep.py'}"
    done = run("bash", "-c", f"bash -c '{python} & wait' && PYTHONPATH={tmp_path} {python}")
    assert done.stdout.split() == ["True", "True", "False", "False"]


def test_a_python_of_another_environment_says_so_once(tmp_path):
    venv.create(tmp_path, with_pip=False)
    done = run("bash", "-c", f"cd /; for i in 1 2; do {tmp_path}/bin/python -c pass; done")
    assert done.stderr.count(f"megatron-idempotent: not installed in {tmp_path}, so what") == 1


def test_a_reader_that_has_gone_and_a_parent_that_ignores_children_change_no_exit_code():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    read, write = os.pipe()
    os.close(read)
    try:
        process = subprocess.Popen(
            [*BELOW, "bash", "-c", "sleep 0.2; exit 5"], stderr=write, env=environment()
        )
    finally:
        signal.signal(signal.SIGCHLD, before)
        os.close(write)
    assert process.wait(60) == 5


TALKS = """
import sys
print(sys.stdin.isatty(), sys.stdout.isatty(), input(), flush=True)
try:
    while True: input()
except KeyboardInterrupt:
    print("told", flush=True)
try:
    import time; time.sleep(0.5)
except KeyboardInterrupt:
    print("told again", flush=True)
sys.exit(5)
"""


def test_a_terminal_reaches_the_command_and_ctrl_c_reaches_it_once():
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a job in the background ignores
        os.execvpe(BELOW[0], [*BELOW, sys.executable, "-c", TALKS], environment())
    said = b""

    def until(text: bytes) -> None:
        nonlocal said
        while text not in said:
            said += os.read(terminal, 1024)

    os.write(terminal, b"hello\n")
    until(b"True True hello")
    time.sleep(0.1)
    os.write(terminal, b"\x03")
    until(b"told")
    until(COUNTED.encode())
    assert b"told again" not in said
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    os.close(terminal)
