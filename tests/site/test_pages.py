"""The generated pages of the site have what users look for, and links that are right there."""

import html
import json
import re
from pathlib import Path

import pytest
import site_pages

from megatron_idempotent.cli import explain
from megatron_idempotent.patching.catalog import hazards

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
ROOT = Path(__file__).parents[2]
REPOSITORY = "https://example.org/us/it"


@pytest.fixture(scope="module")
def pages():
    return site_pages.pages(ROOT)


def test_a_hazard_has_a_page_with_its_messages_above_all_headings_and_what_explain_says(pages):
    for hazard in hazards().values():
        page = pages[f"hazards/{hazard.id}.md"]
        above = page.partition("\n## ")[0]
        assert all(
            f"`{each}`" in above for each in site_pages.messages(hazard.case_file["Symptom"])
        )
        assert f"$ megatron-idempotent prove {hazard.id}" in page
        assert " ".join(hazard.case_file["Cause"].split())[:60] in page
        words = " ".join(page.split())
        assert f"**{hazard.case_file['']}**" in words
        for values in explain.facts(hazard).values():
            assert all(value in words for value in values), hazard.id


def test_the_list_of_hazards_has_a_row_with_an_anchor_for_each(pages):
    rows = [line for line in pages["hazards/index.md"].splitlines() if line.startswith("<a id=")]
    linked = [re.match(r'<a id="(.+)"></a>\[`\1`\]\(\1\.md\) \| ', row) for row in rows]
    assert sorted(row[1] for row in linked if row) == [*hazards()]


def test_only_code_spans_of_several_words_are_messages():
    found = site_pages.messages(
        "`train` fails with the\n`AssertionError: no,\n  not so`, and `b` too"
    )
    assert found == ["AssertionError: no, not so"]


def test_a_hazard_leads_to_recipes_of_who_meets_it_and_to_hazards_of_its_message(pages):
    page = pages["hazards/bridge-train-reentry.md"]
    assert "meet it: [Megatron-Bridge](../recipes/megatron-bridge.md)." in page
    assert "\n- [`train-interval-timer`](train-interval-timer.md): a second train() fails" in page
    assert "$ pip install " in page
    assert "[slime](../recipes/slime.md)" in pages["hazards/train-interval-timer.md"]


def test_each_hazard_is_in_the_navigation_once():
    found = [page for kind in site_pages.hazard_nav() for shown in kind.values() for page in shown]
    assert sorted(found) == sorted(f"hazards/{hazard_id}.md" for hazard_id in hazards())


def test_the_matrix_has_every_hazard_of_megatron_and_every_megatron(pages):
    matrix = pages["matrix.md"]
    for each in hazards().values():
        row = f'<tr><th><a href="../hazards/{each.id}/">' in matrix
        assert row == (each.distribution == "megatron-core")
    assert '<option value="0.12.3">0.12.3</option>' in matrix
    assert '<option value="nemo-rl">nemo-rl: 14346b65a2, 2026-08-12</option>' in matrix


def test_the_matrix_offers_each_framework_with_the_megatrons_that_it_pins(pages):
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["megatron-idempotent"]
    found = re.findall(
        r'<option value="\d+" data-megatrons="([^"]+)">([^<]+)</option>', pages["matrix.md"]
    )
    offered = [(name, json.loads(html.unescape(megatrons))) for megatrons, name in found]
    assert offered == [
        (f"{each['name']} {each['version']}", each["megatron"]) for each in table["frameworks"]
    ]


def test_every_hazard_has_a_state_of_upstreams_repair(pages):
    page = pages["ready-to-send.md"]
    for hazard_id in hazards():
        assert page.count(f"| [`{hazard_id}`](hazards/{hazard_id}.md) |") == 1
    assert "(../upstream/no-sync-func-reentry/message.md)" in page
    assert "| the repair of [`adam-step-shared`](hazards/adam-step-shared.md) |" in page
    titles = dict(re.findall(r"^## (.*): (\d+)$", page, re.MULTILINE))
    assert sum(map(int, titles.values())) == len(hazards())
    listed = json.loads((ROOT / "upstream" / "pull_requests.json").read_text("utf-8"))
    assert listed.keys() <= hazards().keys()
    without = [name for name in listed if not (ROOT / "upstream" / name / "repair.py").exists()]
    assert int(titles["Upstream's own pull requests"]) == len(without) > 0
    assert all(re.fullmatch(r"[\w-]+/[\w-]+#\d+", row["pull_request"]) for row in listed.values())


def test_the_pages_stay_within_their_words():
    written = [*(ROOT / "docs").rglob("*.md")]
    roots = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "HAZARDS.md")
    written += [ROOT / name for name in roots]
    words = {path: len(path.read_text("utf-8").split()) for path in written}
    assert sum(words.values()) <= 65_000, "say each fact once, and link to it"
    short = ("benchmarks", "state", "layouts", "compatibility")
    assert [name for name in short if words[ROOT / "docs" / f"{name}.md"] > 600] == []
    assert words[ROOT / "docs" / "certify.md"] <= 1_500


def test_each_link_of_a_page_is_right_on_github():
    dead = []
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        links = re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))
        files = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
        # What `pages` makes is there on the site alone.
        dead += [f"{path.name}: {file}" for file in files if not (path.parent / file).exists()]
    assert not dead


def test_the_site_has_the_address_that_the_index_is_told():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert f"\nsite_url: {urls['Documentation']}\n" in config
    assert f"\nrepo_url: {urls['Repository']}\n" in config


@pytest.mark.parametrize(
    ("source", "link", "right"),
    [
        ("trainer.md", "../HAZARDS.md#no-sync-func-reentry", "hazards/no-sync-func-reentry.md"),
        ("trainer.md", "../HAZARDS.md", "hazards/index.md"),
        ("trainer.md", "../HAZARDS.md#seen-on-each-release", "matrix.md"),
        ("trainer.md", "train-step.md#the-loss", "train-step.md#the-loss"),
        ("trainer.md", "../CHANGELOG.md", "changelog.md"),
        ("trainer.md", "../examples/verl_step.py", f"{REPOSITORY}/blob/main/examples/verl_step.py"),
        ("trainer.md", "https://example.org/x", "https://example.org/x"),
        ("trainer.md", "#seeing-it", "#seeing-it"),
        ("contributing.md", "docs/gpu.md", "gpu.md"),
        ("contributing.md", "patches/__init__.py", f"{REPOSITORY}/blob/main/patches/__init__.py"),
        ("changelog.md", "HAZARDS.md#grad-scale-func", "hazards/grad-scale-func.md"),
    ],
)
def test_a_link_that_is_right_on_github_is_right_on_the_site(source, link, right):
    known = {path.name for path in (ROOT / "docs").iterdir()}.__contains__
    assert (
        site_pages.relinked(f"See [x]({link}).", source, known, REPOSITORY) == f"See [x]({right})."
    )


def test_pages_install_the_package_from_one_place_and_recipes_lead_there():
    texts = {
        path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
        for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    }
    told = {
        where
        for text in texts.values()
        for where in re.findall(r'^ *pip install "(git\+[^"]*)"', text, re.MULTILINE)
    }
    assert told == {"git+https://github.com/megatron-idempotent/megatron-idempotent"}
    assert "\n## Install\n" in texts["docs/use.md"]
    for path, text in texts.items():
        if path.startswith("docs/recipes/") or path in ("README.md", "docs/index.md"):
            assert "use.md#install)" in text, path
