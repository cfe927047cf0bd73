"""Workflows run all tests at some time, publish what was tested, and have no right beyond it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
yaml = pytest.importorskip("yaml", reason="PyYAML is for development, not for the matrix")
ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ZIZMOR = shutil.which("zizmor", path=str(Path(sys.executable).parent))
#: A job on a machine of GitHub's ends then.
LONGEST_MINUTES = 360
#: YAML 1.1 takes the key `on` for a truth.
ON = True
RELEASE = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
TABLE = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["megatron-idempotent"]


def workflow(name: str) -> dict:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text("utf-8"))


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_commits(path):
    used = re.findall(r"uses: (\S+)", path.read_text("utf-8"))
    ours = {f"./.github/workflows/{each.name}" for each in WORKFLOWS}
    pinned = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
    assert [each for each in used if each not in ours and not pinned.fullmatch(each)] == []


@pytest.mark.skipif(ZIZMOR is None, reason="zizmor is not installed")
def test_no_workflow_has_a_right_too_many_or_runs_what_others_write():
    command = [ZIZMOR, "--offline", "--quiet", "--min-severity", "medium", str(ROOT / ".github")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


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


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="pre-commit asks git for its files")
@pytest.mark.skipif(not (ROOT / ".venv" / "bin" / "codespell").exists(), reason="make setup")
@pytest.mark.parametrize("hook", ["codespell", "zizmor"])
def test_a_hook_passes_where_make_lint_does(hook, tmp_path):
    command = [sys.executable, "-m", "pre_commit", "run", hook, "--all-files"]
    environ = {**os.environ, "PRE_COMMIT_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_file_with_exhaustive_tests_is_in_one_shard():
    weekly = workflow("weekly")
    assert weekly[ON].keys() == {"schedule", "workflow_dispatch"}
    job = weekly["jobs"]["exhaustive"]
    assert 'make test ARGS="-m exhaustive $TESTS"' in [step.get("run") for step in job["steps"]]
    shards = [each["tests"].split() for each in job["strategy"]["matrix"]["include"]]
    # The frameworks' own code has a job to itself, which fetches it.
    of_sources = weekly["jobs"]["downstream"]["strategy"]["matrix"]["include"]
    assert {each["marked"] for each in of_sources} == {"exhaustive", "not exhaustive"}
    shards.append(["tests/downstream"])
    places = [ROOT / each for shard in shards for each in shard]
    assert [place for place in places if not place.exists()] == []
    marked = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if "mark.exhaustive" in path.read_text("utf-8") and path != Path(__file__)
    ]
    assert len(marked) > 50
    times = {str(path): sum(path.is_relative_to(each) for each in places) for path in marked}
    assert set(times.values()) == {1}, times


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_each_job_has_a_time_after_which_it_is_ended(path):
    for name, job in workflow(path.stem)["jobs"].items():
        rows = job.get("strategy", {}).get("matrix", {}).get("include", ())
        limits = [row["minutes"] for row in rows] or [job.get("timeout-minutes")]
        if "uses" not in job:
            assert all(0 < limit < LONGEST_MINUTES for limit in limits), name


def test_the_sources_of_the_table_are_those_that_the_tests_ask_for():
    tests = "".join(path.read_text("utf-8") for path in (ROOT / "tests/downstream").glob("*.py"))
    asked = set(re.findall(r"\b[A-Z][A-Z0-9_]*_SOURCE\b", tests))
    assert {name for each in TABLE["sources"] for name in each["variables"]} == asked


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


def test_each_week_the_newest_torch_is_run_whatever_the_bound():
    asked = [step.get("run") for step in workflow("upstream")["jobs"]["torch"]["steps"]]
    assert asked[-1] == "nox --session untried"
    listed = [sys.executable, "-m", "nox", "--session", "untried", "--list", "--json"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [each["session"] for each in json.loads(done.stdout)] == ["untried"]


def test_the_weekly_run_of_the_sources_is_the_session_of_nox():
    steps = workflow("weekly")["jobs"]["downstream"]["steps"]
    asked = 'nox --session downstream -- tests/downstream -m "$MARKED"'
    assert asked in [step.get("run") for step in steps]
    assert "\ndef downstream(session: nox.Session)" in (ROOT / "noxfile.py").read_text("utf-8")


def test_the_sources_are_at_the_commits_of_the_recipes():
    sources = {
        each["repository"].removeprefix("https://github.com/"): [] for each in TABLE["sources"]
    }
    for each in TABLE["sources"]:
        sources[each["repository"].removeprefix("https://github.com/")].append(each["commit"])
    for patch in (ROOT / "docs" / "recipes").glob("*.patch"):
        repository, commit = patch.read_text("utf-8").splitlines()[0].removeprefix("# ").split()
        assert commit in sources[repository], patch.name


def test_the_site_that_is_published_is_the_one_that_was_tested():
    site = workflow("site")
    steps = site["jobs"]["build"]["steps"]
    assert "make test-docs" in [step.get("run") for step in steps]
    folder = re.search(r"(?m)^site_dir: (.+)$", (ROOT / "mkdocs.yml").read_text("utf-8"))[1]
    assert steps[-1]["with"]["path"] == folder
    assert site["jobs"]["deploy"]["needs"] == "build"
    assert site[ON]["push"]["branches"] == ["main"]


def test_a_tag_is_tested_before_it_is_published():
    jobs = workflow("release")["jobs"]
    assert jobs["test"]["uses"] == "./.github/workflows/ci.yml"
    assert "workflow_call" in workflow("ci")[ON]
    assert ".ci/run" in [step.get("run") for step in workflow("ci")["jobs"]["test"]["steps"]]
    assert jobs["publish"]["needs"] == ["test", "build"]
    assert jobs["attach"]["needs"] == "publish"


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
    (build,) = re.findall(r"run: python .ci/notes.py (.+)", RELEASE)
    assert build == '"$GITHUB_REF_NAME" > notes.md'
    assert "--notes-file notes.md" in RELEASE


def test_everything_is_attested_and_the_sbom_as_the_wheels():
    subjects = re.findall(r"subject-path: (.+)", RELEASE)
    assert subjects == ["dist/*", "dist/*.whl"]
    assert "sbom-path: ${{ steps.sbom.outputs.path }}" in RELEASE
    assert 'echo "path=$(echo dist/*.cdx.json)" >> "$GITHUB_OUTPUT"' in RELEASE


def test_the_index_gets_wheel_and_sdist_alone_and_the_release_on_github_all():
    (published,) = re.findall(r"uv publish --trusted-publishing always (.+)", RELEASE)
    assert published.split() == ["dist/*.whl", "dist/*.tar.gz"]
    assert 'gh release create "$GITHUB_REF_NAME" dist/* ' in RELEASE


def test_make_dist_writes_the_sbom_under_the_wheels_name_and_checks_whose_it_is():
    session = (ROOT / "noxfile.py").read_text("utf-8")
    assert 'f"megatron_idempotent-{version}.cdx.json"' in session
    # What it puts in the place of, for CycloneDX, is what pyproject.toml has.
    (dynamic,) = re.findall(r"dynamic, said = '(.+)', ", session)
    assert f"\n{dynamic}\n" in (ROOT / "pyproject.toml").read_text("utf-8")
    assert 'whose.get("version")) != (PROJECT["project"]["name"], version)' in session


def test_a_job_may_write_only_what_it_has_to():
    jobs = RELEASE.partition("\njobs:\n")
    assert "\npermissions: {}\n" in jobs[0]
    written = re.findall(r"^  (\w+):$|^      ([\w-]+): write$", jobs[2], re.MULTILINE)
    assert [job or right for job, right in written] == [
        *("test", "build", "publish", "id-token", "attestations", "attach", "contents"),
    ]
