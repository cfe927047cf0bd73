"""Writes the files that are generated from case files, releases and verdicts.

`python tools/casebook.py` rewrites HAZARDS.md, docs/compatibility.md, and in
`patches/_generated/` the index that `apply()` reads and the names of upstream that wrappers use, in
the repository of this file. Releases, commits and frameworks are tables in pyproject.toml, from
which other files that list releases are updated. CITATION.cff gets the version of the package, and
docs/use.md the first line of `doctor`, if the newest release is installed. A file is written only
if its content changes.

With paths of wheels, or of clones at a release's tag, it updates the table of releases, by which
`apply()` and `doctor` tell a release from a commit; the entry of an installed release is always
updated. With these and with other commits it updates the texts of functions that `apply()` need
not parse.

With `--accept ID` it also records, as `drift --accept` does, that a person has reviewed the bodies
that these patches wrap, in the wheels and source trees at the paths, or in the installed Megatron.
A new patch needs only this and its case file.

With `--proven FOLDER` it first merges the verdicts in that folder into
`patches/_generated/proven.json`: `make matrix` writes the output of `prove --json` on each release
to such a folder, and `make pins` that on each commit that frameworks pin.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import _checkout
from body_texts import renewed_texts
from contracts import contract_lines
from reads import renewed
from release_table import renewed_table

from megatron_idempotent import __version__
from megatron_idempotent.cli.drift import drift
from megatron_idempotent.cli.findings import PROVEN, Proven
from megatron_idempotent.cli.generated import content, rewrite, write
from megatron_idempotent.cli.needs import lines_of
from megatron_idempotent.cli.trees import installed_trees, open_trees, release_of
from megatron_idempotent.patching.base import INDEX, MEGATRON
from megatron_idempotent.patching.catalog import case_file_of, hazards, index_of, patches
from megatron_idempotent.patching.contract import CONTRACTS
from megatron_idempotent.patching.record import LOUDNESS, Hazard, Patch
from megatron_idempotent.patching.releases import TABLE, place
from megatron_idempotent.patching.settings import SWITCH
from megatron_idempotent.patching.source import TEXTS
from megatron_idempotent.patching.surroundings import READS, parsed

COMPATIBILITY = Path("docs", "compatibility.md")
HISTORY = Path("docs", "history.json")
GENERATED = Path("patches", "_generated")
MAKEFILE, README, PROJECT = Path("Makefile"), Path("README.md"), Path("pyproject.toml")
CITATION = Path("CITATION.cff")
USE = Path("docs", "use.md")
#: Files with the releases of pyproject.toml's table, or with the package's version.
NAMING = (MAKEFILE, README, PROJECT, CITATION)
_LINE = 104
#: Fixed texts of HAZARDS.md. Other texts come from the case files.
MOST_WORDS = 5000

#: Verdicts that no release may have.
FAILURES = frozenset(
    {
        *("unpatched", "stock_runs", "other_error", "not_repaired", "false_alarm"),
        *("drifted", "failed", "conflict"),
    }
)

#: Titles of groups of hazards, by a patch's first promise; then titles for other hazards.
_KINDS = {
    "train-again": "train() again",
    "overlap": "Overlap",
    "abort": "After an exception",
    "generation": "Generation",
    "offload": "Offload",
    "loss-scale": "Loss scale",
    "aux-loss": "MoE losses",
    "deferred-embedding": "Deferred embedding",
    "layer-wise": "Muon, layer-wise",
}
_OTHER_KINDS = ("In frameworks", "Experts and MTP", "Set-up and state")
_HEAD_OF_HAZARDS = f"""\
# Hazards of Megatron's train path

Generated from the case files in `patches/` by `python tools/casebook.py`; do not edit.

A hazard's name leads to its case file: symptom, cause, releases, a link upstream, when the patch
can go. `megatron-idempotent explain NAME` prints it, also for a message, and `prove NAME` shows
the hazard on CPU ranks, stock and patched.

- silent: {LOUDNESS["silent"]}
- loud: {LOUDNESS["loud"]}
- off: the patch waits until a program names it
- a function in place of a patch: only the caller can avoid the hazard, with a call of it
"""
_SEEN = """\
## Seen on each release

