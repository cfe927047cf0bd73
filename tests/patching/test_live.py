"""The function that runs against the source that was read, and what others put in its place."""

from __future__ import annotations

import importlib
import importlib.util
import os
import py_compile
import sys
from pathlib import Path
from unittest import mock

import pytest
from toys import GREET

from megatron_idempotent import report, revert
from megatron_idempotent.patching import source as reading
from megatron_idempotent.patching.source import difference, parse_body

pytestmark = pytest.mark.full

ADDRESS = "toy_up.greet:greet"
OTHERS = {
    "a lambda": GREET + "greet = lambda name: 'hi'\n",
    "another definition": GREET + "def other(name):\n    return f'hello {name}'\ngreet = other\n",
    "a dead copy after it": GREET + "if False:\n    def greet(name):\n        return name\n",
    "an earlier definition": GREET + "first = greet\n" + GREET + "greet = first\n",
    "an equal function of the same name": "def make():\n    def greet(name):\n"
    "        return f'hello {name}'\n    return greet\n" + GREET + "greet = make()\n",
    "a partial": GREET + "import functools\ngreet = functools.partial(greet)\n",
}
#: What the source alone says of two of them, before anything is imported.
SEEN_IN_SOURCE = {
    "an earlier definition": "toy_up.greet holds greet a second time, at `first = greet`",
    "a partial": "toy_up.greet holds greet a second time, at `greet = functools.partial(greet)`",
}


@pytest.fixture
def greet(toys):
    def imported(source: str = GREET):
        path = toys.greet(source)
        return importlib.import_module("toy_up.greet"), path

    return imported


@pytest.mark.parametrize("other", OTHERS)
def test_a_function_that_is_not_the_one_that_was_read_is_left_alone(greet, toys, other):
    module, _ = greet(OTHERS[other])
    live = module.greet
    row = toys.apply()["toy-a"]
    assert row.status == ("drifted" if other in SEEN_IN_SOURCE else "conflict")
    assert row.reason.startswith(SEEN_IN_SOURCE.get(other, f"{ADDRESS} is "))
    assert module.greet is live


@pytest.mark.parametrize("compiled", [False, True])
def test_where_another_definition_begins_is_said(greet, toys, compiled):
    _, path = greet(OTHERS["a dead copy after it"])
    if compiled:  # the compiler drops the copy, and what is kept of the file has the live one alone
        py_compile.compile(str(path))
    reason = toys.apply()["toy-a"].reason
    assert "greet.py:1, and the source that was read begins at line 4" in reason


@pytest.mark.parametrize(
    "edit", ["name if name else name", "not name", "f'hello {name:}'", "f'hallo {name}'"]
)
def test_a_file_that_was_edited_after_its_import_is_not_what_runs(greet, toys, edit):
    module, path = greet()
    live = module.greet
    path.write_text(GREET.replace("f'hello {name}'", edit))
    row = toys.apply()["toy-a"]
    assert row.status == "conflict"
    assert "greet.py:1 says: it was compiled from other source" in row.reason
    path.write_text(GREET + "# and a remark\n")
    assert toys.apply()["toy-a"].status == "applied"
    assert module.greet is not live


def test_what_the_interpreter_keeps_is_not_compiled_again(greet, toys, monkeypatch):
    module, path = greet()
    py_compile.compile(str(path))
    body = parse_body(GREET, "greet")
    monkeypatch.setattr(reading, "imports_of", None)  # which compiling takes first
    assert difference(module.greet.__code__, body, "greet") is None
    cached = Path(importlib.util.cache_from_source(str(path)))
    cached.write_bytes(cached.read_bytes()[:-9])  # half-written
    os.utime(path, (1, 1))
    difference.cache_clear()
    with pytest.raises(TypeError):
        difference(module.greet.__code__, body, "greet")


