"""Workflows run all tests at some time, and publish what was tested.

zizmor holds their rights, and that actions are pinned to commits: `make lint` runs it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from packaging.version import Version
from starts import loaded

from megatron_idempotent.patching import OPEN, UNTRIED
from megatron_idempotent.patching.base import untried
from megatron_idempotent.patching.catalog import hazards

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
yaml = pytest.importorskip("yaml", reason="PyYAML is for development, not for the matrix")
ROOT = Path(__file__).parents[2]
#: YAML 1.1 takes the key `on` for a truth.
ON = True
TABLE = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["megatron-idempotent"]
RELEASES = [release["megatron"] for release in TABLE["releases"]]


def workflow(name: str) -> dict:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text("utf-8"))


def dry_run(*arguments: str) -> list[str]:
    """Return the commands that make would run."""
    command = ["make", "--no-print-directory", "--dry-run", "--always-make", *arguments]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return printed.replace("\\\n", "").splitlines()


def hooks() -> dict[str, dict]:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    assert repository["repo"] == "local", "others are fetched over the network"
    return {hook["id"]: hook for hook in repository["hooks"]}


def test_pre_commit_has_the_commands_of_make_lint_and_fetches_nothing():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    lint = re.search(r"(?m)^lint: .+\n((?:\t.+\n)+)", makefile)[1].replace("$(BIN)", ".venv/bin")
    # ruff is given its files, and formats them.
    commands = re.sub(r"( --check)? \.$", " --force-exclude", lint, flags=re.MULTILINE)
    assert {hook["language"] for hook in hooks().values()} == {"system"}
    entries = {hook["entry"] for hook in hooks().values()}
    assert entries >= {line.strip() for line in commands.splitlines()}


def test_the_default_tier_has_what_catches_nearly_all_mutants():
    run = loaded(ROOT / "tests" / "mutation" / "run.py")
    mutants = json.loads(run.MUTANTS.read_text("utf-8"))
    assert sum(map(run.by_default, mutants)) >= run.DEFAULT_TIER * len(mutants)
    assert ".venv/bin/python tests/mutation/run.py" in [
        step.get("run") for step in workflow("weekly")["jobs"]["mutation"]["steps"]
    ]


def test_servers_run_what_make_test_skips():
    job = workflow("weekly")["jobs"]["servers"]
    assert job["steps"][-1]["run"] == """make "$SUITE" ARGS="-m '$MARKED'\""""
    rows = job["strategy"]["matrix"]["include"]
    assert {row["suite"] for row in rows} == {"test-ray", "test-vllm"}


def test_the_sources_of_the_table_are_those_that_the_tests_ask_for():
    tests = "".join(path.read_text("utf-8") for path in (ROOT / "tests/downstream").glob("*.py"))
    asked = set(re.findall(r"\b[A-Z][A-Z0-9_]*_SOURCE\b", tests))
    assert {name for each in TABLE["sources"] for name in each["variables"]} == asked


def test_sessions_of_nox_name_tests_that_exist():
    named = re.findall(r"tests/[\w/]+\.py", (ROOT / "noxfile.py").read_text("utf-8"))
    assert len(named) > 10
    assert not [path for path in named if not (ROOT / path).exists()]


@pytest.fixture(scope="module")
def noxfile() -> Iterator[ModuleType]:
    pytest.importorskip("nox", reason="nox is for development, not for the matrix")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        yield loaded(ROOT / "noxfile.py")


