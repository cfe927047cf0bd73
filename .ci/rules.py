"""Checks what no linter knows of this repository: docstrings, pages, releases, the lock, workflows.

    python .ci/rules.py

`make lint` runs it. It prints a line per fault, and its exit code is 1 if there is one. A rule is a
function that yields faults; each takes the folder of the project, so that a test can plant one.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tomllib
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

Rule = Callable[[Path], Iterator[str]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Register a function in `RULES`, all of which `main` runs. It is a decorator."""
    RULES.append(function)
    return function


def text_of(root: Path, name: str) -> str:
    """Return the text of one of the project's files."""
    return (root / name).read_text("utf-8")


def sources(root: Path, *folders: str) -> Iterator[Path]:
    """Yield the paths of all Python files in `folders`, which are relative to `root`, and in their
    subfolders.
    """
    for folder in folders:
        yield from sorted((root / folder).rglob("*.py"))


def project(root: Path) -> dict[str, Any]:
    """Return the parsed contents of pyproject.toml."""
    return tomllib.loads(text_of(root, "pyproject.toml"))


def table(root: Path) -> dict[str, Any]:
    """Return pyproject.toml's table `tool.megatron-idempotent`, such as the releases and commits of
    Megatron to test with.
    """
    return project(root)["tool"]["megatron-idempotent"]  # type: ignore[no-any-return]


def pages(root: Path) -> list[Path]:
    """Return the paths of the documentation's Markdown pages and of README.md."""
    return sorted([*(root / "docs").rglob("*.md"), root / "README.md"])


#: A docstring that begins so needs the name above it, or the code below, to be understood.
HALF_SENTENCE = re.compile(
    r"(Of|What|Whether|Where|That|As|Whoever|Whose|Which|Who|How|When|If|Behind|For|To|By|In|On|With"
    r"|At|From|Those|So)\b"
)
#: A function does something: its docstring begins with a verb. A property may be a noun.
NO_VERB = re.compile(
    r"(The|A|An|All|One|Its|Every|Each|Both|Two|Some|Another|Around|Before|After|Until|Windows|Steps"
    r"|This|Not|No|Nothing|Inside|Why)\b|Example:|Errors:|[^A-Z]"
)
#: "again" and "after" are the words; an engine that falls behind does so in other words, too.
WORDS = re.compile(r"\b(anew|whoever|behind)\b", re.IGNORECASE)


@rule
def docstrings_are_sentences(root: Path) -> Iterator[str]:
    """Yield docstrings that begin like half of a sentence, and functions' docstrings that begin
    without a verb.
    """
    for path in sources(root, "megatron_idempotent", "patches", "tools", "benchmarks", "tests"):
        place = path.relative_to(root)
        verbs = place.parts[0] not in ("benchmarks", "tests")
        statements: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
        for node in statements:  # it grows while it is read
            inner = (ast.stmt, ast.ExceptHandler, ast.match_case)
            children = ast.iter_child_nodes(node)
            statements += [child for child in children if isinstance(child, inner)]
            if (
                verbs
                and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and NO_VERB.match(ast.get_docstring(node) or "Verb")
                and not any("property" in ast.unparse(line) for line in node.decorator_list)
            ):
                yield f"{place}:{node.lineno} {node.name} begins without a verb"
            body = getattr(node, "body", None)
            for statement in body if isinstance(body, list) else ():
                match statement:
                    case ast.Expr(ast.Constant(str(text))):
                        where, text = f"{place}:{statement.lineno}", text.strip()
                        # A case file begins with what a user would say: "With overlap_…, …".
                        case_file = "patches" in place.parts and text.startswith("With ")
                        if HALF_SENTENCE.match(text) and not case_file:
                            yield f"{where} begins with {text.split()[0]!r}: say it with a verb"
                        for word in WORDS.findall(re.sub("`.*?`", "", text)):
                            yield f"{where} says {word!r}"


