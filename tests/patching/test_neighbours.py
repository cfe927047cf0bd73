"""Other people's wrappers at a patched function, in both orders: who runs, and who is named."""

from __future__ import annotations

import functools
import gc
import importlib
import sys
import textwrap
import tracemalloc
import types
from typing import Any

import pytest

from megatron_idempotent import VerificationError, report, revert, verify

pytestmark = pytest.mark.full

ADDRESS = "toy_up.greet:greet"
EARLY = "from toy_up.greet import greet"

#: Each returns what is put in the place of the function `below`.
WRAPPERS = {
    "functools.wraps": """
        def wrap(below):
            @functools.wraps(below)
            def wrapper(name):
                return below(name) + "~"
            return wrapper
    """,
    "a closure without wraps": """
        def wrap(below):
            def greet(name):
                return below(name) + "~"
            return greet
    """,
    "wrapt": """
        def wrap(below):
            return wrapt.FunctionWrapper(below, lambda f, _, args, kwargs: f(*args, **kwargs) + "~")
    """,
    "a global": """
        def wrap(below):
            global original
            original = below
            def greet(name):
                return original(name) + "~"
            return greet
    """,
    "an attribute of its module": """
        def wrap(below):
            sys.modules[__name__].saved = types.SimpleNamespace(original=below)
            def greet(name):
                return saved.original(name) + "~"
            return greet
    """,
    "a default": """
        def wrap(below):
            def greet(name, _below=below):
                return _below(name) + "~"
            return greet
    """,
    "a table": """
        def wrap(below):
            table = {"greet": below}
            return lambda name: table["greet"](name) + "~"
    """,
    "an object": """
        class Wrapper:
            def __init__(self, below):
                self.below = below
            def __call__(self, name):
                return self.below(name) + "~"
        wrap = Wrapper
    """,
    "a partial": """
        def called(below, name):
            return below(name) + "~"
        def wrap(below):
            return functools.partial(called, below)
    """,
    "two layers": """
        def wrap(below):
            @functools.wraps(below)
            def inner(name):
                return below(name) + "~"
            @functools.wraps(inner)
            def outer(name):
                return inner(name)
            return outer
    """,
}
IMPORTS = "import functools, sys, types, wrapt\n"


@pytest.fixture
def module(toys, monkeypatch):
    toys.greet()
    toys.write("toy_up.user", EARLY)
    monkeypatch.setitem(sys.modules, "neighbour", types.ModuleType("neighbour"))
    importlib.import_module("toy_up.user")
    return importlib.import_module("toy_up.greet")


def neighbour(kind: str):
    """Return the wrapper of a package called neighbour."""
    source = IMPORTS + textwrap.dedent(WRAPPERS[kind])
    exec(source, vars(sys.modules["neighbour"]))
    return sys.modules["neighbour"].wrap


@pytest.mark.parametrize("kind", WRAPPERS)
def test_who_wraps_after_us_runs_outside_of_ours_and_is_named(toys, module, kind):
    upstream = module.greet
    toys.apply()
    module.greet = theirs = neighbour(kind)(module.greet)
    assert module.greet("x") == "hello x!~"
    row = report()["toy-a"]
    assert row.status == "applied"
    assert "wrapped by neighbour: runs outside of ours" in row.reason
    verify()
    assert toys.apply()["toy-a"].status == "already_applied"
    assert module.greet("x") == "hello x!~"
    row = revert()["toy-a"]
    assert row.status == "conflict"
    assert f"wrapped {ADDRESS} after us: our layer stays below" in row.reason
    assert module.greet is theirs
    assert module.greet("x") == upstream("x") + "~"
    assert toys.apply()["toy-a"].status == "applied"
    assert module.greet("x") == "hello x!~"


@pytest.mark.parametrize("kind", WRAPPERS)
def test_who_has_wrapped_before_us_runs_inside_of_ours_and_is_left_there(toys, module, kind):
    upstream = module.greet
    module.greet = theirs = neighbour(kind)(module.greet)
    for _ in range(2):
        row = toys.apply()["toy-a"]
        assert row.status in ("applied", "already_applied")
        assert "wrapped by neighbour before us: runs inside of ours" in row.reason
        assert module.greet("x") == "hello x~!"
        # It has bound upstream's before they came; it gets ours, and not theirs.
        assert sys.modules["toy_up.user"].greet("x") == "hello x!"
    verify()
    assert revert()["toy-a"].status == "disabled"
    assert module.greet is theirs
    assert sys.modules["toy_up.user"].greet is upstream


def test_names_from_before_a_wrapper_that_we_may_not_change_are_told(toys, module):
    sys.modules["neighbour"].early = module.greet
    module.greet = neighbour("functools.wraps")(module.greet)
    sys.modules["neighbour"].late = module.greet
    reason = toys.apply()["toy-a"].reason
    for name in ("early", "late"):
        assert f"neighbour.{name}" in reason.partition("bound before us and left alone: ")[2]


