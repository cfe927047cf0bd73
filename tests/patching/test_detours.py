"""Live code that goes past our functions: what is named, what is none, and what a look costs."""

from __future__ import annotations

import gc
import importlib
import itertools
import sys
import textwrap
import threading
import types
import weakref
from typing import Any

import pytest
from past import CLASSES, HOLDERS, MAKE, RIGHT, THING, run
from toys import Toys, shout

from megatron_idempotent import report, revert
from megatron_idempotent.patching import Target, detours, install
from megatron_idempotent.patching.patch_points import StaleReferences, open_patch_point
from megatron_idempotent.patching.source import parse_body

pytestmark = pytest.mark.full

UP = """
import functools

class Base:
    def inherited(self, name):
        return name

class Up(Base):
    def greet(self, name):
        return name
    @staticmethod
    def static(name):
        return name
    @classmethod
    def klass(cls, name):
        return name
    @functools.lru_cache
    def cached(self, name):
        return name

def wave(name):
    return name() if callable(name) else name
"""
FUNCTIONS = {
    "greet": "Up.greet",
    "static": "Up.static",
    "klass": "Up.klass",
    "cached": "Up.cached",
    "wave": "wave",
}


class Case:
    """Upstream's module with a patch for each of its functions, and a module that uses them."""

    def __init__(self, toys: Toys, patch: pytest.MonkeyPatch) -> None:
        toys.write("toy_up.greet", UP)
        for name, qualname in FUNCTIONS.items():
            toys.patch(f"toy-{name}", f"toy_up.greet:{qualname}")
        self.up = importlib.import_module("toy_up.greet")
        self.user = types.ModuleType("toy_user")
        patch.setitem(sys.modules, "toy_user", self.user)
        vars(self.user)["up"] = self.up
        self._toys = toys

    def use(self, source: str, held: str) -> None:
        """Run statements that hold one of the functions."""
        of = self.up if held == "wave" else self.up.Up
        run(source, self.user, getattr(of, held), self.up.Up, "greet")

    def apply(self) -> None:
        """Apply all patches, whatever decorators the functions have."""
        self._toys.apply(only=[f"toy-{name}" for name in FUNCTIONS])


@pytest.fixture
def case(toys: Toys, monkeypatch: pytest.MonkeyPatch) -> Case:
    return Case(toys, monkeypatch)