@rule
def the_map_shows_what_is_there(root: Path) -> Iterator[str]:
    """Yield a text for each difference between CONTRIBUTING.md's map and the source tree: a file in
    the table `question | file` that does not exist, a folder of the package that the diagram of the
    three wings lacks, and a folder that only one of the drawn tree and the package has.
    """
    package, page = root / "megatron_idempotent", text_of(root, "CONTRIBUTING.md")
    rows = page.split("| question | file |\n|---|---|\n")[1].split("\n\n")[0].splitlines()
    for row in rows:
        folder = package
        for name in re.findall(r"`([^`]+)`", row.strip("|").split("|")[1]):
            # One without a folder is beside the one before it.
            path = package / name if "/" in name else folder / name
            folder = path.parent
            if not path.exists():
                yield f"CONTRIBUTING.md's map names {path.relative_to(root)}, which is not there"
    wings = package, package / "proof", package / "rl"
    rooms = {path.parent.name for wing in wings for path in wing.glob("*/__init__.py")}
    picture = page.split("The package has three wings:")[1].split("Imports point to")[0]
    for room in sorted(room for room in rooms if not re.search(rf"\b{room}\b", picture)):
        yield f"CONTRIBUTING.md's picture of the wings lacks {room}"
    drawn = page.split("    megatron_idempotent/\n")[1].split("    patches/")[0]
    for room in sorted(rooms ^ {*re.findall(r"^ +([a-z0-9]+)/", drawn, re.MULTILINE)}):
        yield f"CONTRIBUTING.md's tree and the package differ in {room}"


SHIM = ("patching", "megatron", "window", "step", "logprobs", "fp8")


def code_lines(path: Path) -> int:
    """Return the number of a file's lines without blanks, docstrings and comments."""
    kinds = "COMMENT", "DEDENT", "ENDMARKER", "INDENT", "NEWLINE", "NL"
    with tokenize.open(path) as file:
        lines = {
            line
            for token in tokenize.generate_tokens(file.readline)
            if tokenize.tok_name[token.type] not in kinds
            for line in range(token.start[0], token.end[0] + 1)
        }
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= {*range(node.lineno, (node.end_lineno or 0) + 1)}
    return len(lines)


@rule
def readme_says_how_large_each_part_is(root: Path) -> Iterator[str]:
    """Yield the rows of README's table of sizes (the shim, `proof/`, `rl/`) whose number of files
    or of lines of code differs from the true number by more than a tenth.
    """
    package = root / "megatron_idempotent"
    shim = [*package.glob("*.py"), *sources(root, "patches"), *sources(package, *SHIM)]
    parts = {
        "the shim": [path for path in shim if path.name not in ("__main__.py", "settings.py")],
        "`proof/`": [*sources(package, "proof")],
        "`rl/`": [*sources(package, "rl")],
    }
    for part, paths in parts.items():
        size = len(paths), sum(map(code_lines, paths))
        numbers = rf"(?m)^\| {re.escape(part)} \|.*\| ([\d,]+) \| ([\d,]+) \|$"
        row = re.search(numbers, text_of(root, "README.md"))
        written = [int(number.replace(",", "")) for number in row.groups()] if row else [0, 0]
        if any(abs(a - b) > 0.1 * b for a, b in zip(written, size, strict=True)):
            yield f"README.md says {written} files and lines of {part}, there are {[*size]}"


#: Modules that a block may name, and public names of ours that blocks take for a reader's own.
MODULES = {"asyncio", "megatron_idempotent", "parallel_state", "torch", "TransformerConfig"}
READERS = {"layout", "step", "train"}


@rule
def blocks_import_what_they_name(root: Path) -> Iterator[str]:
    """Yield names of this package, torch or Megatron that a Python block of a Markdown page uses,
    but neither that block nor an earlier one of the page imports or defines.
    """
    stubs = (root / "megatron_idempotent").rglob("__init__.pyi")
    lines = (line.split() for stub in stubs for line in stub.read_text().splitlines())
    names = {words[3] for words in lines if words[:1] == ["from"]} | MODULES
    for page in pages(root):
        known = set(READERS)
        for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            read = set()
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.Name):
                    (read if isinstance(node.ctx, ast.Load) else known).add(node.id)
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    known.add(node.name)
                elif isinstance(node, ast.arg):
                    known.add(node.arg)
                elif isinstance(node, ast.Import | ast.ImportFrom):
                    known |= {(a.asname or a.name).partition(".")[0] for a in node.names}
            for name in sorted((read & names) - known):
                yield f"{page.relative_to(root)}: a block uses {name}, and no block imports it"


