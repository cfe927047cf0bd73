"""Waiting for imports: in the middle of one, after a failed one, lazily, beside other finders."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec

import pytest
from toys import GREET

from megatron_idempotent import report
from megatron_idempotent.patching import import_hooks


@pytest.fixture
def applying(monkeypatch, toys):
    """Let a toy call `apply()` by importing `toy_apply`."""
    toys.write("toy_apply", "import toy_hook\ntoy_hook.now()\n")
    toys.write("toy_hook", "now = None\n")
    importlib.import_module("toy_hook").now = toys.apply


def test_apply_in_the_middle_of_the_targets_import_lands_with_its_end(toys, applying):
    toys.greet("import toy_apply\n" + GREET)
    # Nothing is imported after it that could give `apply()` another chance.
    module = importlib.import_module("toy_up.greet")
    assert module.greet("x") == "hello x!"
    assert toys.status("toy-a") == "applied"
    assert type(module.__spec__) is ModuleSpec
    assert module.__spec__._initializing is False


def test_on_a_python_that_nobody_has_read_it_lands_with_the_next_apply(toys, applying, monkeypatch):
    monkeypatch.setattr(import_hooks, "_UNREAD", (3, 10))
    toys.greet("import toy_apply\n" + GREET)
    module = importlib.import_module("toy_up.greet")
    assert toys.status("toy-a") == "pending_import"
    toys.apply()
    assert module.greet("x") == "hello x!"


@pytest.mark.parametrize("in_the_middle", [True, False])
def test_an_import_that_fails_is_waited_for_again(toys, applying, in_the_middle):
    above = "import toy_apply\n" if in_the_middle else ""
    toys.greet(f"{above}import toy_flaky\n{GREET}")
    toys.write("toy_flaky", "raise Flaky\n")
    if not in_the_middle:
        toys.apply()
    with pytest.raises(NameError):
        importlib.import_module("toy_up.greet")
    assert toys.status("toy-a") == "pending_import"
    toys.write("toy_flaky", "")
    assert importlib.import_module("toy_up.greet").greet("x") == "hello x!"


def test_a_second_apply_may_wait_for_more_before_the_package_is_imported(toys):
    for name in ("one", "two"):
        toys.write(f"toy_up.{name}", GREET)
        toys.patch(f"toy-{name}", f"toy_up.{name}:greet")
    toys.apply("toy-one")
    toys.apply("toy-two")
    assert importlib.import_module("toy_up.one").greet("x") == "hello x!"
    assert importlib.import_module("toy_up.two").greet("x") == "hello x!"


def test_a_target_in_the_top_level_package_itself_lands(toys):
    toys.write("toy_top", GREET)
    toys.patch("toy-a", "toy_top:greet")
    toys.apply()
    assert importlib.import_module("toy_top").greet("x") == "hello x!"


def test_waiting_hides_no_other_finder_from_an_import(toys, monkeypatch):
    asked = []

    class Finder:
        def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
            asked.append(fullname)

    toys.greet()
    importlib.import_module("wrapt")  # its finder is in place, and will not shift the others
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    toys.apply()
    doorbell = next(
        finder for finder in sys.meta_path if isinstance(finder, import_hooks._ImportSentinel)
    )
    sys.meta_path.remove(doorbell)
    sys.meta_path.insert(0, doorbell)
    importlib.import_module("toy_up.greet")
    assert next(name for name in asked if name.startswith("toy_up")) == "toy_up"
    assert "toy_up.greet" in asked


def test_a_module_that_is_imported_twice_is_patched_twice_by_two_applies(toys):
    toys.greet()
    toys.apply()
    first = importlib.import_module("toy_up.greet")
    del sys.modules["toy_up.greet"]
    toys.apply()
    second = importlib.import_module("toy_up.greet")
    assert first is not second
    assert second.greet("x") == "hello x!"


def test_a_lazily_loaded_module_is_not_loaded_by_apply(toys):
    path = toys.greet("import builtins\nbuiltins.toy_loaded = True\n" + GREET)
    importlib.import_module("toy_up")
    spec = importlib.util.spec_from_file_location("toy_up.greet", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules["toy_up.greet"] = module
    spec.loader.exec_module(module)
    import builtins

    assert toys.apply()["toy-a"].status == "pending_import"
    assert report()["toy-a"].status == "pending_import"
    assert not hasattr(builtins, "toy_loaded")
    assert module.greet("x") == "hello x"  # loaded by now, and the next import tells us
    del builtins.toy_loaded
    toys.write("toy_next", "")
    importlib.import_module("toy_next")
    assert module.greet("x") == "hello x!"


def test_finding_a_module_imports_no_parent_and_agrees_with_the_import_system(toys):
    toys.write("toy_up.deep.greet", GREET)
    (toys.folder / "toy_names" / "inner").mkdir(parents=True)  # namespace packages, nested
    (toys.folder / "toy_names" / "inner" / "greet.py").write_text(GREET)
    import_hooks.forget()
    names = ["toy_up.deep.greet", "toy_up.deep", "toy_names.inner.greet", "toy_up.deep.greet.x"]
    found = [
        import_hooks.find(name) for name in [*names, "toy_absent", "sys", "_json", "json.decoder"]
    ]
    assert not any(name.startswith("toy_") for name in sys.modules)
    specs = [importlib.util.find_spec(name) for name in names[:3]]
    assert found[:3] == [spec.origin for spec in specs if spec is not None]
    assert found[3:7] == [None, None, None, None]
    assert found[7] == importlib.import_module("json.decoder").__file__
