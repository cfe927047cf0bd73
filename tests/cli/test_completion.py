"""Completion, in the shells themselves, and what else the command line says of itself."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time

import pytest

from megatron_idempotent.cli.completion import SHELLS
from megatron_idempotent.cli.main import _parsers, main
from megatron_idempotent.patching.catalog import hazards

ASK = """
ask() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _shtab_megatron_idempotent; echo "${COMPREPLY[*]}"
}
ask megatron-idempotent ''
ask megatron-idempotent explain ''
ask megatron-idempotent prove no-sync-f
ask megatron-idempotent prove --device c
ask megatron-idempotent drift --accept grad-scale
ask megatron-idempotent hook --
ask megatron-idempotent certify --check split
ask megatron-idempotent train --set run.ro
ask megatron-idempotent train --engine ''
ask megatron-idempotent train --seed ''
ask megatron-idempotent drift 'a f'
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def test_bash_completes_commands_options_ids_and_files_and_starts_nothing(tmp_path, capsys):
    (tmp_path / "a file").touch()
    bash = shutil.which("bash")
    assert bash is not None
    said = subprocess.run(
        [bash, "--norc"],
        input=script("bash", capsys) + ASK,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={"PATH": str(tmp_path)},  # no program is there to be started
    )
    commands, ids, *others = said.stdout.splitlines()
    assert set(commands.split()) >= {"doctor", "explain", "prove", "hook", "train", "completion"}
    assert ids.split() == list(hazards())
    assert others == [
        "no-sync-func-reentry",
        "cpu cuda checked",
        "grad-scale-func",
        "--help --into",
        "split-step",
        "run.rollouts=",
        "transformers vllm",
        "",
        "a file",
    ]


@pytest.mark.parametrize(("shell", "options"), [("bash", ["--norc"]), ("zsh", ["-f"])])
def test_a_tab_completes_an_id(shell, options, tmp_path, capsys):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    (tmp_path / "script").write_text(script(shell, capsys))
    pid, terminal = pty.fork()
    if pid == 0:
        environ = {**os.environ, "HOME": str(tmp_path), "TERM": "dumb"}
        os.execvpe(shell, [shell, *options, "-i"], environ)
    try:
        # The echo of what is typed does not have the word as it is printed.
        os.write(terminal, f"source {tmp_path}/script; echo rea''dy\r".encode())
        read_until(terminal, b"ready")
        os.write(terminal, b"megatron-idempotent explain grad-sc\t")
        read_until(terminal, b"grad-scale-func")
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
def test_fish_completes_ids_values_and_options(tmp_path, capsys):
    (tmp_path / "script").write_text(script("fish", capsys))
    asked = ("explain grad-", "prove --device c", "doctor --", "train --set run.ro")
    lines = "".join(f"; complete -C 'megatron-idempotent {each}'" for each in asked)
    command = ["fish", "-N", "-c", f"source {tmp_path}/script{lines}"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    words = [line.partition("\t")[0] for line in said.stdout.splitlines()]
    assert {*words} == {
        *(each for each in hazards() if each.startswith("grad-")),
        *("cpu", "cuda", "checked", "--help", "--json", "--beside", "run.rollouts="),
    }


def read_until(terminal: int, awaited: bytes) -> None:
    shown, give_up = b"", time.monotonic() + 30
    while awaited not in shown:
        assert select.select([terminal], [], [], give_up - time.monotonic())[0], shown
        shown += os.read(terminal, 1 << 16)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("shell", SHELLS)
def test_a_terminal_gets_the_one_line_that_installs_it(shell, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(["completion", shell]) == 0
    assert sys.stdout.getvalue() == f"{SHELLS[shell]}\n"


def test_a_command_whose_packages_are_missing_is_completed_by_its_name(mocker, capsys):
    mocker.patch.dict(sys.modules, {"pydantic": None})
    for name in ("rl.trainer.config", "settings"):
        sys.modules.pop(f"megatron_idempotent.{name}", None)
    said = script("bash", capsys)
    assert re.search(r"^_shtab_megatron_idempotent_subparsers=\(.* train\)$", said, re.M)
    assert "megatron_idempotent_train_option_strings=(-h --help)" in said


def test_a_missing_shtab_is_named_with_the_extra_that_brings_it(mocker, capsys):
    mocker.patch.dict(sys.modules, {"shtab": None})
    assert main(["completion", "bash"]) == 2
    assert "pip install 'megatron-idempotent[completion]'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", *_parsers()[1].choices])
def test_help_fits_80_columns_and_says_the_exit_codes(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([*filter(None, [command]), "--help"])
    said = capsys.readouterr().out
    folder = next((line for line in said.splitlines() if "site-packages" in line), "")
    assert max(len(line) for line in said.splitlines() if line != folder) <= 80
    assert re.search("[Ee]xit +code", " ".join(said.split()))
    positions = {len(found[0]) for found in re.finditer(r"^  +\S.*?  +(?=\S)", said, re.MULTILINE)}
    assert len(positions) <= 2, "arguments in one column"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["explain", "grad-scale"], "'grad-scale-func'"),
        (["prove", "no_sync_fun"], "'no-sync-func-reentry'"),
        (["drift", "--accept", "grad-scale"], "'grad-scale-func'"),
        (["certify", "--check", "split-stp", "a:B"], "split-step"),
        (["certify", "--layout", "dp2-distop", "a:B"], "distopt"),
        (["docter"], "doctor"),
    ],
)
def test_a_name_that_nobody_has_gets_the_nearest_one_and_2(arguments, meant, capsys):
    try:
        code = main(arguments)
    except SystemExit as left:
        code = left.code
    assert code == 2
    assert re.search(f"[Dd]id you mean.*{meant}", capsys.readouterr().err)
