"""Uses of upstream's names that its source has to allow: to set, to call with a keyword."""

from __future__ import annotations

import pytest

from megatron_idempotent.cli.needs import lines_of
from megatron_idempotent.patching.surroundings import (
    Need,
    fits,
    is_frozen,
    parsed,
    returned,
)

BOX = """
class Box(Base):
    size: int = 3

    def __init__(self):
        self.held = None
"""
BARE = BOX.replace("(Base)", "")
PROPERTY = (
    BOX.replace("self.held", "self._held")
    + """
    @property
    def held(self):
        return self._held
"""
)


@pytest.mark.parametrize(
    ("text", "name", "may"),
    [
        (BOX, "held", True),
        (BOX, "size", True),
        (BOX, "absent", None),
        ("other = 1", "held", None),
        (PROPERTY, "held", False),
        (PROPERTY.replace("@property", "@functools.wraps\n    @property"), "held", False),
        (PROPERTY.replace("@property", "@abc.abstractproperty"), "held", False),
        (PROPERTY.replace("@property", "@functools.cached_property"), "held", True),
        (f"{PROPERTY}\n    @held.setter\n    def held(self, value):\n        pass\n", "held", True),
        (f"{BOX}\n    held = property(make)\n", "held", False),
        (f"{BOX}\n    held = property(make, put)\n", "held", True),
        (f"@dataclass(frozen=True)\n{BOX.lstrip()}", "size", False),
        (f"@dataclasses.dataclass(kw_only=True, frozen=True)\n{BOX.lstrip()}", "size", False),
        (f"@dataclass(\n    frozen=True,\n)\n{BOX.lstrip()}", "size", False),
        (f"@dataclass\n{BOX.lstrip()}", "size", True),
        (BOX.replace("Base", "NamedTuple"), "size", False),
        (BARE.replace("size: int", "__slots__ = ('size',)\n    #"), "held", False),
        (BARE.replace("size: int", "__slots__ = ('held',)\n    #"), "held", True),
        (f"@dataclass(slots=True)\n{BARE.lstrip()}", "size", True),
        (f"@dataclass(slots=True)\n{BARE.lstrip()}", "held", False),
    ],
)
def test_an_attribute_can_be_set_unless_its_class_refuses(text, name, may):
    assert fits(text, "Box", name, "!") is may


CALLS = """
def call(first, *, kind=None):
    pass

def calls(first, **others):
    pass

class Box:
    def call(self, kind):
        pass

class Made:
    def __init__(self, kind):
        pass

@dataclass
class Record:
    kind: int = 3

class Heir(Record):
    other: int = 3
"""


@pytest.mark.parametrize(
    ("owner", "name", "use", "takes"),
    [
        ("", "call", "(kind)", True),
        ("", "call", "(first,kind)", True),
        ("", "call", "(kinds)", False),
        ("", "call", "(kind,kinds)", False),
        ("", "calls", "(kinds)", True),
        ("", "absent", "(kind)", None),
        ("Box", "call", "(kind)", True),
        ("Box", "call", "(first)", False),
        ("", "Made", "(kind)", True),
        ("", "Made", "(kinds)", False),
        ("", "Record", "(kind)", True),
        ("", "Record", "(kinds)", False),
        ("", "Heir", "(kind)", True),
    ],
)
def test_a_keyword_has_to_be_a_parameter(owner, name, use, takes):
    assert fits(CALLS, owner, name, use) is takes


STATES = """
class Tracker:
    def get_states(self):
        "Return them."
        states = {}
        for name in self.states_:
            states[name] = self.states_[name]
        log(states)
        return states
"""


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ('"Return them."', '"Return all."', True),
        ("log(states)", "warn(3)", True),
        ("return states", "return states.items()", False),
        ("return states", "return list(states)", False),
        ("states = {}", "states = []", False),
        ("log(states)", "states = sorted(states)", False),
        ("log(states)", "yield states", False),
    ],
)
def test_a_result_is_made_by_the_statements_that_touch_it(old, new, same):
    known = returned(STATES, "Tracker", "get_states")
    changed = STATES.replace(old, new)
    assert changed != STATES
    assert fits(changed, "Tracker", "get_states", f"[{known}|0123456789ab]") is same
    assert fits("x = 1", "Tracker", "get_states", f"[{known}]") is None


def test_a_frozen_class_inside_of_another_freezes_that_alone():
    inner = "    @dataclass(frozen=True)\n    class Inner:\n        size: int\n"
    assert not is_frozen(f"class Box:\n{inner}    size = 3\n", "Box")


def test_uses_are_written_and_read():
    lines = [
        "some-symptom",
        " a.b:C held! held! set!>=0.16.0rc call(kind,size)<0.17.0 get[0a1b|2c3d]",
    ]
    needs = parsed(lines)["some-symptom"].names
    assert {(need.name, need.use, need.since, need.before) for need in needs} == {
        ("held", "!", "", ""),
        ("set", "!", "0.16.0rc", ""),
        ("call", "(kind,size)", "", "0.17.0"),
        ("get", "[0a1b|2c3d]", "", ""),
    }
    written = parsed(list(lines_of(parsed(lines))))["some-symptom"].names
    assert set(written) == set(needs)
    said = {str(need) for need in needs}
    assert "a.b:C lets nobody set `held`, which its wrapper does" in said
    assert "a.b:C.call takes no `kind,size`, which its wrapper passes" in said
    assert "a.b:C.get returns something else, which its wrapper takes apart" in said


def test_a_use_has_to_be_allowed_by_every_place_that_defines_the_name():
    class Texts:
        def text(self, module: str) -> str | None:
            return {"a": BOX, "b": PROPERTY}.get(module)

        def beside(self, module: str) -> list[str]:
            return [module]

    def met(*modules: str, use: str = "!") -> bool:
        return Need(modules=modules, owner="Box", name="held", use=use).is_met(Texts())

    assert met("a")
    assert not met("b")
    assert not met("a", "b")
    assert met("a", "nowhere")
    assert met("nowhere")  # that it is there is a need of its own
    assert met("a", "b", use="")
    assert not met("nowhere", use="")
