"""`tools/history.py` says which patches land on each commit of a clone."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import history
import pytest
from checkouts import checkout_of_installed

from megatron_idempotent.cli.main import main

pytestmark = pytest.mark.full

WHO = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
FILES = {"other": "megatron/core/timers.py", "wrapped": "megatron/core/rerun_state_machine.py"}
#: The function in it that `rerun-state-after-exception` wraps, and needs read by a person.
NAME = "def should_run_forward_backward("


@pytest.fixture
def clone(tmp_path) -> SimpleNamespace:
    """A repository whose commits change a wrapped body, another file, and put the body back."""
    tree = checkout_of_installed(tmp_path / "checkout")

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tree), *WHO, *words], check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    wrapped, other = tree / FILES["wrapped"], tree / FILES["other"]
    text = wrapped.read_text()
    at = text.index(NAME)
    body = text.index(":\n", text.index(")", at)) + 2
    changed = f"{text[:body]}        self.asked = True\n{text[body:]}"
    steps = [
        (wrapped, text, "2026-01-01"),
        (wrapped, changed, "2026-01-02"),
        (other, f"{other.read_text()}\nNEW = 1\n", "2026-01-03"),
        (wrapped, text, "2026-01-04"),
    ]
    commits = []
    for file, new, day in steps:
        file.write_text(new)
        git("add", "-A")
        dates = ("-c", "core.fsync=none", "commit", "-q", "-m", day, "--date", f"{day}T12:00")
        subprocess.run(
            ["git", "-C", str(tree), *WHO, *dates],
            check=True,
            capture_output=True,
            env={"GIT_COMMITTER_DATE": f"{day}T12:00:00+0000", "PATH": "/usr/bin:/bin"},
        )
        told = subprocess.run(
            ["git", "-C", str(tree), "rev-parse", "HEAD"], capture_output=True, text=True
        )
        commits.append(told.stdout.strip())
    return SimpleNamespace(path=tree, commits=commits)


def test_a_commit_refuses_what_drift_refuses_on_its_files(clone, capsys):
    patch = "rerun-state-after-exception"
    found = list(history.walk(history.Branches(clone.path), "main", "2026-01-01"))
    assert [each.commit for each in found] == clone.commits
    assert [[*each.refused] for each in found] == [[], [patch], [patch], []]
    assert [each.landed for each in found] == [found[0].landed - n for n in (0, 1, 1, 0)]
    for each in found:  # each by itself, of which no earlier verdict is known
        code = main(["drift", "--json", f"{clone.path}@{each.commit[:12]}"])
        rows = json.loads(capsys.readouterr().out)
        drifted = {row["id"]: row["reason"] for row in rows if row["standing"] == "drifted"}
        standing = [row["standing"] for row in rows]
        assert (code, drifted) == (bool(each.refused), each.refused)
        assert sum(it in ("reviewed", "holds") for it in standing) == each.landed


def test_a_person_reads_a_table_and_a_page_reads_runs(clone, capsys):
    ask = [str(clone.path), "--branch", "main", "--since", "2026-01-02"]
    assert history.main(ask) == 1
    said = capsys.readouterr().out
    assert said.startswith("main: 3 commits from 2026-01-02 to 2026-01-04. ")
    assert "33.33% of the commits get 99% of theirs or more" in said
    assert f"2        2026-01-02 to 2026-01-03  {clone.commits[1][:12]}" in said
    assert history.main([*ask, "--json"]) == 1
    (runs,) = json.loads(capsys.readouterr().out).values()
    assert [(run["since"], run["until"], run["commits"]) for run in runs] == [
        ("2026-01-02", "2026-01-03", 2),
        ("2026-01-04", "2026-01-04", 1),
    ]
    assert history.main([*ask[:3], "--since", "2026-01-04"]) == 0
    assert history.main([*ask[:3], "--since", "2027-01-01"]) == 0
    assert "main: no commits in that time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (history.main, ["{path}/nowhere"], "nowhere rev-parse --git-dir failed: "),
        (history.main, ["{path}", "--branch", "absent"], "bad revision 'absent'"),
        (
            main,
            ["drift", "{path}@0123456789ab"],
            "ls-tree -r 0123456789ab^{{commit}} -- megatron f",
        ),
    ],
)
def test_what_git_lacks_is_named(tmp_path, capsys, command, arguments, message):
    subprocess.run(["git", "init", "-q", "-b", "main", str(tmp_path)], check=True)
    assert command([argument.format(path=tmp_path) for argument in arguments]) == 2
    assert message.format() in capsys.readouterr().err
