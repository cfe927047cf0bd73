"""One live function with layers around it: what is put there, and what is there afterwards."""

from __future__ import annotations

import inspect
import sys
import threading
import types

import pytest
from toys import shout

from megatron_idempotent.patching import Target, patch_points
from megatron_idempotent.patching.patch_points import (
    Conflict,
    PatchPoint,
    StaleReferences,
    open_patch_point,
)
from megatron_idempotent.patching.source import parse_body

SOURCE = """
import contextlib
import functools

def greet(name: str = "you") -> str:
    return f"hello {name}"

alias = greet

class Base:
    def inherited(self, name):
        return f"{type(self).__name__} {name}"
    @classmethod
    def made(cls, name):
        return f"{cls.__name__} {name}"

class Thing(Base):
    def method(self, name):
        return f"{self.tag} {name}"
    tag = "thing"
    @staticmethod
    def static(name):
        return name
    @classmethod
    def klass(cls, name):
        return f"{cls.__name__} {name}"
    @contextlib.contextmanager
    def managed(self, name):
        yield name
    @functools.lru_cache
    def cached(self, name):
        return [name]
"""


@pytest.fixture
def module(toys):
    toys.write("toy_sites", SOURCE)
    import toy_sites

    return toy_sites


@pytest.fixture
def beside(module, monkeypatch):
    """A function that runs a source in a module of this name, which is imported then."""

    def imported(name: str, source: str) -> types.ModuleType:
        made = types.ModuleType(name)
        exec(source, vars(made))
        monkeypatch.setitem(sys.modules, name, made)
        return made

    return imported


def site_of(qualname: str, says: str | None = None) -> PatchPoint:
    """The site; `says`: what the source that was read defines there, if not what the file does."""
    target = Target(f"toy_sites:{qualname}", shout, "name")
    body = parse_body(says or SOURCE, qualname) or parse_body(SOURCE, "greet")
    assert body is not None
    return open_patch_point(target, body)


def install(site: PatchPoint, *prefixes: str) -> None:
    names = StaleReferences()
    site.install(prefixes, names)
    names.rebind()


def uninstall(site: PatchPoint) -> bool:
    names = StaleReferences()
    ours = site.uninstall(names)
    names.rebind()
    return ours


@pytest.mark.parametrize("qualname", ["greet", "Thing.method", "Thing.static", "Thing.klass"])
def test_uninstalling_puts_the_raw_value_back(module, qualname):
    owner = module.Thing if "." in qualname else module
    name = qualname.rpartition(".")[2]
    raw = vars(owner)[name]
    call = getattr(module.Thing() if "." in qualname else module, name)
    site = site_of(qualname)
    install(site)
    site.add("shout", shout)
    assert type(vars(owner)[name]) is type(raw)
    assert getattr(module.Thing() if "." in qualname else module, name)("x") == call("x") + "!"
    site.remove("shout")
    assert uninstall(site)
    assert vars(owner)[name] is raw


def test_a_cached_method_can_still_be_told_to_forget(module):
    thing = module.Thing()
    site = site_of("Thing.cached")
    install(site)
    site.add("shout", shout)
    assert thing.cached("x") == "['x']!"
    assert thing.cached.cache_info().currsize == 1
    thing.cached.cache_clear()
    assert thing.cached.cache_info().currsize == 0


@pytest.mark.parametrize(("name", "answer"), [("inherited", "Thing x!"), ("made", "Thing x!")])
def test_uninstalling_deletes_what_was_inherited(module, name, answer):
    site = site_of(f"Thing.{name}")
    install(site)
    site.add("shout", shout)
    assert getattr(module.Thing(), name)("x") == answer
    assert getattr(module.Base(), name)("x") == "Base x"
    assert uninstall(site)
    assert name not in vars(module.Thing)


def test_the_signature_is_upstreams_for_callers_and_for_wrappers(module):
    before = inspect.signature(module.greet)
    seen = []

    def wrapper(original, *args, **kwargs):
        seen.append(inspect.signature(original))
        return original(*args, **kwargs)

    site = site_of("greet")
    install(site)
    site.add("a", wrapper)
    site.add("b", wrapper)
    module.greet()
    assert [inspect.signature(module.greet), *seen] == [before] * 3
    assert module.greet.__name__ == "greet"


def test_another_name_in_the_same_module_is_patched_too(module):
    site = site_of("greet")
    install(site)
    assert module.alias is module.greet
    uninstall(site)
    assert module.alias is module.greet is site.original


@pytest.mark.parametrize("calls", [True, False])
def test_a_wrapper_around_a_static_method_is_in_place_if_it_can_call_ours(module, calls):
    site = site_of("Thing.static")
    install(site)
    ours = module.Thing.static

    def wrapper(name):
        return ours(name) if calls else name

    unable = types.FunctionType(shout.__code__, globals())
    theirs = wrapper if calls else unable
    theirs.__wrapped__ = ours  # which replacements set, too
    module.Thing.static = staticmethod(theirs)
    assert site.in_place is calls
    assert uninstall(site) is not calls


