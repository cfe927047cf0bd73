"""Docstrings begin with a sentence that is understood without the code, not with half of one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_idempotent"
ROOMS = {
    "the root": [*PACKAGE.glob("*.py")],
    **{path.parent.name: [*path.parent.rglob("*.py")] for path in PACKAGE.glob("*/__init__.py")},
    **{path.parent.name: [*path.parent.rglob("*.py")] for path in PACKAGE.glob("*/*/__init__.py")},
    **{
        name: [*(ROOT / name).rglob("*.py")] for name in ("patches", "tools", "benchmarks", "tests")
    },
}
#: A docstring that begins so needs the name above it, or the code below, to be understood.
FIRST = re.compile(
    r"(Of|What|Whether|Where|That|As|Whoever|Whose|Which|Who|How|When|If|Behind|For|To|By|In|On|With"
    r"|At|From|Those|So)\b"
)
#: A function does something, so that its docstring begins with a verb, and with neither a name in
#: backticks or brackets nor an example. ruff's D401 wants the imperative of it. A property may be a
#: noun.
NO_VERB = re.compile(
    r"(The|A|An|All|One|Its|Every|Each|Both|Two|Some|Another|Around|Before|After|Until|Windows|Steps"
    r"|This|Not|No|Nothing|Inside|Why)\b|Example:|Errors:|[^A-Z]"
)
#: Rooms whose functions are not held to it yet.
NOUNS_ALLOWED = {"benchmarks", "tests"}
#: "again" and "after" are the words; an engine that falls behind does so in other words, too.
WORDS = re.compile(r"\b(anew|whoever|behind)\b", re.IGNORECASE)


def nodes(path: Path) -> list[ast.AST]:
    """List a file's statements and the file itself."""
    found: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    for node in found:  # grows
        inner = (ast.stmt, ast.ExceptHandler, ast.match_case)
        found += [each for each in ast.iter_child_nodes(node) if isinstance(each, inner)]
    return found


def docstrings(statements: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """The line and text of each docstring, and of each string that documents a field."""
    for node in statements:
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(ast.Constant(str(text))):
                    yield statement.lineno, text.strip()


def faults(path: Path, *, verbs: bool) -> list[str]:
    """List what is wrong with a file's docstrings; with `verbs`, with those of its functions."""
    statements = nodes(path)
    found = functions_without_a_verb(path.name, statements) if verbs else []
    for line, text in docstrings(statements):
        # A case file begins with what a user would say: "With overlap_param_gather, …".
        if FIRST.match(text) and not ("patches" in path.parts and text.startswith("With ")):
            found.append(f"{path.name}:{line} begins with {text.split()[0]!r}: say it with a verb")
        # Names in backticks are what they are.
        found += [
            f"{path.name}:{line} says {word!r}" for word in WORDS.findall(re.sub("`.*?`", "", text))
        ]
    return found


def functions_without_a_verb(name: str, statements: list[ast.AST]) -> list[str]:
    """List the functions whose docstring begins with something else than a verb."""
    return [
        f"{name}:{node.lineno} {node.name} begins without a verb"
        for node in statements
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and NO_VERB.match(ast.get_docstring(node) or "Verb")
        and not any("property" in ast.unparse(each) for each in node.decorator_list)
    ]


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_docstrings_are_sentences(room):
    verbs = room not in NOUNS_ALLOWED
    assert not [fault for path in ROOMS[room] for fault in faults(path, verbs=verbs)]


def test_the_rule_sees_what_it_is_to_see(tmp_path):
    file = tmp_path / "one.py"
    file.write_text(
        '"""Of each token."""\nclass A:\n    x = 1\n    """Made anew, unlike `behind`."""\n'
        '    def f(self):\n        """`f` of it."""\n'
        '    def g(self):\n        """Example: `g()`."""\n'
        '    def h(self):\n        """Return it."""\n'
        '    @property\n    def i(self):\n        """[N]"""\n'
    )
    said = ["one.py:1 begins with 'Of': say it with a verb", "one.py:4 says 'anew'"]
    without = [f"one.py:{line} begins without a verb" for line in ("5 f", "7 g")]
    assert faults(file, verbs=False) == said
    assert faults(file, verbs=True) == [*without, *said]
