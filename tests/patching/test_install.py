"""Several patches, several targets, several imports: all or nothing, in any order."""

from __future__ import annotations

import importlib
import itertools
import logging
import sys

import pytest
from toys import ask, shout

from megatron_idempotent import PatchError, apply, patched, report, revert, verify
from megatron_idempotent.patching import install, source
from megatron_idempotent.patching.catalog import patches

GREET = """
def greet(name):
    return f"hello {name}"

class Door:
    def knock(self, name):
        return f"knock {name}"
"""


@pytest.fixture
def greet(toys):
    toys.write("toy_up.greet", GREET)
    toys.write("toy_up.late", "def leave(name):\n    return f'bye {name}'\n")
    return lambda: importlib.import_module("toy_up.greet")


def test_a_distribution_other_than_megatron_is_read_from_its_metadata(toys, greet):
    toys.patch("toy-old", "toy_up.greet:greet", before="1.2")
    toys.patch("toy-new", "toy_up.greet:greet", since="1.2.0")
    toys.patch("toy-gone", "toy_away.greet:greet", distribution="toy-absent")
    rows = {row.id: (row.status, row.reason) for row in toys.apply()}
    refused = ("unsupported_version", "affects toy-upstream >=1,<1.2, found 1.2")
    assert (rows["toy-old"], rows["toy-new"][0]) == (refused, "pending_import")
    assert rows["toy-gone"] == ("not_installed", "toy-absent is not installed")


def test_a_package_on_the_path_without_metadata_goes_by_its_bodies(toys, greet):
    toys.patch("toy-fits", "toy_up.greet:greet", distribution="toy-absent")
    toys.patch("toy-not", "toy_up.greet:greet", distribution="toy-absent", relies_on="nowhere")
    toys.patch("toy-else", "toy_up.other:greet", distribution="toy-absent")
    greet()
    rows = toys.apply()
    assert (rows["toy-fits"].status, rows["toy-fits"].version) == ("applied", "unknown")
    assert rows["toy-not"].status == "drifted"
    assert rows["toy-else"].status == "missing_target"


def test_a_patch_with_two_targets_in_one_module_is_all_or_nothing(toys, greet):
    toys.patch("toy-both", "toy_up.greet:greet", "toy_up.greet:Door.knock")
    module = greet()
    knock = module.Door.knock
    upstream, module.greet = module.greet, ask
    row = toys.apply()["toy-both"]
    assert (row.status, module.Door.knock is knock) == ("conflict", True)
    module.greet = upstream
    assert toys.apply()["toy-both"].status == "applied"
    assert (module.greet("x"), module.Door().knock("x")) == ("hello x!", "knock x!")


def test_a_failure_at_the_second_target_takes_the_first_one_off_again(toys, greet):
    toys.patch("toy-both", "toy_up.greet:Door.knock", "toy_up.greet:greet")
    module = greet()
    knock = module.Door.knock
    del module.greet
    row = toys.apply()["toy-both"]
    assert (row.status, row.reason) == (
        "failed",
        "toy_up.greet has no greet, although its source defines that",
    )
    assert module.Door.knock is knock


def test_targets_in_two_modules_land_as_they_are_imported(toys, greet):
    toys.patch("toy-two", "toy_up.greet:greet", "toy_up.late:leave")
    toys.apply()
    assert toys.status("toy-two") == "pending_import"
    assert greet().greet("x") == "hello x!"
    row = report()["toy-two"]
    assert row.status == "pending_import"
    assert row.reason.endswith("rest lands with toy_up.late")
    import toy_up.late

    assert toy_up.late.leave("x") == "bye x!"
    assert toys.status("toy-two") == "applied"


def test_a_conflict_at_the_target_that_lands_late_takes_the_early_one_off(toys, greet):
    toys.write("toy_up.late", "def leave(name):\n    return name\n\nleave = str\n")
    toys.patch("toy-two", "toy_up.greet:greet", "toy_up.late:leave")
    toys.apply()
    assert greet().greet("x") == "hello x!"
    importlib.import_module("toy_up.late")
    assert toys.status("toy-two") == "conflict"
    assert greet().greet("x") == "hello x"


def test_names_left_alone_are_still_reported_when_the_rest_has_landed(toys, greet):
    toys.write("toy_user", "from toy_up.greet import greet\n")
    toys.patch("toy-two", "toy_up.greet:greet", "toy_up.late:leave")
    importlib.import_module("toy_user")
    toys.apply()
    importlib.import_module("toy_up.late")
    assert report()["toy-two"].reason.endswith("bound before us and left alone: toy_user.greet")


