"""Writes the pages of the documentation site that are not files of `docs/`, and adapts links.

`make docs` builds the site with MkDocs, which calls these functions through `.ci/mkdocs_hooks.py`:
a page for each hazard, their list and the matrix come from the case files, and CHANGELOG.md and
CONTRIBUTING.md are pages too. Links in the sources work on GitHub; `relinked` changes them to work
on the site.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from casebook import PROJECT, by_kind, hazard_tables, messages

from megatron_idempotent.cli.explain import facts
from megatron_idempotent.cli.findings import (
    NOT_RUN,
    PROVEN,
    WORDS,
    Proven,
    absence_from_main,
    meaning,
    recorded,
    seen,
)
from megatron_idempotent.cli.upstream import (
    BY_DESIGN,
    pull_request,
    repair_folder,
    wider_repair,
)
from megatron_idempotent.patching.base import MEGATRON
from megatron_idempotent.patching.catalog import hazards
from megatron_idempotent.patching.record import LOUDNESS, SECTIONS, Hazard, Patch

#: Files of the root → the paths of their pages.
ROOT_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_HAZARDS, _MATRIX, _READY = "hazards/index.md", "matrix.md", "ready-to-send.md"
_APPLY = """\
```python
import megatron_idempotent

megatron_idempotent.apply()
```
"""
_READY_HEAD = """\
---
search: {exclude: true}
---

# Ready to send

A patch of ours can go once upstream has repaired the hazard. Each repair here is a small change of
upstream's own code with a unit test and the text of a pull request. It is proven on a checkout:
without a patch of ours, the hazard's program runs, its control keeps its bits, and `apply()` says
`fixed_upstream` by itself. [Take one and send it](../upstream/README.md).
"""
#: States of upstream's repairs: the title of their section, and of its second column.
_STATES = {
    "repair": ("Repairs", "pull request"),
    "pull request": ("Upstream's own pull requests", "state"),
    "none yet": ("Without a repair yet", "package"),
    "by design": ("By design", "it stays until"),
    "not in main": ("Not on Megatron's main", "why"),
}
_TITLES = {"Affects": "Releases, and what the patch does"}
_INSTALL = "docs/use.md"
#: Titles of the facts that a hazard's page has directly below the symptom.
_SHORT = ("Versions", "Silent or loud", "Answer")
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def pages(root: Path) -> dict[str, str]:
    """Return the generated pages of the documentation site in Markdown, by their path in its
    sources.

    `root` is a checkout of the project.

    Raises:
        OSError: the checkout lacks pyproject.toml or a page of the root.
    """
    import tomllib  # not in Python 3.10, which reads case files too

    proven = recorded()
    project = tomllib.loads((root / PROJECT).read_text("utf-8"))["tool"]["megatron-idempotent"]
    texts = {
        f"hazards/{hazard.id}.md": hazard_page(hazard, root, proven, project)
        for hazard in hazards().values()
    }
    texts[_HAZARDS] = _list()
    texts[_MATRIX] = _matrix(proven, project)
    texts[_READY] = _ready(proven)
    for name, page in ROOT_PAGES.items():
        texts[page] = (root / name).read_text(encoding="utf-8")
    return texts


def hazard_page(hazard: Hazard, root: Path, proven: Proven, project: Mapping[str, Any]) -> str:
    """Return the page of one hazard on the documentation site, in Markdown.

    Error messages that users paste are above the first heading, where the search weighs them most.
    """
    sections = hazard.case_file
    told = facts(hazard)
    parts = ["---", f"title: {hazard.id}", "search: {boost: 2}", "---", "", f"# {hazard.id}", ""]
    parts += [f"**{sections['']}**", "", _linked(sections["Symptom"]), ""]
    # Every page has such words: in the search they would outweigh those of one message.
    parts += ['<div markdown="1" data-search-exclude>', ""]
    parts += [*(f"- {told.pop(name)[0]}" for name in _SHORT), "", "</div>", ""]
    if isinstance(hazard, Patch):
        install = re.search(r"(?m)^    (pip install .*)$", (root / _INSTALL).read_text("utf-8"))
        assert install is not None, f"{_INSTALL} has no line that installs the package"
        parts += [
            "## The lines that end it",
            "",
            "```console",
            f"$ {install[1]}",
            "```",
            "",
            _APPLY,
            "It wraps:",
            "",
            *(f"- `{address}`" for address in told.pop("Targets")),
            "",
        ]
    if recipes := _recipes(hazard, root, proven, project):
        parts += [f"Recipes of frameworks that meet it: {', '.join(recipes)}.", ""]
    for name, values in told.items():
        if values:
            shown = "; ".join(_hazard_link(value) for value in values)
            parts += [f"{name}: {shown}.", ""]
    for name in SECTIONS[1:]:
        parts += [f"## {_TITLES.get(name, name)}", "", _linked(sections[name]), ""]
    parts += [
        "## See it",
        "",
        "On CPU ranks with the Megatron that is installed, stock and patched:",
        "",
        "```console",
        f"$ megatron-idempotent prove {hazard.id}",
        "```",
        "",
    ]
    if words := seen(hazard, proven):
        parts += ["## Where it was seen", "", _table([*proven], {hazard.id: hazard}, proven), ""]
        parts += [*(f"- {meaning(word).mark}: {meaning(word).sentence}" for word in words), ""]
    parts += [f"[The row among all hazards](index.md#{hazard.id})", ""]
    if related := _related(hazard):
        parts += ["## Same message, or same function", ""]
        parts += [
            *(f"- [`{similar.id}`]({similar.id}.md): {similar.summary}" for similar in related),
            "",
        ]
    return "\n".join(parts)


def _recipes(
    hazard: Hazard, root: Path, proven: Proven, project: Mapping[str, Any]
) -> dict[str, None]:
    """Return links to the recipes of frameworks whose Megatron, or own code, has the hazard."""
    links: dict[str, None] = {}
    for framework in project["frameworks"]:
        words = {proven.get(name, {}).get(hazard.id, NOT_RUN) for name in framework["megatron"]}
        is_own = hazard.id in framework.get("patches", ())
        has_hazard = is_own or any(meaning(word).present for word in words)
        for name in framework["name"].split(", ") if has_hazard else ():
            page = f"recipes/{name.lower()}.md"
            if (root / "docs" / page).exists():
                links[f"[{name}](../{page})"] = None
    return links


def _related(hazard: Hazard) -> list[Hazard]:
    """Return the hazards that share an error message or a patched function with `hazard`."""
    marks = _marks(hazard)
    return [
        similar
        for similar in hazards().values()
        if similar is not hazard and marks & _marks(similar)
    ]


def _marks(hazard: Hazard) -> set[str]:
    targets = getattr(hazard, "targets", ())
    return {*messages(hazard.case_file["Symptom"]), *(target.address for target in targets)}


def hazard_nav() -> list[dict[str, list[str]]]:
    """Return the site's navigation of hazards: titles of kinds, with their pages in order of id."""
    return [
        {title: [f"hazards/{hazard.id}.md" for hazard in listed]}
        for title, listed in by_kind().items()
    ]