@rule
def releases_are_those_of_the_table(root: Path) -> Iterator[str]:
    """Yield differences between pyproject.toml's table of releases, torches and Pythons and the
    files that name them.
    """
    wanted, releases_table = project(root), table(root)
    releases = [release["megatron"] for release in releases_table["releases"]]
    torches = [*(each["torch"] for each in releases_table["torches"]), releases_table["torch"]]
    for versions in (releases, torches):
        minors = [Version(version).minor for version in versions]
        if minors != [*range(minors[0], minors[0] + len(minors))]:
            yield f"pyproject.toml: {versions} are not one of each line, in order"
    newest = {release.rpartition(".")[0]: Version(release) for release in releases}
    for version in releases_table["read"]:
        if not Version(version) < newest[version.rpartition(".")[0]]:
            yield f"pyproject.toml: {version} is read and not older than the release of its line"
    if f"TORCH ?= {releases_table['torch']}\n" not in text_of(root, "Makefile"):
        yield f"Makefile: TORCH is not {releases_table['torch']}"
    last = Version(releases_table["torch"])
    (torch,) = (
        Requirement(text)
        for text in wanted["project"]["optional-dependencies"]["trainer"]
        if text.startswith("torch")
    )
    if f"{last.major}.{last.minor + 1}.0" in torch.specifier or str(last) not in torch.specifier:
        yield f"pyproject.toml: the extra `trainer` takes {torch}, and {last} is the last that ran"
    proven = [*json.loads(text_of(root, "patches/_generated/proven.json"))]
    if proven != [*releases, *sorted(commit["name"] for commit in releases_table["commits"])]:
        yield f"patches/_generated/proven.json is of {proven}: run `make matrix` and `make pins`"
    pythons = {row["python"] for row in releases_table["releases"]}
    pythons |= {version for row in releases_table["releases"] for version in row.get("also", ())}
    promised = re.findall(r"Python :: (\d\.\d+)", "\n".join(wanted["project"]["classifiers"]))
    if not pythons <= {*promised}:
        yield f"pyproject.toml promises Python {promised}, and tests {sorted(pythons)}"
    if releases_table["patching"] != [promised[0], promised[-1]]:
        yield f"pyproject.toml: patching is not tested on Python {promised[0]} and {promised[-1]}"
    if wanted["project"]["requires-python"] != f">={promised[0]}":
        yield f"pyproject.toml: requires-python is not >={promised[0]}"
    *older, latest = sorted(pythons, key=Version)
    tested = f"{', '.join(releases[:-1])} and {releases[-1]} with torch {releases_table['torch']}"
    oldest, newest_torch = (torch.rpartition(".")[0] for torch in (torches[0], torches[-1]))
    of_fsdp = f"torch from {oldest} to {newest_torch}"
    sentences = [
        ("README.md", f"megatron-core {tested} on Python {', '.join(older)} and {latest}"),
        ("README.md", f"`FSDPTrainStep` on torch {torches[0]} to {torches[-1]}"),
        ("docs/train-step/fsdp2.md", of_fsdp),
        ("megatron_idempotent/step/fsdp_run.py", of_fsdp),
    ]
    sentences += [
        ("README.md", f"with torch {row['torch']} on Python {' and '.join(row['suites'])}")
        for row in releases_table["torches"]
        if "suites" in row
    ]
    for place, sentence in sentences:
        if sentence not in " ".join(text_of(root, place).replace('"', "").split()):
            yield f"{place} lacks: {sentence}"
    extras = wanted["project"]["optional-dependencies"]
    section = text_of(root, "docs/use.md").partition("## Install\n")[2].partition("\n## ")[0]
    for extra in extras:
        if not re.search(rf"(?m)^\| [^|]*`{extra}`", section):
            yield f"docs/use.md lacks the extra `{extra}` in its table of the install"