@pytest.mark.parametrize("at_hand", [True, False])
def test_a_source_comes_out_of_a_clone_at_hand_or_over_the_network(
    at_hand, noxfile, tmp_path, monkeypatch
):
    remote, folder = tmp_path / "remote", tmp_path / "unpacked"

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=us", "-c", "user.email=us@example.org")
        command = ["git", "-C", str(remote), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (remote / "package").mkdir(parents=True)
    git("init", "--quiet")
    for text in ("one", "two"):
        (remote / "package" / "file.py").write_text(text)
        (remote / "other.py").write_text(text)
        git("add", ".")
        git("commit", "--quiet", "--message", text)
    commit = git("rev-parse", "HEAD~1")
    folder.mkdir()
    missing = tmp_path / "not a clone"
    if at_hand:
        monkeypatch.setenv("MEGATRON_LM", f"{missing}:{remote}")
        repository = (tmp_path / "nowhere").as_uri()
    else:
        monkeypatch.setenv("MEGATRON_LM", str(missing))
        repository = remote.as_uri()
    wants = {"commit": commit, "repository": repository, "packages": ["package"]}

    class Session:
        def run(self, *command: str, external: bool) -> None:
            subprocess.run(command, check=True)

    tree = noxfile._unpacked(Session(), wants, folder)
    assert (tree / "package" / "file.py").read_text() == "one"
    assert not (tree / "other.py").exists()
    assert (folder / f"{commit}.git").exists() != at_hand


def test_the_sources_are_at_the_commits_of_the_recipes():
    sources = {
        each["repository"].removeprefix("https://github.com/"): [] for each in TABLE["sources"]
    }
    for each in TABLE["sources"]:
        sources[each["repository"].removeprefix("https://github.com/")].append(each["commit"])
    for page in (ROOT / "docs" / "recipes").glob("*.md"):
        written = re.findall(
            r"^Written for .*github.com/(\S+)/tree/(\w+)\)", page.read_text("utf-8")
        )
        for repository, commit in written:
            assert commit in sources[repository], page.name


def test_a_tag_is_tested_before_it_is_published():
    jobs = workflow("release")["jobs"]
    assert jobs["test"]["uses"] == "./.github/workflows/ci.yml"
    assert "workflow_call" in workflow("ci")[ON]
    assert jobs["attest"]["needs"] == ["test", "build"]
    assert jobs["publish"]["needs"] == "attest"
    assert jobs["attach"]["needs"] == "publish"


def test_beside_the_right_to_publish_runs_nothing_but_uv_with_its_hash():
    jobs = workflow("release")["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    download, install, publish = jobs["publish"]["steps"]
    assert download["uses"].startswith("actions/download-artifact@")
    assert " --require-hashes --requirement uv.txt" in install["run"]
    wanted = re.fullmatch(r"(uv==\S+) --hash=(sha256:[0-9a-f]{64})", install["env"]["UV"])
    lock = (ROOT / "requirements" / "dev.lock").read_text("utf-8")
    locked = lock.partition(f"\n{wanted[1]} ")[2].partition("# via")[0]
    assert f"--hash={wanted[2]}" in locked, "it is another release than the lock's"
    assert publish["run"].startswith("uv publish ")
    for name, job in jobs.items():
        if "id-token" in job["permissions"]:  # what it runs is built and tested elsewhere
            used = [step.get("uses", "").partition("@")[0] for step in job["steps"]]
            assert "actions/checkout" not in used, name


def test_the_tools_of_ci_and_what_make_test_runs_with_are_files_whose_hashes_the_lock_has():
    texts = [path.read_text("utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    installs = re.findall(r"pip install (.+)", "\n".join(texts))
    # Or it is the project alone, to read a clone with.
    assert {each for each in installs if "--require-hashes" not in each} == {"-e ."}
    assert workflow("ci")["env"] == {"LOCKED": "1"}
    assert "\nexport LOCKED=${LOCKED-1}\n" in (ROOT / ".ci" / "run").read_text("utf-8")
    lines = dry_run("setup", "nox", "LOCKED=1", "PYTHON=python3")
    held = r" --require-hashes -r | --constraints requirements/dev\.lock "
    assert all(re.search(held, line) for line in lines if "pip install" in line)
    assert any(line.endswith(" --require-hashes -r requirements/dev.lock") for line in lines)
    (tool,) = {line.partition(" | ")[0] for line in lines if line.startswith("sed ")}
    asked = subprocess.run(tool, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"uv==\S+( \\\n +--hash=sha256:\w{64})+\n +# via\n", asked.stdout)


def test_the_notes_of_a_release_are_what_the_changelog_says_of_it():
    script = ROOT / ".ci" / "notes.py"
    module = loaded(script)
    text = (
        "# Changelog\n\n## [Unreleased]\n\n- later\n\n## [1.2.30] - 2027-01-02\n\n"
        "### Added\n\n- that\n\n## [1.2.3] - 2026-12-01\n\n- this\n\n## [0.1.0] - 2026-11-25\n"
    )
    assert module.notes(text, "v1.2.3") == "- this\n"
    assert module.notes(text, "v1.2.30") == "### Added\n\n- that\n"
    # The last one is empty, and 1x2x3 no version.
    for tag in ("v0.1.0", "v1.2.4", "vUnreleased", "v1x2x3"):
        with pytest.raises(ValueError, match=re.escape(f"`## [{tag[1:]}] - YYYY-MM-DD`, its sect")):
            module.notes(text, tag)
    done = subprocess.run([sys.executable, script, "v0.0.1"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "CHANGELOG.md has nothing under `## [0.0.1]" in done.stderr


def test_nox_has_a_session_per_release():
    pytest.importorskip("nox", reason="nox is for development, not for the matrix")
    torches = [*(row["torch"] for row in TABLE["torches"]), TABLE["torch"]]
    asked = ["--session", "release", "newest", "older", "fsdp", "patching", "--list", "--json"]
    command = [sys.executable, "-m", "nox", *asked]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sessions = [session["session"] for session in json.loads(listed)]
    assert sessions == [
        *(f"release(megatron='{release}')" for release in RELEASES),
        *(f"newest(version='{version}')" for version in TABLE["releases"][-1]["also"]),
        *(
            f"older(torch='{each['torch']}', version='{version}')"
            for each in TABLE["torches"]
            for version in each.get("suites", ())
        ),
        *(f"fsdp(torch='{torch}')" for torch in torches),
        *(f"patching(version='{version}')" for version in TABLE["patching"]),
    ]


def test_case_files_speak_of_tabled_releases_only():
    newest = Version(RELEASES[-1])
    looked_at = Version(f"{newest.major}.{newest.minor + 1}")
    assert Version(untried()) == looked_at, "run `python tools/casebook.py`"
    for hazard in hazards().values():
        if hazard.since == untried():  # it is on commits only, so far
            assert hazard.before == OPEN
        elif hazard.distribution == "megatron-core":
            assert Version(RELEASES[0].rpartition(".")[0]) <= Version(hazard.since) <= newest
            # A release that nobody has run repairs nothing for certain: its bodies decide.
            assert hazard.before == UNTRIED or Version(hazard.since) < Version(hazard.before)
            assert hazard.before == UNTRIED or Version(hazard.before) < looked_at, hazard.id
