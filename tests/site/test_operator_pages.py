"""The pages for operators have each variable that is read, each status and each error."""

import ast
import builtins
import re
from pathlib import Path

from megatron_idempotent.patching import settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "environment.md").read_text("utf-8")
ROWS = dict(re.findall(r"^\| `([A-Z_]+)` \| ([^|]+) \|", PAGE, re.MULTILINE))
#: Set whatever the caller has, or Python's own.
NOT_TOLD = {"PYTHONWARNINGS", "PYTHONPATH", "KINETO_LOG_LEVEL"}


def test_the_page_has_the_variables_of_the_code_and_no_others():
    sources = [path.read_text("utf-8") for path in (ROOT / "megatron_idempotent").rglob("*.py")]
    text = "\n".join(sources)
    read = set(re.findall(r'environ(?:\.\w+\(|\[)\s*"([A-Z_]+)"', text))
    read |= set(re.findall(r'"([A-Z_]+)" in os\.environ', text))
    named = set(re.findall(r'^ *[A-Z_, ]+ = (".*")$', text, re.MULTILINE))
    read |= {name for each in named for name in re.findall(r'"([A-Z]+_[A-Z_]+)"', each)}
    ours = {*settings.VARIABLES, *settings._ELSEWHERE}
    assert {*ROWS} == read - NOT_TOLD | ours


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
        "_RUN": default.run_folder,
    }
    assert {f"{settings.SWITCH}{rest}" for rest in values} == {*settings.VARIABLES}
    for rest, value in values.items():
        shown = "unset" if value is None or value == frozenset() else f"`{value:g}`"
        assert ROWS[f"{settings.SWITCH}{rest}"] == shown


def test_a_user_learns_what_to_do_about_each_status_and_each_error():
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    source = (ROOT / "megatron_idempotent" / "patching" / "report.py").read_text("utf-8")
    statuses = re.findall(r'"(\w+)"', source.partition("Status = Literal[")[2].partition("]")[0])
    assert len(statuses) == 11
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for path in (ROOT / "megatron_idempotent").rglob("*.py")
        for node in ast.parse(path.read_text("utf-8")).body
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
