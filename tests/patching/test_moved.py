"""Code that upstream has moved is patched where it is, and taking a text away is no repair."""

from __future__ import annotations

import importlib

import pytest
from toys import GREET

from megatron_idempotent import revert
from megatron_idempotent.patching import no_body_has

CLASS = """
class Speaker:
    def greet(self, name):
        return f'hello {name}'
"""
OTHER, BASE = CLASS.replace("Speaker", "Other"), CLASS.replace("Speaker", "Base")


@pytest.mark.parametrize(
    "binding",
    [
        "from toy_up.inner import greet\n",
        "from .inner import greet as greet\n",
        "from toy_up.inner import *\n",
        "from toy_up.inner import greet as _greet\ngreet = _greet\n",
        "try:\n    import json\nfinally:\n    from toy_up.inner import greet\n",
    ],
)
@pytest.mark.parametrize("imported", [False, True])
def test_a_function_that_its_module_only_binds_is_patched_where_it_is_defined(
    toys, binding, imported
):
    toys.greet(binding)
    toys.write("toy_up.inner", GREET)
    if imported:
        importlib.import_module("toy_up.greet")
    toys.apply()
    modules = [importlib.import_module(f"toy_up.{name}") for name in ("greet", "inner")]
    assert toys.status("toy-a") == "applied"
    assert [module.greet("you") for module in modules] == ["hello you!"] * 2
    (row,) = (row for row in toys.apply() if row.id == "toy-a")
    assert "toy_up.greet:greet has moved to toy_up.inner:greet" in row.reason
    revert()
    assert [module.greet("you") for module in modules] == ["hello you"] * 2


@pytest.mark.parametrize(
    ("binding", "inner"),
    [
        ("from toy_up.inner import Speaker\n", CLASS),
        ("from toy_up.inner import Other as Speaker\n", OTHER),
        (
            "from toy_up import inner\nclass Speaker(inner.Base): ...\n",
            CLASS.replace("Speaker", "Base"),
        ),
        (
            "from toy_up.inner import Base\nclass Speaker(Base): ...\n",
            CLASS.replace("Speaker", "Base"),
        ),
    ],
)
def test_a_method_of_a_class_that_has_moved_or_that_it_inherits_is_patched(toys, binding, inner):
    toys.patch("toy-a", "toy_up.greet:Speaker.greet")
    toys.write("toy_up.greet", binding)
    toys.write("toy_up.inner", inner)
    toys.apply()
    speaker = importlib.import_module("toy_up.greet").Speaker()
    assert toys.status("toy-a") == "applied"
    assert speaker.greet("you") == "hello you!"


def test_two_targets_that_lead_to_one_function_share_it(toys):
    toys.greet("from toy_up.inner import greet\n")
    toys.patch("toy-b", "toy_up.inner:greet")
    toys.write("toy_up.inner", GREET)
    toys.apply()
    module = importlib.import_module("toy_up.greet")
    assert (toys.status("toy-a"), toys.status("toy-b")) == ("applied", "applied")
    assert module.greet("you") == "hello you!!"
    assert importlib.import_module("toy_up.inner").greet is module.greet


def test_a_moved_function_that_nobody_has_read_is_refused_with_its_new_place(toys):
    toys.greet("from toy_up.inner import greet\n", relies_on="salute(name)")
    toys.write("toy_up.inner", GREET)
    toys.apply()
    importlib.import_module("toy_up.greet")
    (row,) = (row for row in toys.apply() if row.id == "toy-a")
    assert row.status == "drifted"
    assert "toy_up.greet:greet has moved to toy_up.inner:greet" in row.reason


def test_a_base_class_that_never_had_the_hazard_is_no_moved_function(toys):
    toys.patch("toy-a", "toy_up.greet:Speaker.greet", relies_on="salute(name)")
    toys.write("toy_up.greet", "from toy_up.inner import Base\nclass Speaker(Base): ...\n")
    toys.write("toy_up.inner", BASE)
    assert toys.apply(dry_run=True)["toy-a"].status == "missing_target"


WRONG = "hello = 'hi'"
FROM = "from toy_up.inner import _greet\n"
HELPER = f"def _greet(name):\n    {WRONG}\n    return hello + name\n"


@pytest.mark.parametrize(
    ("source", "beside", "status"),
    [
        (f"def greet(name):\n    {WRONG}\n    return hello + name\n", "", "pending_import"),
        (f"{HELPER}def greet(name):\n    return _greet(name)\n", "", "drifted"),
        (f"{FROM}def greet(name):\n    return _greet(name)\n", HELPER, "drifted"),
        (
            "from toy_up import inner\ndef greet(name):\n    return inner._greet(name)\n",
            HELPER,
            "drifted",
        ),
        (
            "from toy_up.inner import _other\ndef greet(name):\n    return _other(name)\n",
            f"{HELPER}def _other(name):\n    return _greet(name)\n",
            "drifted",
        ),
        (  # what looks like a definition in a text over several lines is none
            f'TEXT = """\ndef greet(name):\n{WRONG}\n"""\n{HELPER}'
            "def greet(name):\n    return _greet(name)\n",
            "",
            "drifted",
        ),
        (
            f'TEXT = """\ndef greet(name):\n{WRONG}\n"""\ndef greet(name):\n    return name\n',
            HELPER,
            "fixed_upstream",
        ),
        ("def greet(name):\n    return 'hello' + name\n", HELPER, "fixed_upstream"),
        (f"{FROM}def greet(name):\n    return name\n", HELPER, "fixed_upstream"),
    ],
)
def test_a_text_that_a_called_function_has_is_no_repair(toys, source, beside, status):
    toys.patch("toy-a", "toy_up.greet:greet", relies_on=WRONG, fixed_when=no_body_has(WRONG))
    toys.write("toy_up.greet", source)
    toys.write("toy_up.inner", beside)
    assert toys.apply(dry_run=True)["toy-a"].status == status


@pytest.mark.parametrize(
    ("inner", "status"),
    [
        ("", "unsupported_version"),
        ("def origin(name):\n    return name\n", "unsupported_version"),
        ("def origin(name):\n    return name.upper()\n", "pending_import"),
        (
            "def origin(name):\n    return _origin(name)\n"
            "def _origin(name):\n    return name.upper()\n",
            "pending_import",
        ),
    ],
)
def test_a_hazard_is_there_only_with_the_code_that_brought_it(toys, inner, status):
    origin = ("toy_up.inner:origin", "name.upper()")
    toys.patch("toy-a", "toy_up.greet:greet", came_with=origin, since="1.3")
    toys.write("toy_up.greet", GREET)
    toys.write("toy_up.inner", inner)
    (toys.folder / "toy_upstream-1.2.dist-info" / "direct_url.json").write_text("{}")
    row = toys.apply(dry_run=True)["toy-a"]
    assert row.status == status
    assert ("the hazard came with" in row.reason) is (status == "unsupported_version")


def test_a_repair_that_takes_the_hazards_origin_away_counts_as_a_repair(toys):
    place = "toy_up.inner:origin"
    options = {"came_with": (place, "name.upper()"), "fixed_by": ((place, "name.lower()"),)}
    toys.patch("toy-a", "toy_up.greet:greet", since="1.3", **options)
    toys.write("toy_up.greet", GREET)
    toys.write("toy_up.inner", "def origin(name):\n    return name.lower()\n")
    (toys.folder / "toy_upstream-1.2.dist-info" / "direct_url.json").write_text("{}")
    assert toys.apply(dry_run=True)["toy-a"].status == "fixed_upstream"
