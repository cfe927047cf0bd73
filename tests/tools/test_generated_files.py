"""HAZARDS.md has a row for each case file, and what else is generated is current."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import casebook
import pytest

from megatron_idempotent.cli.findings import recorded
from megatron_idempotent.patching.catalog import case_file_of, hazards
from megatron_idempotent.patching.releases import installed

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TABLE = PROJECT["tool"]["megatron-idempotent"]
COMMITS = {each["name"]: each for each in TABLE["commits"]}
WALKED = json.loads((ROOT / casebook.HISTORY).read_text())
NEW = "a new hazard is named under Unreleased in CHANGELOG.md, and may wait for the next release"
REMEDY = "run `python tools/casebook.py` in the repository"


HAZARDS = (ROOT / "HAZARDS.md").read_text()


def test_hazards_md_is_current():
    assert casebook.hazards_markdown() == HAZARDS, REMEDY


def test_hazards_md_is_short_enough_to_be_read():
    number = len(HAZARDS.split())
    assert number <= casebook.MOST_WORDS, (
        f"HAZARDS.md has {number} words, and {casebook.MOST_WORDS} is the most: shorten summaries"
    )


def test_each_hazard_has_one_row_with_what_a_user_searches_for():
    for hazard in hazards().values():
        (row,) = (line for line in HAZARDS.splitlines() if f'<a id="{hazard.id}"></a>' in line)
        name, seen, releases, loudness, answer = row.split(" | ")
        assert name.endswith(f"[`{hazard.id}`]({case_file_of(hazard.id)})")
        assert (ROOT / case_file_of(hazard.id)).is_file()
        assert seen.endswith(hazard.summary)
        assert releases.endswith(hazard.versions)
        assert loudness in ("silent", "loud", "both")
        switch = {True: "on", False: "off"}.get(getattr(hazard, "default", None), hazard.answer)
        assert answer == switch
        for message in casebook.messages(hazard.case_file["Symptom"])[:1]:
            error = re.match(r"\w*Error: ", message)
            assert not error or message.removeprefix(error[0]).partition(";")[0] in row


def test_each_anchor_of_hazards_md_that_a_file_links_to_is_there():
    anchors = re.findall(r'<a id="([^"]+)"></a>', HAZARDS)
    titles = re.findall(r"(?m)^#+ (.+)$", HAZARDS)
    slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
    every = anchors + slugs
    assert len(set(every)) == len(every), "an anchor leads to one place"
    folders = ("docs", "patches", "megatron_idempotent", "examples", "tools", "benchmarks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    linked = {
        anchor
        for path in (*ROOT.glob("*.md"), *files)
        if path.suffix in (".md", ".py", ".toml")
        for anchor in re.findall(r"HAZARDS\.md#([\w-]+)", path.read_text("utf-8"))
    }
    assert len(linked) > 100
    assert linked <= {*every}


def test_what_a_run_shows_of_a_hazard_agrees_with_its_symptom():
    """`loudness` is declared where the error of the reproduction does not say it."""
    for hazard in hazards().values():
        symptom = " ".join(hazard.case_file["Symptom"].split())
        if hazard.stock_error != "Fault: ":
            assert hazard.loudness != "silent", hazard.id
        if re.search(r"\bNo error\b(?! until)|silently", symptom):
            assert hazard.loudness != "loud", hazard.id
        if re.search(r"`\w*Error: |hangs|wait for it until", symptom):
            assert hazard.loudness != "silent", hazard.id


def test_the_page_of_frameworks_is_current():
    page = casebook.page(TABLE, recorded(), WALKED)
    assert (ROOT / casebook.COMPATIBILITY).read_text() == page, REMEDY


@pytest.mark.parametrize(
    ("change", "fault"),
    [({"megatron": ["0.1"]}, "0.1, which is none of"), ({"patches": ["nope"]}, "names nope")],
)
def test_a_framework_on_what_was_never_run_is_refused(change, fault):
    frameworks = [TABLE["frameworks"][0] | change]
    with pytest.raises(ValueError, match=fault):
        casebook.page(TABLE | {"frameworks": frameworks}, recorded(), WALKED)


def test_the_readme_says_how_many_patches_land_for_each_framework():
    proven = json.loads((ROOT / casebook.GENERATED / casebook.PROVEN).read_text())
    landing: dict[str, set[int]] = {}
    own: dict[str, set[str]] = {}
    for framework in TABLE["frameworks"]:
        counts = [casebook.coverage(proven[name]) for name in framework["megatron"]]
        assert not any(refused for _, refused in counts), "README says that none is refused"
        names = framework["name"].split(", ")
        for name in names:
            others = tuple(f"{other.lower()}-" for other in names if other != name)
            landing.setdefault(name, set()).update(applied for applied, _ in counts)
            patches = {id for id in framework.get("patches", ()) if not id.startswith(others)}
            own.setdefault(name, set()).update(patches)
    readme = (ROOT / "README.md").read_text()
    rows = dict(re.findall(r"(?m)^\| \[([^]]+)\]\(docs/recipes/[^)]+\) \| (.+) \|$", readme))
    assert {*rows} == {*landing} - {"Megatron-LM"}
    for name, row in rows.items():
        least, most = min(landing[name]), max(landing[name])
        span = f"{most}" if least == most else f"{least} to {most}"
        assert row == f"{span} | {len(own[name])}", name


def naming() -> dict[Path, str]:
    return {path: (ROOT / path).read_text() for path in casebook.NAMING}


def test_what_names_releases_and_the_version_has_those_of_the_table():
    assert casebook.naming_releases(naming(), TABLE["releases"]) == naming(), REMEDY


def test_casebook_writes_what_differs_alone_and_the_number_that_doctor_says(tmp_path):
    newest = installed("megatron-core")
    if newest is None or newest.text != TABLE["releases"][-1]["megatron"]:
        pytest.skip("the pages show the newest release")
    files = [*casebook.NAMING, Path("HAZARDS.md"), casebook.COMPATIBILITY, casebook.USE]
    files += [casebook.HISTORY]
    files += [path.relative_to(ROOT) for path in (ROOT / casebook.GENERATED).iterdir()]
    for path in files:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
        os.utime(tmp_path / path, (0, 0))
    page = (ROOT / casebook.USE).read_text()
    stale, number = re.subn(r"\d+ of \d+ would land on", "1 of 2 would land on", page)
    assert number == 1
    (tmp_path / casebook.USE).write_text(stale)
    assert casebook.main([], tmp_path) == 0
    assert (tmp_path / casebook.USE).read_text() == page, REMEDY
    written = {path for path in files if (tmp_path / path).stat().st_mtime}
    assert written == {casebook.USE}


def test_the_page_keeps_its_number_beside_another_release():
    page = (ROOT / casebook.USE).read_text()
    assert casebook.with_first_line(page, "3 of 3 would land on megatron-core 0.1", "0.2") == page
    with pytest.raises(ValueError, match=r"docs/use\.md"):
        casebook.with_first_line("", "3 of 3 would land on megatron-core 0.2; …", "0.2")


def test_a_new_minor_is_a_line_in_the_table():
    newer = [*TABLE["releases"], {"megatron": "0.20.0", "training": True}]
    found = casebook.naming_releases(naming(), newer)
    makefile, readme, project, _ = (found[path] for path in casebook.NAMING)
    assert "\nMEGATRON ?= 0.20.0\n" in makefile
    assert "0.19.2 and 0.20.0 with torch" in " ".join(readme.split())
    assert '"megatron-core[training]>=0.17.1,<0.21"' in project
    assert casebook.first_untried(newer) == "0.21"
    assert max(map(len, readme.splitlines())) == max(
        map(len, naming()[Path("README.md")].splitlines())
    )


def test_a_text_that_names_releases_no_longer_is_refused():
    with pytest.raises(ValueError, match="Makefile"):
        casebook.naming_releases({Path("Makefile"): "help:\n"}, TABLE["releases"])


def test_every_hazard_was_run_on_every_release():
    proven = recorded()
    missing = missing_in(proven, (ROOT / "CHANGELOG.md").read_text())
    assert not missing, f"{missing} not run: run `make matrix` and `make pins`; {NEW}"
    for release, findings in proven.items():
        failed = {i for i, word in findings.items() if word in casebook.FAILURES}
        known = COMMITS.get(release, {})
        failed -= {*known.get("refused", ()), *known.get("unproven", ())}
        assert not failed, f"{failed} disagree with their case files on {release}"


def not_yet_run(proven: casebook.Proven, changes: str) -> set[str]:
    """Hazards that are new, which the maintainers run everywhere before the next release.

    They were run nowhere, and the changelog names them under Unreleased and under no release.
    """
    _, unreleased, *released = changes.split("\n## ")
    assert unreleased.startswith("[Unreleased]")
    return {
        hazard
        for hazard in set(hazards()).difference(*proven.values())
        if f"`{hazard}`" in unreleased and f"`{hazard}`" not in "".join(released)
    }


def missing_in(proven: casebook.Proven, changes: str) -> dict[str, set[str]]:
    """Release or commit → the hazards that were not run there, though they should have been."""
    new = not_yet_run(proven, changes)
    missing = {name: set(hazards()) - set(found) - new for name, found in proven.items()}
    return {name: lost for name, lost in missing.items() if lost}


def test_only_a_hazard_that_is_new_everywhere_may_wait_to_be_run():
    told = "# Changelog\n\n## [Unreleased]\n\n- The patch `{}`.\n\n## [0.1.0]\n\n- `{}`\n"
    lost = {name: dict.fromkeys(hazards(), "proven") for name in ("0.18.2", "0.19.2")}
    del lost["0.19.2"]["gc-stays-off"]
    said = told.format("gc-stays-off", "no-sync-func-reentry")
    assert missing_in(lost, said) == {"0.19.2": {"gc-stays-off"}}, "it was run elsewhere"
    for found in lost.values():
        found.pop("gc-stays-off", None)
    assert missing_in(lost, said) == {}
    for changes in (told.format("other", "other"), told.format("gc-stays-off", "gc-stays-off")):
        assert missing_in(lost, changes) == {name: {"gc-stays-off"} for name in lost}


def test_findings_of_prove_are_read_by_release(tmp_path):
    rows = [
        {"id": "train-interval-timer", "verdict": "proven", "stock": "AssertionError: x"},
        {"id": "grad-scale-func", "verdict": "not_applicable", "stock": "missing_target: y"},
    ]
    (tmp_path / "0.9.0.json").write_text(json.dumps(rows))
    (tmp_path / "0.10.0.json").write_text("[]")
    proven = casebook.read_findings(tmp_path)
    assert list(proven) == ["0.9.0", "0.10.0"], "in order of release, not of text"
    assert proven["0.9.0"] == {
        "train-interval-timer": "proven",
        "grad-scale-func": "missing_target",
    }


def test_findings_of_some_hazards_leave_the_others_standing():
    known = {"0.10.0": {"grad-scale-func": "proven", "gone": "proven"}}
    found = {"0.10.0": {"adam-step-shared": "proven"}, "0.9.0": {"grad-scale-func": "documented"}}
    assert casebook.merged(known, found) == {
        "0.9.0": {"grad-scale-func": "documented"},
        "0.10.0": {"adam-step-shared": "proven", "grad-scale-func": "proven"},
    }


@pytest.mark.parametrize("content", ["no json", "[1]", '[{"id": "a"}]', None])
def test_a_folder_without_findings_is_refused_by_name(content, tmp_path):
    if content is not None:
        (tmp_path / "0.9.0.json").write_text(content)
    with pytest.raises(ValueError, match=str(tmp_path)):
        casebook.read_findings(tmp_path)