def past(name: str) -> str:
    """Return what the report names that goes past a function's patch."""
    said = report()[f"toy-{name}"].reason.partition("calls go past it: ")[2]
    return said.replace(f"{FUNCTIONS[name]}: ", "")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect how many objects the garbage collector was asked for at once, each time."""
    counts: list[int] = []
    stock = gc.get_referrers

    def counting(*objects: object) -> list[Any]:
        counts.append(len(objects))
        return [each for each in stock(*objects) if each is not objects]

    monkeypatch.setattr(gc, "get_referrers", counting)
    return counts


@pytest.mark.parametrize(
    ("label", "name"),
    [
        *((label, "greet") for label in HOLDERS),
        *itertools.product(["toy_user.TABLE", "toy_user.default"], [*FUNCTIONS][1:]),
    ],
)
def test_whatever_holds_upstream_s_function_is_named(case, looks, label, name):
    case.use(HOLDERS[label], name)
    case.apply()
    assert past(name) == f"{label} holds upstream's"
    del looks[:]
    assert past(name) == f"{label} holds upstream's"
    assert looks == []
    assert [past(other) for other in {*FUNCTIONS} - {name}] == [""] * 4


def test_a_process_in_which_nobody_holds_upstream_s_functions_is_not_looked_through(case, looks):
    case.apply()
    for _ in range(2):
        assert [past(name) for name in FUNCTIONS] == [""] * 5
    for _ in range(3):
        revert()
        case.apply()
        assert [past(name) for name in FUNCTIONS] == [""] * 5
    assert looks == []


def test_a_place_that_lets_go_hides_no_other_that_takes_the_function(case):
    case.use("TABLE = [held]", "greet")
    case.apply()
    assert past("greet") == "toy_user.TABLE holds upstream's"
    exec("def late(x, call=TABLE.pop()): ...", vars(case.user))
    assert past("greet") == "toy_user.late holds upstream's"
    exec("again = late.__defaults__[0]", vars(case.user))
    assert past("greet") == "toy_user.again holds upstream's, toy_user.late holds upstream's"
    exec("del again\nlate.__defaults__ = None", vars(case.user))
    assert past("greet") == ""


def test_a_module_with_two_names_counts_once(case, monkeypatch):
    case.use("name = held\nnames = [held]", "greet")
    monkeypatch.setitem(sys.modules, "toy_user_again", case.user)
    case.apply()
    past("greet")
    exec("def late(x, call=name): ...", vars(case.user))
    assert "toy_user.late holds upstream's" in past("greet")


def test_a_function_that_another_thread_runs_names_nothing_and_hides_nothing(case):
    done = threading.Event()
    case.use("calls = [held]", "wave")
    case.apply()
    thread = threading.Thread(target=lambda: case.user.calls.pop()(done.wait))
    thread.start()
    try:
        assert past("wave") == ""
        case.user.late = [install.state.sites["toy_up.greet:wave"].original]
        assert past("wave") == "toy_user.late holds upstream's"
    finally:
        done.set()
        thread.join()
    assert past("wave") == "toy_user.late holds upstream's"
    del case.user.late
    assert past("wave") == ""


def test_a_generator_of_upstream_s_own_is_no_detour(toys):
    toys.write("toy_up.greet", "def count(name):\n    yield name\n    yield name\n")
    toys.patch("toy-count", "toy_up.greet:count")
    up = importlib.import_module("toy_up.greet")
    up.running = up.count(3)
    next(up.running)
    toys.apply(only=["toy-count"])
    assert "past" not in report()["toy-count"].reason


def test_what_is_looked_at_is_not_kept_alive(case):
    case.use(
        f"{THING}things = [Thing(), Thing()]\nthings[0].call = held\n"
        f"{MAKE}things[1].call = make(held)\nclass Other:\n    fast = held",
        "greet",
    )
    case.apply()
    assert len(past("greet").split(", ")) == 3
    alive = [weakref.ref(case.user.things[0]), weakref.ref(case.user.Other)]
    alive.append(weakref.ref(case.user.things[1].call))
    del case.user.things[:], case.user.Other
    gc.collect()
    assert [each() for each in alive] == [None] * 3
    assert past("greet") == ""


def test_each_function_is_told_by_the_attribute_that_leads_to_it(case):
    source = f"{THING}things = [Thing()]\nthings[0].one = [held]\nthings[0].two = [up.Up.cached]"
    case.use(source, "greet")
    case.apply()
    for _ in range(2):
        assert past("greet") == "attribute `one` of an object of toy_user.Thing holds upstream's"
        assert past("cached") == "attribute `two` of an object of toy_user.Thing holds upstream's"


def test_an_object_with_slots_is_named_each_time(case):
    case.use(
        "class Thing:\n    __slots__ = ['call']\nthings = [Thing()]\nthings[0].call = held", "greet"
    )
    case.apply()
    for _ in range(2):
        assert past("greet") == "an object of toy_user.Thing holds upstream's"


def test_who_wraps_or_calls_ours_is_no_detour(case):
    case.apply()
    case.use(
        "name = held\npartial = functools.partial(held, 1)\ndef default(x, call=held): ...\n"
        "@functools.wraps(held)\ndef wrapper(*args):\n    return held(*args)",
        "greet",
    )
    case.up.Up.greet = case.user.wrapper
    assert past("greet") == ""


def test_a_name_that_is_told_as_bound_before_us_is_told_once(case, looks):
    case.use("name = held", "wave")
    case.apply()
    assert "bound before us and left alone: toy_user.name" in report()["toy-wave"].reason
    assert past("wave") == ""
    assert looks == []


def test_the_static_method_itself_is_upstream_s_too(case):
    case.use("shell = vars(up.Up)['static']", "greet")
    case.apply()
    assert past("static") == "toy_user.shell holds upstream's"


def test_upstream_s_function_below_a_neighbour_s_wrapper_is_looked_for_too(case, monkeypatch):
    neighbour = types.ModuleType("neighbour")
    monkeypatch.setitem(sys.modules, "neighbour", neighbour)
    source = """
    def wrap(below):
        global original
        original = below
        def wrapper(*args):
            return below(*args)
        return wrapper
    """
    exec(textwrap.dedent(source), vars(neighbour))
    case.use("TABLE = [held]", "greet")
    case.up.Up.greet = neighbour.wrap(case.up.Up.greet)
    case.apply()
    assert "neighbour" in report()["toy-greet"].reason
    for _ in range(2):
        assert past("greet") == "toy_user.TABLE holds upstream's"


FROZEN = ("name", "TABLE", "PROXY", "Other.Inner.fast", "default", "closure", "partial", "waiting")


def test_after_a_freeze_modules_classes_and_functions_are_looked_through(case, monkeypatch):
    labels = [label for name in FROZEN if (label := f"toy_user.{name}") in HOLDERS]
    for label in labels:
        case.use(HOLDERS[label], "greet")
    # What a freeze does: the collector knows nothing of these objects.
    monkeypatch.setattr(gc, "get_referrers", lambda *objects: [])
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 500_000)
    case.apply()
    for _ in range(2):
        assert past("greet").split(", ") == [
            f"{label} holds upstream's" for label in sorted(labels)
        ]


def test_many_places_are_counted(case):
    case.use("\n".join(f"name_{number:02} = held" for number in range(20)), "greet")
    case.apply()
    said = past("greet").split(", ")
    assert said[0] == "toy_user.name_00 holds upstream's"
    assert len(said) == 9
    assert said[-1] == "12 other places hold upstream's"


@pytest.mark.parametrize("first", ["classes", "apply"])
@pytest.mark.parametrize("label", [*CLASSES, *RIGHT])
def test_a_class_whose_method_comes_before_ours_is_named(case, looks, label, first):
    if first == "apply":
        case.apply()
    case.use(CLASSES.get(label) or RIGHT[label], "wave")
    if first == "classes":
        case.apply()
    assert past("greet") == ("" if label in RIGHT else label)


def test_an_heir_that_is_patched_itself_is_no_detour_of_its_base(toys):
    source = "class Up:\n    def greet(self, name):\n        return name\n"
    toys.write(
        "toy_up.greet", f"{source}\nclass Heir(Up):\n    def greet(self, name):\n        return 3\n"
    )
    toys.patch("toy-a", "toy_up.greet:Up.greet", "toy_up.greet:Heir.greet")
    importlib.import_module("toy_up.greet")
    toys.apply()
    assert "past" not in report()["toy-a"].reason


def test_counting_itself_holds_nothing():
    site = types.SimpleNamespace(original=lambda: None)
    assert detours._Original(site, "original").count() == 1
    held = [site.original] * 3
    assert detours._Original(site, "original").count() == 1 + len(held)


def test_a_base_class_has_a_right_to_what_its_heir_has_inherited(case, looks):
    body = parse_body("class Up:\n    def inherited(self, name): ...", "Up.inherited")
    assert body is not None
    site = open_patch_point(Target("toy_up.greet:Up.inherited", shout, "name"), body)
    site.install((), StaleReferences())
    assert detours.detours([site]) == {}
    assert looks == []
    case.use("late = up.Base.inherited", "greet")
    said = ["toy_user.late holds upstream's"]
    assert detours.detours([site]) == {"toy_up.greet:Up.inherited": said}