@pytest.mark.parametrize("first", ["toy_user", "toy_up.greet"])
def test_a_module_that_has_used_a_function_before_apply_is_warned_of(toys, greet, caplog, first):
    toys.write("toy_user", "from toy_up import greet\nGREETING = greet.greet('x')\n")
    toys.patch("toy-one", "toy_up.greet:greet", early_users=("toy_user",))
    importlib.import_module(first)
    toys.apply()
    greeting = importlib.import_module("toy_user").GREETING
    assert greeting == ("hello x" if first == "toy_user" else "hello x!")
    said = "bound before us and left alone: toy_user"
    assert report()["toy-one"].status == "applied"
    assert (said in report()["toy-one"].reason) == (first == "toy_user")
    warned = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert [said in each for each in warned] == ([True] if first == "toy_user" else [])


@pytest.mark.parametrize("order", list(itertools.permutations(["toy-a", "toy-b", "toy-c"])))
def test_patches_on_one_target_are_added_and_removed_in_any_order(toys, greet, order):
    module = greet()
    upstream = module.greet
    for patch_id, wrapper in (("toy-a", shout), ("toy-b", ask), ("toy-c", shout)):
        toys.patch(patch_id, "toy_up.greet:greet", wrapper=wrapper)
    for count in (1, 2, 3):
        toys.apply(*order[:count])
    first = module.greet
    assert first("x") == "hello x!?!"
    install.drop({order[1]})
    assert module.greet is first
    assert len(module.greet("x")) == len("hello x") + 2
    revert()
    assert module.greet is upstream
    toys.apply(*order)
    assert module.greet is first
    assert module.greet("x") == "hello x!?!"


def test_patched_takes_off_what_it_added_and_nothing_else(toys, greet):
    toys.patch("toy-a", "toy_up.greet:greet")
    toys.patch("toy-b", "toy_up.greet:greet", wrapper=ask)
    module = greet()
    toys.apply("toy-a")
    with patched(only=["toy-a", "toy-b"]) as rows:
        assert {rows["toy-a"].status, rows["toy-b"].status} == {"already_applied", "applied"}
        assert module.greet("x") == "hello x?!"
    assert module.greet("x") == "hello x!"
    with pytest.raises(KeyError), patched(only=["toy-b"]):
        raise KeyError
    assert module.greet("x") == "hello x!"


def test_dry_run_changes_nothing_and_sees_conflicts(toys, greet):
    toys.patch("toy-a", "toy_up.greet:greet")
    module = greet()
    upstream = module.greet
    assert toys.apply(dry_run=True)["toy-a"].reason.endswith("ready to land")
    assert module.greet is upstream
    assert toys.status("toy-a") == "disabled"
    module.greet = print
    assert toys.apply(dry_run=True)["toy-a"].status == "conflict"


def test_a_named_patch_that_fails_when_it_lands_undoes_the_whole_call(toys, greet):
    toys.patch("toy-a", "toy_up.greet:greet")
    toys.patch("toy-b", "toy_up.greet:Door.knock")
    toys.patch("toy-c", "toy_up.greet:greet", wrapper=ask)
    module = greet()
    upstream, knock = module.greet, module.Door.knock
    toys.apply("toy-c")
    before = {row.id: row for row in report()}

    # A class whose attributes cannot be set shows itself only in the attempt.
    class Meta(type):
        def __setattr__(cls, name: str, value: object) -> None:
            raise TypeError("immutable")

    module.Door = Meta("Door", (), {"knock": knock})
    with pytest.raises(PatchError, match="toy-b: failed"):
        apply(only=["toy-a", "toy-b"])
    assert module.greet("x") == "hello x?"
    assert {row.id: row for row in report()} == before
    assert set(install.state.wanted) & {"toy-a", "toy-b"} == set()
    revert()
    assert module.greet is upstream


def test_strict_mode_raises_before_anything_is_installed(toys, greet):
    toys.patch("toy-a", "toy_up.greet:greet")
    toys.patch("toy-b", "toy_up.greet:Door.knock", relies_on="name.upper()")
    module = greet()
    upstream = module.greet
    with pytest.raises(PatchError, match="toy-b: drifted"):
        toys.apply(strict=True)
    assert module.greet is upstream
    assert toys.status("toy-a") == "disabled"