def test_what_is_put_in_place_of_a_static_method_is_a_conflict(module):
    wrapper = types.FunctionType(shout.__code__, globals())
    wrapper.__wrapped__ = module.Thing.static
    module.Thing.static = staticmethod(wrapper)
    with pytest.raises(Conflict, match=r"Thing\.static is shout"):
        site_of("Thing.static")


def test_upstreams_own_decorator_is_no_conflict(module):
    assert site_of("Thing.managed").inside == []
    site = site_of("Thing.managed", says=SOURCE.replace("@contextlib.contextmanager", "").lstrip())
    assert site.inside == ["contextlib"]


@pytest.mark.parametrize("qualname", ["nothing", "Nothing.method", "Thing.nothing", "greet.x.y"])
def test_a_name_that_is_not_there_is_an_attribute_error(module, qualname):
    with pytest.raises(AttributeError, match="toy_sites"):
        site_of(qualname)


@pytest.mark.parametrize("value", ["module.Thing", "print", "3"])
def test_what_is_no_function_is_a_conflict_that_says_what_it_is(module, value):
    module.greet = eval(value)
    with pytest.raises(Conflict, match=r"toy_sites:greet is a builtins\."):
        site_of("greet")


def test_a_class_that_is_gone_is_not_in_place(module):
    site = site_of("Thing.method")
    install(site)
    assert site.in_place
    del module.Thing
    assert not site.in_place
    sys.modules.pop("toy_sites")
    assert not site.in_place


def test_looking_for_early_bound_names_wakes_no_lazy_module(module, monkeypatch):
    woken = []

    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> object:
            woken.append(name)
            return super().__getattribute__(name)

    class Proxy:
        @property
        def __class__(self) -> type:
            woken.append("__class__")
            return types.ModuleType

    lazy = types.ModuleType("toy_lazy")
    lazy.__getattr__ = woken.append
    monkeypatch.setitem(sys.modules, "toy_lazy", lazy)
    monkeypatch.setitem(sys.modules, "toy_lazier", Lazy("toy_lazier"))
    monkeypatch.setitem(sys.modules, "toy_proxy", Proxy())
    monkeypatch.setitem(sys.modules, "toy_none", None)
    woken.clear()
    site = site_of("greet")
    install(site, "toy_lazy", "toy_lazier", "toy_proxy")
    uninstall(site)
    assert woken == []


def test_many_sites_are_looked_for_at_once_and_foreign_names_are_left(module, beside):
    source = "from toy_sites import greet, alias as other"
    own, foreign = (beside(name, source) for name in ("toy_sites_own", "toy_foreign"))
    upstream = module.greet
    sites, names = [site_of("greet"), site_of("Thing.method")], StaleReferences()
    for site in sites:
        site.install(("toy_sites_own",), names)
    assert own.greet is foreign.greet is upstream
    names.rebind()
    assert own.greet is own.other is module.greet is module.alias is sites[0].installed
    assert foreign.greet is foreign.other is upstream
    assert sites[0].left == ["toy_foreign.greet", "toy_foreign.other"]
    uninstall(sites[0])
    assert own.greet is own.other is module.greet is module.alias is upstream


def test_a_name_in_a_module_that_is_not_ours_is_found_however_often_it_is_held(module, beside):
    holders = [module.greet, {"f": module.greet}]  # no names, but references
    for name in ("toy_one", "toy_two"):
        beside(name, "from toy_sites import greet as renamed")
    site = site_of("greet")
    for _ in range(2):  # counted the first time only, looked for both times
        install(site)
        assert site.left == ["toy_one.renamed", "toy_two.renamed"]
        uninstall(site)
    assert holders[0] is module.greet is sys.modules["toy_one"].renamed


def test_a_name_that_is_bound_after_the_references_were_counted_is_found(module, beside):
    site = site_of("greet")
    install(site)
    uninstall(site)
    beside("toy_late", "from toy_sites import greet")
    install(site)
    assert site.left == ["toy_late.greet"]


def test_modules_that_cannot_hold_a_function_are_not_looked_through(toys, monkeypatch):
    toys.write("toy_sites", SOURCE.replace("alias = greet", ""))
    toys.write("toy_user", "from toy_sites import greet")
    import toy_user

    looked = []
    stock = patch_points._held
    monkeypatch.setattr(
        patch_points,
        "_held",
        lambda sites, m, names=None: looked.append((len(sites), names)) or stock(sites, m, names),
    )
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # pytest's reruns have one
    site = site_of("greet")
    install(site, "toy_user")
    assert toy_user.greet is site.installed
    assert looked == [(1, {"greet"}), (0, None), (0, None)]


def test_a_name_that_another_thread_bound_after_the_count_is_found(module):
    site = site_of("greet")
    names, done = StaleReferences(), threading.Event()
    module.late = module.greet  # by the thread, that may bind more
    site._held_elsewhere -= 1
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        site.install((), names)
        names.rebind()
    finally:
        done.set()
        thread.join()
    assert module.greet is module.late is module.alias is site.installed
