"""Pages have each variable that is read, status and error; of models, tests that there are."""

from __future__ import annotations

import ast
import builtins
import re

from package import PACKAGE, ROOT, trees

from megatron_idempotent.patching import settings

ENVIRONMENT = (ROOT / "docs" / "environment.md").read_text("utf-8")
VARIABLES = dict(re.findall(r"^\| `([A-Z_]+)` \| ([^|]+) \|", ENVIRONMENT, re.MULTILINE))
#: Set whatever the caller has, or Python's own.
NOT_TOLD = {"PYTHONWARNINGS", "PYTHONPATH", "PYTHONHASHSEED", "KINETO_LOG_LEVEL"}


def test_the_page_has_the_variables_of_the_code_and_no_others():
    text = "\n".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))
    read = set(re.findall(r'environ(?:\.\w+\(|\[)\s*"([A-Z_]+)"', text))
    read |= set(re.findall(r'"([A-Z_]+)" in os\.environ', text))
    named = set(re.findall(r'^ *[A-Z_, ]+ = (".*")$', text, re.MULTILINE))
    read |= {name for each in named for name in re.findall(r'"([A-Z]+_[A-Z_]+)"', each)}
    ours = {*settings.VARIABLES, *settings._ELSEWHERE}
    assert {*VARIABLES} == read - NOT_TOLD | ours


def test_the_page_has_the_defaults():
    default = settings.read((), {})
    values = {
        "": default.enabled,
        "_CHECK": default.debug,
        "_STRICT": default.strict,
        "_VERIFY": default.verify_within,
        "_DISABLE": default.disable,
        "_ONLY": default.only,
        "_REBIND": default.rebind,
        "_REPORT": default.report_path,
    }
    assert {f"{settings.SWITCH}{rest}" for rest in values} == {*settings.VARIABLES}
    for rest, value in values.items():
        shown = "unset" if value is None or value == frozenset() else f"`{value:g}`"
        assert VARIABLES[f"{settings.SWITCH}{rest}"] == shown


def test_a_user_learns_what_to_do_about_each_status_and_each_error():
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    source = (PACKAGE / "patching" / "rows.py").read_text("utf-8")
    statuses = re.findall(r'"(\w+)"', source.partition("Status = Literal[")[2].partition("]")[0])
    assert len(statuses) == 11
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for tree in trees().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }

    def raised(name):
        known = getattr(builtins, name, None)
        if name not in bases:
            return isinstance(known, type) and issubclass(known, BaseException)
        return any(map(raised, bases[name]))

    listed = "\n".join(each.read_text("utf-8") for each in (ROOT / "docs" / "api").glob("*.md"))
    entries = re.findall(r"^::: \S+\.(\w+)$", listed, re.MULTILINE)
    errors = {name for name in entries if name in bases and raised(name)}
    assert len(errors) > 40
    assert not {name for name in {*statuses, *errors} if f"`{name}`" not in page}


MODELS = (ROOT / "docs" / "supported-models.md").read_text(encoding="utf-8")
STATES = {"yes", "refused", "unknown", "–", "no layout", "stand-in", "export only"}
#: States that say more than one word.
LONGER = {
    *("yes, not on the output layer", "refused in part", "inputs only"),
    *("Qwen3-MoE", "`FSDPTrainStep`", "[factors alone](weight-sync.md)"),
}


def rows() -> list[list[str]]:
    lines = [line for line in MODELS.splitlines() if line.startswith("| [")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_each_feature_has_a_state_in_each_part_and_a_section():
    titles = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"(?m)^## (.+)$", MODELS)
    }
    assert len(rows()) > 15
    for feature, *states in rows():
        assert len(states) == 6
        assert set(states) <= STATES | LONGER, feature
        assert feature.rpartition("(#")[2].rstrip(")") in titles


def test_each_test_that_shows_something_is_there():
    named = re.findall(r"\]\(\.\./(tests/[^)#]+)\)", MODELS)
    assert len(set(named)) > 25
    assert not [path for path in named if not (ROOT / path).is_file()]


def test_an_error_that_is_quoted_is_one_of_the_code():
    quoted = {" ".join(each.split()) for each in re.findall(r'(?<!`)"([^"`]{12,})"', MODELS)}
    literals = [
        node.value
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    text = "\n".join(literals)
    assert len(quoted) > 10
    assert not {message for message in quoted if message not in text}
