"""Names that wrappers need beside the functions that they wrap, and code that goes past these."""

from __future__ import annotations

import logging
import re

import pytest
from starts import COMMAND, started
from toys import Toys

from megatron_idempotent import VerificationError, report, verify
from megatron_idempotent.patching import install, surroundings
from megatron_idempotent.patching.surroundings import Need, binds, slots_of

pytestmark = pytest.mark.full

BUFFER = "megatron/core/distributed/param_and_grad_buffer.py"


CLASS = """
import os
from .other import (
    first,
    second as third,
)

LIMIT = 4
if LIMIT:
    CHOSEN = 3


class Box(Base):
    size: int = 3
    kind: str

    def __init__(self, given, total=None):
        self.held, self.rest = given
        (
            self.left,
            self.right,
        ) = given
        local = 4
        given.far = total
        self.read(kept=local)
        self.read(
            given.asked[0], kept=local
        )


def make(box, asked: int = 4):
    box.near = asked
"""


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        ("Box", "size kind held rest left right .far"),
        ("", "os first second third LIMIT CHOSEN Box make size held .near .far"),
    ],
)
def test_a_name_is_bound_where_it_is_defined_assigned_or_imported(owner, names):
    assert [name for name in names.split() if not binds(CLASS, owner, name)] == []
    others = ["given", "total", "local", "far", "near", "read", "kept", "asked", "absent", ".asked"]
    others += ["int", "str"]  # in annotations
    others += ["LIMIT", "make", ".near"] if owner else []
    assert [name for name in others if binds(CLASS, owner, name)] == []


def test_a_need_holds_for_the_releases_that_it_names():
    need = Need(modules=("m",), owner="", name="n", since="0.16.0rc", before="0.18.0")
    releases = (((0, 15, 3), True), ((0, 16, 0), False), ((0, 17, 1), True), ((0, 18, 0), True))
    assert [need.covers(release) for release in releases] == [False, True, True, False]


@pytest.mark.parametrize(
    ("source", "closed"),
    [
        ("class A:\n    __slots__ = ('a',)\n", True),
        ("class A:\n    __slots__ = (\n        'a',\n        '__dict__',\n    )\n", False),
        ("@dataclass(slots=True)\nclass A:\n    a: int\n", True),
        ("class A(torch.nn.Module):\n    __slots__ = ('a',)\n", False),
        ("class B:\n    __slots__ = ()\n\n\nclass A(B):\n    __slots__ = ('a',)\n", True),
        ("class A:\n    pass\n", False),
    ],
)
def test_a_class_with_slots_takes_nothing_of_ours(source, closed):
    assert (slots_of(source, "A") is not None) is closed


def doctor(path: str) -> str:
    done = started(*COMMAND, "doctor", PYTHONPATH=path)
    assert done.returncode == 1, done.stderr
    return done.stdout


def test_doctor_names_what_is_missing_or_goes_past(megatron_copy):
    group = "class _ParamAndGradBucketGroup:\n"
    faster = "class Faster(_ParamAndGradBucketGroup):\n    def start_grad_sync(self):\n"
    for old, new, said in (
        ("grad_reduce_handle", "reduce_handle", "defines no `grad_reduce_handle`, which its wr"),
        (group, f"{group}    __slots__ = ()\n", "_ParamAndGradBucketGroup has __slots__"),
        (
            "class BufferType(",
            f"{faster}        return None\n\n\nclass BufferType(",
            "Faster overrides _ParamAndGradBucketGroup.start_grad_sync, and does not call it",
        ),
    ):
        megatron_copy.alter(BUFFER, old, new)
        assert said in doctor(megatron_copy.path)
        megatron_copy.put_back()


UP = """
class Up:
    def greet(self, name):
        return name


class Loud(Up):
    def greet(self, name):
        return super().greet(name)


def wave(name):
    return name
"""


def test_report_and_verify_name_live_code_that_goes_past(toys: Toys, caplog):
    toys.write("toy_up.greet", UP)
    toys.patch("toy-a", "toy_up.greet:Up.greet")
    toys.patch("toy-b", "toy_up.greet:wave")
    import toy_up.greet as up

    wave = up.wave
    toys.apply()
    with caplog.at_level(logging.WARNING, "megatron_idempotent"):
        assert "past" not in report()["toy-a"].reason
        verify()
    assert not caplog.records

    class Rude(up.Loud):
        def greet(self, name):
            return name

    up.TABLE = {"w": wave}
    assert "calls go past it: Up.greet: test_surroundings." in report()["toy-a"].reason
    assert "Rude overrides it" in report()["toy-a"].reason
    assert "wave: toy_up.greet.TABLE holds upstream's" in report()["toy-b"].reason
    with caplog.at_level(logging.WARNING, "megatron_idempotent"):
        assert verify()["toy-a"].status == "applied"
    assert "Rude overrides it" in caplog.text
    toys.apply(strict=True)
    with pytest.raises(VerificationError, match=r"toy-a .*Rude"):
        verify()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("    again = greet\n", "holds Up.greet a second time, at `again = greet`"),
        ("    again = (\n    greet\n    )\n", "holds Up.greet a second time, at `again = greet`"),
        ("    A = {\n    # All.\n    'a': [\n        greet]}\n", "at `A = {'a': [greet]}`"),
        ('    """\n    again = greet\n    """\n', ""),
        ("    def other(self):\n        again = greet\n", ""),
        ("\nclass Rude(Up):\n    def greet(self):\n        return 0\n", "Rude overrides Up.greet"),
        ("\nclass Kind(Up):\n    def greet(self):\n        return self.x.greet(0)\n", ""),
        ('\nclass A:\n    """\n    class B(Up):\n    """\n    def greet(self):\n        0\n', ""),
    ],
)
def test_a_detour_in_the_sources_is_refused_before_it_is_imported(toys: Toys, more, said):
    toys.write(
        "toy_up.greet", f"class Up:\n    def greet(self, name):\n        return name\n{more}"
    )
    toys.patch("toy-a", "toy_up.greet:Up.greet")
    row = toys.apply(dry_run=True)["toy-a"]
    assert row.status == ("drifted" if said else "pending_import"), row.reason
    assert said in row.reason


def test_no_pattern_is_compiled_for_each_name_that_is_looked_for(monkeypatch):
    names = [f"name_{number}" for number in range(50)]
    text = "".join(f"class {name}(Base):\n    {name} = 1\n\n\n" for name in names)
    patterns = set()
    stock = re._compile  # type: ignore[attr-defined]
    monkeypatch.setattr(re, "_compile", lambda p, flags: patterns.add(p) or stock(p, flags))
    install.forget_sources()
    for name in names:
        assert binds(text, name, name)
        assert not binds(text, name, "absent")
        assert surroundings.bases_of(text, name) == ["Base"]
        assert slots_of(text, name) is None
        assert surroundings._heirs(text)["Base"] == names
        assert surroundings._held(text, name, name) == ()
    assert len(patterns) < 10