@pytest.mark.parametrize(
    "source",
    [
        "from __future__ import annotations\nimport os.path as p\n"
        + GREET.replace("f'", "p.sep + f'"),
        "try:\n    import json\nexcept ImportError:\n    json = None\n"
        "def greet(\n    name,\n):\n    return json.dumps(name)\n",
        "'''\nimport nothing (really\n'''\nfrom os import (\n    path,  # (why)\n    sep,\n)\n"
        "def greet(name):\n    import string\n    return string.capwords(path.join(name, sep))\n",
        "import string\ndef other(\n    name,\n):\n    import json as string\n"
        "def greet(name: int = 3, *, loud: bool = True) -> str:\n    '''Say.'''\n"
        "    def inner(x: str = 'a') -> str:\n        return string.capwords(x)\n"
        "    assert name, 'who'\n"
        "    return inner(str(name)) if name in {1, 2, 'a'} else f'{name!r:>9}'\n",
    ],
)
def test_what_was_compiled_from_its_file_is_known_in_any_context(greet, toys, source):
    greet(source)
    row = toys.apply()["toy-a"]
    assert row.status == "applied", row.reason


METHODS = """
import functools

class Base:
    def method(self, name):
        return name

class Thing(Base):
    __tag = "tag"
    def method(self, name):
        return super().method(name) + self.__tag
    @staticmethod
    def static(name):
        return __class__.__name__ + name
    @functools.lru_cache
    def cached(self, name):
        return name
    class Inner:
        def method(self, name):
            return self.__name
"""


def test_methods_are_compared_in_their_classes(toys):
    toys.write("toy_up.greet", METHODS)
    thing = importlib.import_module("toy_up.greet").Thing
    live = {
        "Thing.method": thing.method,
        "Thing.static": thing.static,
        "Thing.cached": thing.cached.__wrapped__,
        "Thing.Inner.method": thing.Inner.method,
    }
    for qualname, function in live.items():
        body = parse_body(METHODS, qualname)
        assert difference(function.__code__, body, qualname) is None
        for other in set(live) - {qualname}:
            assert difference(live[other].__code__, body, qualname) is not None


def test_a_function_without_docstrings_and_assertions_is_still_its_own(toys):
    # As under -OO, where the interpreter compiles what it reads in the same way.
    path = toys.greet("def greet(name):\n    '''Say.'''\n    assert name\n    return 1\n")
    spec = importlib.util.spec_from_file_location("toy_up.greet", path)
    module = importlib.util.module_from_spec(spec)
    exec(compile(path.read_text(), path, "exec", optimize=2), vars(module))
    sys.modules["toy_up.greet"] = module
    row = toys.apply()["toy-a"]
    assert row.status == ("applied" if sys.flags.optimize == 2 else "conflict")


def test_a_mock_that_outlives_the_patches_leaves_our_function_and_the_report_says_so(greet, toys):
    module, _ = greet()
    upstream = module.greet
    toys.apply()
    ours = module.greet
    standing = mock.patch.object(module, "greet")
    standing.start()
    row = revert()["toy-a"]
    assert row.status == "disabled"
    assert f"reverted; {ADDRESS} is a unittest.mock.MagicMock by now" in row.reason
    assert "puts back our function, which does nothing" in row.reason
    assert report()["toy-a"] == row
    standing.stop()
    assert module.greet is ours
    assert module.greet("x") == upstream("x")
    row = report()["toy-a"]
    assert row.status == "disabled"
    assert f"reverted; somebody has put our function back at {ADDRESS}" in row.reason
    revert()
    assert module.greet is upstream
    assert report()["toy-a"].reason == "reverted"


def test_a_function_that_a_mock_has_put_back_is_used_again(greet, toys):
    module, _ = greet()
    early = sys.modules["toy_up"]
    early.greet_too = upstream = module.greet
    toys.apply()
    ours = module.greet
    with mock.patch.object(module, "greet"):
        revert()
    assert early.greet_too is upstream
    assert toys.apply()["toy-a"].status == "applied"
    assert module.greet is early.greet_too is ours
    assert module.greet("x") == "hello x!"
    assert toys.apply()["toy-a"].status == "already_applied"
    revert()
    assert module.greet is early.greet_too is upstream


def test_a_mock_within_the_life_of_the_patches_changes_nothing(greet, toys):
    module, _ = greet()
    upstream = module.greet
    toys.apply()
    with mock.patch.object(module, "greet"):
        assert report()["toy-a"].status == "conflict"
    assert report()["toy-a"].status == "applied"
    assert revert()["toy-a"].reason == "reverted"
    assert module.greet is upstream