def test_strict_mode_raises_from_report_and_verify_for_what_landed_late(toys, greet):
    toys.patch("toy-a", "toy_up.greet:greet")
    toys.apply(strict=True)
    toys.write("toy_up.greet", GREET.replace("name", "title"))
    greet()  # the import itself goes through
    with pytest.raises(PatchError, match="toy-a: drifted"):
        report()
    with pytest.raises(PatchError, match="toy-a: drifted"):
        verify()
    install.state.selection = None
    assert report()["toy-a"].status == "drifted"


def test_the_log_has_the_number_of_patches_and_their_names_at_debug_level(toys, greet, caplog):
    toys.patch("toy-one", "toy_up.greet:greet")
    greet()
    with caplog.at_level(logging.DEBUG, "megatron_idempotent"):
        toys.apply()
    told = [(each.levelname, each.getMessage()) for each in caplog.records]
    assert told == [
        ("INFO", "1 patches landed, so that 1 are in place"),
        ("DEBUG", "landed: toy-one"),
    ]


def test_a_hook_that_meets_a_drifted_body_warns_and_lets_the_import_through(toys, greet, caplog):
    toys.patch("toy-a", "toy_up.greet:greet", relies_on="name.upper()")
    toys.apply()
    assert greet().greet("x") == "hello x"
    assert "toy-a: drifted on 1.2 (greet (body " in caplog.text


def test_revert_forgets_what_was_waiting(toys, greet):
    toys.patch("toy-a", "toy_up.greet:greet")
    toys.apply()
    assert revert()["toy-a"].status == "disabled"
    assert greet().greet("x") == "hello x"
    assert len(revert()) == 0


def test_apply_is_safe_while_the_module_is_being_loaded_again(toys, greet):
    toys.patch("toy-a", "toy_up.greet:Door.knock")
    greet()
    toys.apply()
    del sys.modules["toy_up.greet"]
    toys.write("toy_mid", "import builtins\nbuiltins.toy_again()\n")
    source = "import toy_mid\n" + GREET
    toys.write("toy_up.greet", source)
    import builtins

    builtins.toy_again = toys.apply  # type: ignore[attr-defined]
    try:
        module = greet()
    finally:
        del builtins.toy_again  # type: ignore[attr-defined]
    assert module.Door().knock("x") == "knock x!"
    assert toys.status("toy-a") == "applied"


def test_every_patch_of_the_catalogue_has_a_row(toys):
    assert [row.id for row in report()] == list(patches())


def test_a_patch_that_is_off_by_default_is_applied_where_it_is_named(toys, greet, monkeypatch):
    toys.patch("toy-rare", "toy_up.greet:greet", default=False)
    module = greet()
    row = toys.apply("toy-rare")["toy-rare"]
    assert (row.status, row.reason) == ("disabled", "off by default: name it in only= to apply it")
    assert apply(only=["toy-rare"])["toy-rare"].status == "applied"
    assert module.greet("x") == "hello x!"
    revert()
    monkeypatch.setenv("MEGATRON_IDEMPOTENT_ONLY", "toy-rare")
    assert toys.apply("toy-rare")["toy-rare"].status == "applied"


def texts_kept() -> int:
    """Return how many texts of upstream's modules are kept."""
    return source._read_text.cache_info().currsize


def test_what_was_read_is_let_go_when_all_has_landed(toys):
    toys.greet()
    toys.apply(dry_run=True)
    assert texts_kept() == 0
    importlib.import_module("toy_up.greet")
    assert toys.apply()["toy-a"].status == "applied"
    assert texts_kept() == 0


def test_what_was_read_is_kept_while_a_package_is_being_imported_and_let_go_after_it(toys):
    toys.greet()
    toys.patch("toy-b", "toy_up.other:wave")
    toys.write("toy_up.other", "def wave(name):\n    return name\n")
    toys.write("toy_up.user", "kept = None")
    texts = "sys.modules['megatron_idempotent.patching.source']._read_text.cache_info().currsize"
    (toys.folder / "toy_up" / "__init__.py").write_text(
        f"import sys\nfrom . import greet\nKEPT = {texts}\nfrom . import other\n"
    )
    toys.apply()
    module = importlib.import_module("toy_up")
    assert toys.status("toy-b") == "applied"
    assert module.KEPT > 0
    assert texts_kept() == 0