def _hazard_link(text: str) -> str:
    return f"[`{text}`]({text}.md)" if text in hazards() else text


def _linked(text: str) -> str:
    """Return a Markdown text on one line, with its bare URLs turned into links."""
    text = " ".join(text.split())
    return re.sub(r"(?<![<(])https://[^\s,]*[^\s,.;:)]", lambda link: f"<{link[0]}>", text)


def _list() -> str:
    head = (
        "---\nsearch: {exclude: true}\n---\n\n# Hazards\n\n"
        "Each goes wrong on stock Megatron, or in a framework on it, and has a program that shows "
        "it. Paste an error message into the search to find its page. "
        "[The matrix](../matrix.md) says which release and which pinned commit has which.\n\n"
        f"Silent: {LOUDNESS['silent']}. Loud: {LOUDNESS['loud']}.\n"
    )
    return "\n".join([head, *hazard_tables("{}.md".format)])


def _matrix(proven: Proven, project: Mapping[str, Any]) -> str:
    of_megatron = {h.id: h for h in hazards().values() if h.distribution == MEGATRON}
    verdicts = {word for hazard in of_megatron.values() for word in seen(hazard, proven)}
    head = (
        "---\nhide: [navigation, toc]\n---\n\n# Matrix\n\n"
        "Rows are hazards of Megatron, columns are its releases and the commits that "
        f"frameworks pin. `make matrix` and `make pins` fill [{PROVEN}]"
        f"(../patches/_generated/{PROVEN}), of which this is drawn.\n"
    )
    legend = [f"- {kind.mark}: {kind.sentence}" for word, kind in WORDS.items() if word in verdicts]
    table = _table([*proven], of_megatron, proven)
    return "\n".join([head, *legend, "", _filters(proven, project), "", table, ""])


def _ready(proven: Proven) -> str:
    """Return the page about repairs of upstream's own code: a table of hazards for each state.
    A state is, for example, that a repair is ready, or that upstream has a pull request.
    """
    rows: dict[str, list[str]] = {name: [] for name in _STATES}
    for hazard in hazards().values():
        link = f"[`{hazard.id}`](hazards/{hazard.id}.md)"
        folder, request = repair_folder(hazard.id), pull_request(hazard.id)
        other, absence = wider_repair(hazard), absence_from_main(hazard, proven)
        if folder is not None:
            title = (folder / "message.md").read_text("utf-8").partition("\n")[0].removeprefix("# ")
            own = f" Theirs: {request}." if request else ""
            message = f"../upstream/{hazard.id}/message.md"
            rows["repair"].append(f"| {link} | [{title}]({message}){own} |")
        elif request:
            rows["pull request"].append(f"| {link} | {request} |")
        elif other is not None:
            rows["repair"].append(f"| {link} | the repair of [`{other}`](hazards/{other}.md) |")
        elif not isinstance(hazard, Patch) or BY_DESIGN in hazard.case_file["Remove when"]:
            until = " ".join(hazard.case_file["Remove when"].split())
            rows["by design"].append(f"| {link} | {until} |")
        elif absence:
            rows["not in main"].append(f"| {link} | {absence} |")
        else:
            rows["none yet"].append(f"| {link} | {hazard.distribution} |")
    parts = [_READY_HEAD]
    for state, (title, column) in _STATES.items():
        parts += [f"## {title}: {len(rows[state])}", "", f"| hazard | {column} |", "|---|---|"]
        parts += [*rows[state], ""]
    return "\n".join(parts)


