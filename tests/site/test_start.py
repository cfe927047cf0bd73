"""The commands of the pages for beginners print what the pages say that they print."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_idempotent.cli.main import main
from megatron_idempotent.patching.base import untried
from megatron_idempotent.patching.releases import installed, supported
from megatron_idempotent.proof import prove

ROOT = Path(__file__).parents[2]
PAGES = ("index.md", "use.md")
found = installed("megatron-core")
if found is None or not supported(found, "0.19", untried()):
    pytest.skip("the pages show the newest release", allow_module_level=True)


def shown() -> list[tuple[str, str]]:
    """List the commands of the pages with the lines below each."""
    commands = []
    for page in PAGES:
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        for block in re.findall(r"(?:^    .*\n)+", text, re.MULTILINE):
            for part in re.split(r"^    \$ ", block, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                commands.append((command, re.sub("(?m)^    ", "", output)))
    return commands


def words(text: str) -> list[str]:
    """Return the words of an output; seconds are another number each time."""
    return re.sub(r"\b\d+\.\d\b", "N", text).split()


@functools.cache
def printed_by(*arguments: str) -> str:
    """Return what a command prints; two pages show one of them."""
    command = [sys.executable, "-W", "ignore", "-m", "megatron_idempotent", *arguments]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=120, check=True
    ).stdout


@pytest.mark.parametrize(("command", "output"), shown())
def test_a_command_prints_what_the_page_says(command, output, request, mocker, capsys):
    program, *arguments = shlex.split(command.partition("|")[0])
    assert program == "megatron-idempotent"
    if arguments[0] == "prove":
        # On the ranks of this session; tests/cli/test_prove.py starts it as a program.
        ranks = request.getfixturevalue("megatron_rank_pool")
        mocker.patch.object(prove, "RankPool", return_value=mocker.Mock(run=ranks.run))
        assert main(arguments) == 0
        said = capsys.readouterr().out
    else:
        said = printed_by(*arguments)
    printed = said.splitlines()[:1] if command.endswith("head -1") else [said]
    assert not output or words("\n".join(printed)) == words(output)
    assert said