`make matrix` runs every hazard on every release. `explain NAME` prints what was seen, the
[matrix](https://megatron-idempotent.github.io/megatron-idempotent/matrix/) draws it, from
[proven.json](patches/_generated/proven.json).

## Seen on the commits that frameworks pin

`make pins` runs the same on each commit in pyproject.toml, whatever `apply()` says. Its findings
stand beside those of the releases.
"""


def hazards_markdown() -> str:
    """Return the content of HAZARDS.md."""
    return "\n".join([_HEAD_OF_HAZARDS, *hazard_tables(case_file_of), _SEEN])


def hazard_tables(link: Callable[[str], str]) -> Iterator[str]:
    """Yield the lines of a Markdown table for each kind of hazard, below the kind's title.

    A row has the hazard's id as its anchor.

    Args:
        link: returns the target of the link in a hazard's row, for its id.
    """
    for title, listed in by_kind().items():
        yield f"## {title}\n"
        yield "hazard | on stock Megatron | releases | loudness | patch"
        yield "---|---|---|---|---"
        for hazard in listed:
            anchored = f'<a id="{hazard.id}"></a>[`{hazard.id}`]({link(hazard.id)})'
            yield " | ".join([anchored, _seen_by_users(hazard), *_cells(hazard)])
        yield ""


def by_kind() -> dict[str, list[Hazard]]:
    """Return title of a kind → the hazards of that kind, in order of id."""
    kinds: dict[str, list[Hazard]] = {title: [] for title in (*_KINDS.values(), *_OTHER_KINDS)}
    for hazard in hazards().values():
        kinds[_kind(hazard)].append(hazard)
    return kinds


def _kind(hazard: Hazard) -> str:
    framework, experts, setup = _OTHER_KINDS
    if hazard.distribution != MEGATRON:
        return framework
    for group in getattr(hazard, "groups", ()):
        return _KINDS[group]
    words = {"mtp", "moe", "expert", "experts", "router"}
    return experts if words & {*hazard.id.split("-")} else setup


def _seen_by_users(hazard: Hazard) -> str:
    """Return a hazard's summary for its table row.
    If the summary lacks the first error message that the symptom quotes, the message is put before
    it.
    """
    quoted = messages(hazard.case_file["Symptom"])
    errors = [message for message in quoted if re.match(r"\w*(Error|Exception): ", message)]
    for message in errors or quoted:
        _, _, text = message.rpartition("Error: ")
        if text not in hazard.summary:
            return f"`{message.partition(';')[0]}`: {hazard.summary}"
        break
    return hazard.summary


def messages(symptom: str) -> list[str]:
    """Return the error messages that a symptom quotes, each on one line, as a terminal shows them.

    A code span of three words or more counts as a message; a shorter one is a name.
    """
    spans = re.findall(r"`([^`]+)`", " ".join(symptom.split()))
    return [span for span in dict.fromkeys(spans) if len(span.split()) > 2]


def _cells(hazard: Hazard) -> tuple[str, str, str]:
    """Return cells of a hazard's row: releases, whether it is silent or loud, its patch's default.
    The default is "on" or "off". For a hazard without a patch, the last cell is its `answer`.
    """
    versions = hazard.versions
    if hazard.distribution != MEGATRON:
        versions = f"{hazard.distribution} {versions}"
    answer = hazard.answer
    if isinstance(hazard, Patch):
        answer = "on" if hazard.default else "off"
    return versions, hazard.loudness, answer


def read_findings(folder: Path) -> Proven:
    """Read the verdicts in a folder's files `NAME.json`, the output of `prove --json`, by NAME.

    NAME is a release, or the name of a commit.

    Raises:
        ValueError: a file is not an output of `prove --json`, or the folder has no file.
    """
    proven: dict[str, dict[str, str]] = {}
    for file in sorted(folder.glob("*.json")):
        try:
            rows = json.loads(file.read_text(encoding="utf-8"))
            proven[file.stem] = {row["id"]: _word(row) for row in rows}
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file} is no output of `prove --json` ({error!r}); run `make matrix` again"
            ) from None
    if not proven:
        raise ValueError(f"{folder} holds no findings: run `make matrix`")
    return dict(sorted(proven.items(), key=lambda item: place(item[0])))


def merged(older: Proven, newer: Proven) -> Proven:
    """Merge two tables of verdicts, which map a release or commit to the verdicts by hazard id.
    Where both tables have a verdict, that of `newer` is taken.

    Hazards without a case file are left out.
    """
    rows = {name: {**older.get(name, {}), **newer.get(name, {})} for name in {**older, **newer}}
    findings = {
        name: {hazard: row[hazard] for hazard in sorted(row) if hazard in hazards()}
        for name, row in rows.items()
    }
    return dict(sorted(findings.items(), key=lambda item: place(item[0])))


def _word(row: Mapping[str, str]) -> str:
    if row["verdict"] != "not_applicable":
        return row["verdict"]
    return row["stock"].partition(":")[0]


def first_untried(releases: Sequence[Mapping[str, Any]]) -> str:
    """Return the release after the last one of the table: `0.20` if that is 0.19.2."""
    major, minor = releases[-1]["megatron"].split(".")[:2]
    return f"{major}.{int(minor) + 1}"


def naming_releases(
    texts: Mapping[Path, str], releases: Sequence[Mapping[str, Any]]
) -> dict[Path, str]:
    """Update the files that name the tested releases, such as README; return path → new text.
    The package's version is updated, too.

    Raises:
        ValueError: a text lacks the line that names them.
    """
    names = [release["megatron"] for release in releases]
    newest = names[-1]
    first = next(release["megatron"] for release in releases if release["training"])
    tested = f"Tested on megatron-core {', '.join(names[:-1])} and {newest} with torch"
    lines = {
        MAKEFILE: (r"(?m)^MEGATRON \?= .+$", f"MEGATRON ?= {newest}"),
        PROJECT: (
            r'"megatron-core\[training\]>=[^"]+"',
            f'"megatron-core[training]>={first},<{first_untried(releases)}"',
        ),
        CITATION: (r"(?m)^version: .+$", f"version: {__version__}"),
        README: (r"Tested on megatron-core [\d.,\sand]+ with\s+torch", tested),
    }
    renewed_naming = {}
    for path, text in texts.items():
        pattern, words = lines[path]
        renewed_naming[path], number = re.subn(pattern, words, text)
        if number != 1:
            raise ValueError(
                f"{path} has {number} places like {pattern}; 1 is to name the releases"
            )
    readme = renewed_naming[README]
    paragraph = next(text for text in readme.split("\n\n") if text.startswith(tested))
    wrapped = textwrap.fill(paragraph, _LINE, break_long_words=False, break_on_hyphens=False)
    renewed_naming[README] = readme.replace(paragraph, wrapped)
    return renewed_naming


def main(argv: Sequence[str], root: Path) -> int:
    """Rewrite the generated files in the repository at `root`; return the exit code."""
    import tomllib  # not in Python 3.10, which reads case files too

    parser = argparse.ArgumentParser(prog="python tools/casebook.py")
    parser.add_argument(
        "--proven", type=Path, metavar="FOLDER", help="a folder of NAME.json files to merge"
    )
    parser.add_argument(
        "--accept", action="append", default=[], metavar="ID", help="a patch that was read"
    )
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="a wheel, a source tree, or CLONE@COMMIT"
    )
    options = parser.parse_args(argv)
    folder = options.proven
    findings = root / GENERATED / PROVEN
    proven = json.loads(findings.read_text(encoding="utf-8"))
    if folder is not None:
        proven = merged(proven, read_findings(folder))
        rewrite(findings, f"{json.dumps(proven, indent=1)}\n")
    walked = json.loads((root / HISTORY).read_text(encoding="utf-8"))
    table = tomllib.loads((root / PROJECT).read_text(encoding="utf-8"))
    project = table["tool"]["megatron-idempotent"]
    naming = {path: (root / path).read_text(encoding="utf-8") for path in NAMING}
    renewed_naming = naming_releases(naming, project["releases"])
    # First, because the other files take the first untested release from the index.
    write(root / GENERATED, INDEX, index_of(hazards().values(), first_untried(project["releases"])))
    write(root / GENERATED, CONTRACTS, contract_lines(patches().values()))
    rewrite(root / "HAZARDS.md", hazards_markdown())
    rewrite(root / COMPATIBILITY, page(project, proven, walked))
    for path, text in renewed_naming.items():
        rewrite(root / path, text)
    needs = renewed(parsed(content(root / GENERATED, READS)), installed_trees())
    write(root / GENERATED, READS, lines_of(needs))
    if options.accept:
        drift(options.paths, as_json=False, with_diff=False, accepted=options.accept)
        # A new wrapper uses names that the file does not have yet.
        read = open_trees(map(Path, options.paths)) or installed_trees()
        needs = renewed(parsed(content(root / GENERATED, READS)), read, options.accept)
        write(root / GENERATED, READS, lines_of(needs))
        # The rest runs in another process: this one's patches have been loaded with old reviews.
        command = [sys.executable, __file__, *options.paths]
        return subprocess.run(command, cwd=root, check=False).returncode
    # With the installed release; else `apply()` would read the bodies of a new patch each time.
    installed = [t for t in installed_trees() if MEGATRON in t.versions and release_of(t)]
    trees = [*open_trees(map(Path, options.paths)), *installed]
    releases, texts = (content(root / GENERATED, name) for name in (TABLE, TEXTS))
    write(root / GENERATED, TABLE, renewed_table(releases, trees, needs))
    write(root / GENERATED, TEXTS, renewed_texts(texts, trees))
    newest = project["releases"][-1]["megatron"]
    text = (root / USE).read_text(encoding="utf-8")
    rewrite(root / USE, with_first_line(text, doctors_first_line(root), newest))
    return 0


def doctors_first_line(root: Path) -> str:
    """Return the first line that `doctor` of the repository at `root` prints here."""
    # In another process: this one has read the index before the update.
    command = [sys.executable, "-W", "ignore", "-m", "megatron_idempotent", "doctor"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(SWITCH)}
    doctor = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    return doctor.stdout.partition("\n")[0]


def with_first_line(text: str, line: str, newest: str) -> str:
    """Return the text of docs/use.md with another first line of `doctor`'s output.

    Args:
        text: the page.
        line: the new line. If it is not about the newest release, the page is unchanged.
        newest: the newest release.

    Raises:
        ValueError: the page lacks the line.
    """
    pattern = re.compile(r"(?m)^(    \$ megatron-idempotent doctor \| head -1\n    ).+$")
    if pattern.search(text) is None:
        raise ValueError(f"{USE} no longer shows `megatron-idempotent doctor | head -1`")
    if f" land on megatron-core {newest};" not in line:
        return text
    return pattern.sub(lambda match: match[1] + line, text)


_HEAD = """# Which framework gets what

<!-- Generated by `python tools/casebook.py`; do not edit. -->

We ran every hazard on each Megatron below on CPU ranks, stock and patched, and the frameworks' own
functions as [the recipes](recipes/index.md) say. Counted are the patches of megatron-core that are
on by default and whose hazard that Megatron has; `apply()` refuses one of them where it meets code
which nobody has read yet, or that lacks what the patch relies on. `megatron-idempotent doctor` says
the same of what is installed.
"""


def coverage(verdicts: Mapping[str, str]) -> tuple[int, list[str]]:
    """Return how many patches `apply()` installs on a Megatron, and the ids that it refuses there.

    Args:
        verdicts: the Megatron's verdicts by hazard, from proven.json.
    """
    patches = [h for h in hazards().values() if isinstance(h, Patch) and h.distribution == MEGATRON]
    words = {patch.id: verdicts.get(patch.id) for patch in patches if patch.default}
    applied = sum(word == "proven" for word in words.values())
    return applied, [id for id, word in words.items() if word in ("drifted", "unpatched")]


def page(
    project: Mapping[str, Any],
    proven: Mapping[str, Mapping[str, str]],
    walked: Mapping[str, Sequence[Mapping[str, Any]]],
) -> str:
    """Return the content of docs/compatibility.md.

    Args:
        project: the table `tool.megatron-idempotent` of pyproject.toml.
        proven: the verdicts, by release or name of a commit.
        walked: runs of commits by branch, from `history.runs`.

    Raises:
        ValueError: a framework uses a Megatron without verdicts, or names a hazard that does not
            exist.
    """
    commits = {commit["name"]: commit for commit in project["commits"]}
    rows = []
    for framework in project["frameworks"]:
        own_patches = framework.get("patches", ())
        unknown = sorted(set(own_patches) - set(hazards()))
        if unknown:
            raise ValueError(
                f"{framework['name']} names {', '.join(unknown)}, and there is no such hazard; "
                "correct it in pyproject.toml"
            )
        megatrons = []
        for name in framework["megatron"]:
            if name not in proven:
                raise ValueError(
                    f"{framework['name']} stands on {name}, which is none of {', '.join(proven)}: "
                    "add it to the releases or commits in pyproject.toml, and prove the hazards"
                    " on it"
                )
            commit = commits.get(name)
            megatron = f"{commit['commit'][:10]} ({commit['date']})" if commit else f"core {name}"
            applied, refused = coverage(proven[name])
            but = f", but {', '.join(map(_link, refused))}" if refused else ""
            megatrons.append(f"{megatron}: {applied} of {applied + len(refused)}{but}")
        links = ", ".join(map(_link, own_patches)) or "none needed"
        rows.append(_line([framework["name"], framework["version"], "; ".join(megatrons), links]))
    head = ["framework", "version", "its Megatrons: patches that land", "patches for its own code"]
    table = [_line(head), _line("---" for _ in head), *rows]
    return "\n".join([_HEAD, *table, "", _lost(project, proven), "", *_commits(walked)])


def _lost(project: Mapping[str, Any], proven: Mapping[str, Mapping[str, str]]) -> str:
    """Return a Markdown list of hazards with patches that `apply()` refuses on pinned Megatrons."""
    names = dict.fromkeys(name for entry in project["frameworks"] for name in entry["megatron"])
    refused = dict.fromkeys(id for name in names for id in coverage(proven[name])[1])
    if not refused:
        return "None is refused."
    lines = ["What a refused patch would have repaired:", ""]
    return "\n".join([*lines, *(f"- {_link(id)}: {hazards()[id].summary}" for id in refused)])


def _commits(walked: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Yield the page's lines about the commits of each branch: how many patches would be installed.
    A table lists the patches that `apply()` would refuse on some commits.
    """
    yield from _ALL_COMMITS
    for branch, runs in walked.items():
        number = sum(run["commits"] for run in runs)
        complete = sum(run["commits"] for run in runs if not run["refused"])
        landed = sum(run["commits"] * run["landed"] for run in runs)
        refused = sum(run["commits"] * len(run["refused"]) for run in runs)
        yield (
            f"- {branch}, {number} commits from {runs[0]['since']} to {runs[-1]['until']}: on "
            f"{complete / number:.1%} of them all patches land that such a commit needs. On "
            f"average {landed / (landed + refused):.2%} of a commit's patches land"
        )
    counts: dict[str, list[Mapping[str, Any]]] = {}
    for run in (run for runs in walked.values() for run in runs):
        for hazard_id in run["refused"]:
            counts.setdefault(hazard_id, []).append(run)
    if counts:
        yield from ("", "Refused somewhere:", "", "| patch | commits | first | last |")
        yield "| --- | --- | --- | --- |"
    for hazard_id, refusing in counts.items():
        number = sum(run["commits"] for run in refusing)
        first, last = min(r["since"] for r in refusing), max(r["until"] for r in refusing)
        yield _line([_link(hazard_id), str(number), first, last])
    yield ""


_ALL_COMMITS = (
    "## Any other commit",
    "",
    "Frameworks pin commits between these. `python tools/history.py CLONE` reads each",
    "commit of main and dev in a clone, and says which patches `apply()` would install on it. Red",
    "lines mark the commits that frameworks pin, and the dotted one is 99 %.",
    "",
    "![Share of the patches that land, by the day of the commit](assets/history.svg)",
    "",
)


def _link(hazard_id: str) -> str:
    return f"[`{hazard_id}`](../HAZARDS.md#{hazard_id})"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], _checkout.ROOT))