def _filters(proven: Proven, project: Mapping[str, Any]) -> str:
    """Return, in HTML, menus of frameworks and Megatrons, and a hidden note about each framework.

    `docs/assets/matrix.js` reads the Megatrons of a framework from `data-megatrons`.
    """
    commits = {commit["name"]: commit for commit in project["commits"]}
    frameworks, notes = [], []
    for number, framework in enumerate(project["frameworks"]):
        name = f"{framework['name']} {framework['version']}"
        pinned = html.escape(json.dumps(framework["megatron"]))
        frameworks.append(
            f'<option value="{number}" data-megatrons="{pinned}">{html.escape(name)}</option>'
        )
        links = [
            f'<a href="../hazards/{hazard_id}/"><code>{hazard_id}</code></a>'
            for hazard_id in framework.get("patches", ())
        ]
        notes.append(
            f'<p data-framework="{number}" hidden>{html.escape(name)}: patches for its own code: '
            f"{', '.join(links) or 'none needed'}</p>"
        )
    megatrons = []
    for name in proven:
        commit = commits.get(name)
        label = f"{name}: {commit['commit'][:10]}, {commit['date']}" if commit else name
        megatrons.append(f'<option value="{html.escape(name)}">{html.escape(label)}</option>')
    return (
        '<p class="filters"><label>Show what applies to <select id="framework">'
        f'<option value="">all frameworks</option>{"".join(frameworks)}</select></label> '
        '<label>on <select id="megatron"><option value="">each Megatron</option>'
        f"{''.join(megatrons)}</select></label></p>{''.join(notes)}"
    )


def _table(names: list[str], listed: Mapping[str, Hazard], proven: Proven) -> str:
    """Return verdicts as an HTML table, hazards by releases, with classes and data for CSS and
    `matrix.js`.
    """
    alone = len(listed) == 1
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    rows = []
    for hazard_id in listed:
        words = [proven[name].get(hazard_id, NOT_RUN) for name in names]
        cells = "".join(
            f'<td class="{"here" if meaning(word).present else "absent"} {word.replace(" ", "-")}" '
            f'data-megatron="{html.escape(name)}">{meaning(word).mark}</td>'
            for name, word in zip(names, words, strict=True)
        )
        name = "" if alone else f'<th><a href="../hazards/{hazard_id}/">{hazard_id}</a></th>'
        rows.append(f"<tr>{name}{cells}</tr>")
    corner = "" if alone else "<th>hazard</th>"
    return (
        f'<div class="matrix" data-search-exclude><table><thead><tr>{corner}{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def relinked(markdown: str, source: str, exists: Callable[[str], bool], repository: str) -> str:
    """Return a Markdown page whose links are rewritten for the documentation site.

    A link to a hazard in HAZARDS.md becomes one to the hazard's page; a link to HAZARDS.md's grids
    becomes one to the matrix; a link to a file outside of the site becomes one to the repository.

    Args:
        markdown: the page.
        source: the page's path in the site's sources.
        exists: returns whether the site's sources have a page or file at a path.
        repository: the URL of the repository.
    """
    of_root = source in ROOT_PAGES.values()
    folder = "" if of_root else posixpath.dirname(f"docs/{source}")

    def moved(link: re.Match[str]) -> str:
        target, _, anchor = link[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if path == "HAZARDS.md":
            listing = _MATRIX if anchor.startswith("seen-on-") else _HAZARDS
            page = f"hazards/{anchor}.md" if anchor in hazards() else listing
            anchor = ""
        elif path in ROOT_PAGES:
            page = ROOT_PAGES[path]
        elif path.startswith("docs/") and exists(path[len("docs/") :]):
            page = path[len("docs/") :]
        else:
            return f"{link[1]}{repository}/blob/main/{path}{link[3]}"
        relative = posixpath.relpath(page, posixpath.dirname(source) or ".")
        return f"{link[1]}{relative}{'#' if anchor else ''}{anchor}{link[3]}"

    # The links in generated pages already work on the site.
    return markdown if source.startswith("hazards/") else _LINK.sub(moved, markdown)