@rule
def the_lock_has_what_is_asked_for_and_its_hashes(root: Path) -> Iterator[str]:
    """Yield faults of the lock file: missing dependencies, packages without a hash, and paths that
    exist on one machine only.
    """
    lock, wanted = text_of(root, "requirements/dev.lock"), project(root)
    files = re.sub(r"\n +#.*", "", lock)  # without what asks for a file
    pins = dict(re.findall(r"(?m)^([^=\s]+)==(\S+)", files))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    asked = [*wanted["project"]["dependencies"], f"torch=={table(root)['torch']}"]
    asked.append(f"megatron-core=={table(root)['releases'][-1]['megatron']}")
    for extra in ("trainer", "controller"):
        asked += wanted["project"]["optional-dependencies"][extra]
    for group in wanted["dependency-groups"].values():
        asked += [requirement for requirement in group if isinstance(requirement, str)]
    # The machine that the lock is made for: `--python-version 3.12 --python-platform linux`.
    machine = {"python_version": "3.12", "python_full_version": "3.12.0", "sys_platform": "linux"}
    for requirement in map(Requirement, asked):
        if requirement.name == wanted["project"]["name"]:
            continue
        if requirement.marker is None or requirement.marker.evaluate(machine):
            version = pins.get(canonicalize_name(requirement.name))
            if not (version and requirement.specifier.contains(version, prereleases=True)):
                yield f"requirements/dev.lock has {version} for {requirement}: make lock"
    hashes = re.compile(r"( \\\n    --hash=sha256:[0-9a-f]{64})+")
    for name, rest in re.findall(r"(?m)^(\S+==\S+)(.*(?:\n    .*)*)$", files):
        if not hashes.fullmatch(rest):
            yield f"requirements/dev.lock has no hash for {name}: make lock"
    if re.search(r"(?m)^-|file:|https?:|@ ", lock) or "/" in lock.replace("(pyproject.toml", ""):
        yield "requirements/dev.lock names a path or an index, which other machines do not have"


@rule
def workflows_run_all_tests(root: Path) -> Iterator[str]:
    """Yield test files that no CI job runs or that several run, and commands of .ci/run that no CI
    job runs.
    """
    jobs = yaml.safe_load(text_of(root, ".github/workflows/ci.yml"))["jobs"]
    shards = []
    for wing in jobs["wing"]["strategy"]["matrix"]["wing"]:
        command = [
            "make",
            "--no-print-directory",
            "--dry-run",
            "--always-make",
            "test-all",
            f"WING={wing}",
            "ARGS=",
        ]
        # A make above this one hands its own variables down, in MAKEFLAGS and in the environment.
        env = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
        how = {"capture_output": True, "text": True, "check": True, "env": env}
        printed = subprocess.run(command, cwd=root, **how)
        shards.append(shlex.split(printed.stdout.splitlines()[-1].partition("--durations=40")[2]))
    weekly = yaml.safe_load(text_of(root, ".github/workflows/weekly.yml"))["jobs"]
    hours = [row["tests"].split() for row in weekly["exhaustive"]["strategy"]["matrix"]["include"]]
    hours.append(["tests/downstream"])  # which has a job of its own
    for path in sources(root, "tests"):
        name = path.relative_to(root)
        for kind, folders, applies in (
            ("wings of ci.yml", shards, path.name.startswith("test_") and name.parts[1] != "gpu"),
            ("shards of weekly.yml", hours, "mark.exhaustive" in path.read_text("utf-8")),
        ):
            count = sum(any(name.is_relative_to(folder) for folder in row) for row in folders)
            if applies and count != 1:
                yield f"{name} is in {count} {kind}, and has to be in one"
    commands = {step.get("run") for job in jobs.values() for step in job.get("steps", ())}
    gate = text_of(root, ".ci/run")
    for target in re.findall(r"(?m)^make (lint|test(?:-numerics| LIMIT=9)|gate)\b", gate):
        if f"make {target}" not in commands:
            yield f".ci/run has `make {target}`, and no job of ci.yml does"


def main(root: Path) -> int:
    """Print the faults of all rules, and return the exit code."""
    faults = [f"{fault} ({function.__name__})" for function in RULES for fault in function(root)]
    print("\n".join(faults) or f"{len(RULES)} rules hold")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1]))