def test_what_has_wrapped_upstream_s_before_us_under_a_name_of_its_own_is_told(toys, module):
    sys.modules["neighbour"].fast = neighbour("functools.wraps")(module.greet)
    toys.apply()
    assert "calls go past it: greet: neighbour.fast holds upstream's" in report()["toy-a"].reason


def test_a_partial_around_ours_is_not_told_as_ours(toys, module):
    toys.apply()
    module.greet = functools.partial(module.greet)
    assert module.greet("x") == "hello x!"
    assert "wrapped by functools: runs outside of ours" in report()["toy-a"].reason
    assert "functools wrapped " in revert()["toy-a"].reason


def test_a_replacement_that_wears_the_mark_of_a_wrapper_is_none(toys, module):
    def replace(below):
        exec("def theirs(name): return 'hi ' + name", vars(sys.modules["neighbour"]))
        return functools.update_wrapper(sys.modules["neighbour"].theirs, below)

    upstream = module.greet
    module.greet = replace(upstream)
    reason = toys.apply()["toy-a"].reason
    assert "of neighbour: undo that or exclude toy-a" in reason
    module.greet = upstream
    toys.apply()
    module.greet = replace(module.greet)
    row = report()["toy-a"]
    assert row.status == "conflict"
    assert row.reason.endswith(f"{ADDRESS} by neighbour")
    with pytest.raises(VerificationError, match=f"{ADDRESS} by neighbour"):
        verify()


def test_a_second_copy_of_this_package_leaves_the_first_one_s_patches_alone(toys, module):
    toys.apply()
    ours = module.greet
    mine = {name: sys.modules[name] for name in sys.modules if name.startswith("megatron_idem")}
    for name in mine:
        del sys.modules[name]
    try:
        from megatron_idempotent.patching import Target
        from megatron_idempotent.patching.patch_points import Conflict, open_patch_point
        from megatron_idempotent.patching.source import parse_body

        body = parse_body((toys.folder / "toy_up" / "greet.py").read_text(), "greet")
        with pytest.raises(Conflict, match="another copy"):
            open_patch_point(Target(ADDRESS, lambda original, name: original(name)), body)
    finally:
        for name in [name for name in sys.modules if name.startswith("megatron_idem")]:
            del sys.modules[name]
        sys.modules.update(mine)
    assert module.greet is ours


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_a_private_fix_beside_ours_neither_stacks_nor_leaks(toys, module, first):
    wrap = neighbour("functools.wraps")
    if first == "theirs":
        module.greet = wrap(module.greet)
    toys.apply()
    if first == "ours":
        module.greet = wrap(module.greet)
    standing, expected = module.greet, module.greet("x")

    def again(times):
        assert {module.greet("x") for _ in range(times)} == {expected}
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    for _ in range(20):
        toys.apply()
    assert module.greet is standing
    tracemalloc.start()
    try:
        before = again(20)
        assert again(1_000) - before < 1_000
    finally:
        tracemalloc.stop()


def many_switches(first: str | None) -> tuple[int, bytes]:
    """Switch DDP's hooks off and on beside a private fix on a rank; return growth and bits."""
    import torch
    from megatron.core.distributed import DistributedDataParallel

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    def fix() -> None:
        """Install what a framework may carry: a second call of either switch does nothing."""
        owner = DistributedDataParallel
        off, on = owner.disable_forward_pre_hook, owner.enable_forward_pre_hook

        def disable(self: Any, param_sync: bool = True) -> None:
            if self.remove_forward_pre_hook_handles:
                off(self, param_sync)

        def enable(self: Any) -> None:
            if not self.remove_forward_pre_hook_handles:
                on(self)

        owner.disable_forward_pre_hook, owner.enable_forward_pre_hook = disable, enable

    steps = {"theirs": (fix, megatron_idempotent.apply), "ours": (megatron_idempotent.apply, fix)}
    for step in steps.get(first, ()):
        step()
    model = tiny.build(overlap_param_gather=True, layers_per_stage=1)
    (chunk,) = model.chunks
    twice = 1 if first is None else 2  # stock raises at the second

    def again(times: int) -> int:
        for _ in range(times):
            for _ in range(twice):
                chunk.disable_forward_pre_hook()
            for _ in range(twice):
                chunk.enable_forward_pre_hook()
        gc.collect()
        # Not tracemalloc: before Python 3.12.9 its stop() crashes if another thread allocates.
        return sys.getallocatedblocks()

    again(20)
    before = again(20)
    grown = again(500) - before  # 1,000 calls of each, which would leave an object or more
    model.train_step(2, data_seed=0)
    params = [each.detach().flatten() for each in chunk.parameters()]
    return grown, torch.cat(params).numpy().tobytes()


def test_a_framework_s_private_fix_and_ours_have_stock_s_bits_and_grow_nothing(megatron_ranks):
    ((_, stock),) = megatron_ranks(1, many_switches, None)
    for first in ("theirs", "ours"):
        ((grown, bits),) = megatron_ranks(1, many_switches, first)
        assert bits == stock
        assert grown < 500, first
