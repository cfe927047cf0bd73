"""Repairs of upstream's own code: edits at anchors, made all or not at all, and judged."""

from __future__ import annotations

import difflib
import re
from dataclasses import replace as with_fields
from pathlib import Path

import pytest
import repairs
from repairs import Result, changed_lines, faults, make, repaired

from megatron_idempotent.cli.drift import compare
from megatron_idempotent.cli.trees import open_trees
from megatron_idempotent.patching.catalog import hazards
from megatron_idempotent.patching.record import Patch
from megatron_idempotent.patching.source import locate
from upstream.edits import (
    AnchorError,
    Repair,
    after,
    before,
    decorate,
    edited,
    first,
    last,
    replace,
    substitute,
    wrap,
)

SOURCE = '''\
import gc


class Loop:
    """Trains."""

    def step(self, data,
             again=False):
        """Take a step."""
        # Reads a batch.
        batch = next(data)
        if batch is None:
            return None
        elif again:
            text = """
kept"""
            self.log('text', text)
        return batch


def train(loop):
    def inner(_loop):
        gc.disable()

    inner(loop)
    for _ in range(3):
        loop.step(loop.data)
'''


@pytest.mark.parametrize(
    ("edit", "old", "new"),
    [
        (
            before("m:Loop.step", "next(data)", "data = iter(data)"),
            "        # Reads a batch.\n",
            "        data = iter(data)\n        # Reads a batch.\n",
        ),
        (
            after("m:Loop.step", "if batch is None", "self.count += 1"),
            "        return batch\n",
            "        self.count += 1\n        return batch\n",
        ),
        (
            after("m:train", "gc.disable()", "gc.collect()"),
            "        gc.disable()\n",
            "        gc.disable()\n        gc.collect()\n",
        ),
        (
            replace("m:train", "for _ in range(3)", "while loop.data:\n    loop.step(loop.data)"),
            "    for _ in range(3):\n        loop.step(loop.data)\n",
            "    while loop.data:\n        loop.step(loop.data)\n",
        ),
        (replace("m:train", "inner(loop)", ""), "    inner(loop)\n", ""),
        (
            replace("m:Loop.step", "batch = next(data)", ""),
            "        # Reads a batch.\n        batch = next(data)\n",
            "",
        ),
        (substitute("m:Loop.step", "again=False", "again=True"), "again=False", "again=True"),
        (
            substitute("m:Loop.step", "batch is None", "batch is None or again"),
            "batch is None",
            "batch is None or again",
        ),
        (
            wrap("m:train", "inner(loop)", "try:", "finally:\n    gc.enable()", until="..."),
            "    inner(loop)\n    for _ in range(3):\n        loop.step(loop.data)\n",
            "    try:\n        inner(loop)\n        for _ in range(3):\n"
            "            loop.step(loop.data)\n"
            "    finally:\n        gc.enable()\n",
        ),
        (
            wrap("m:train", "inner(loop)", "try:", "finally:", below="..."),
            "    inner(loop)\n    for _ in range(3):\n        loop.step(loop.data)\n",
            "    try:\n        inner(loop)\n    finally:\n        for _ in range(3):\n"
            "            loop.step(loop.data)\n",
        ),
        (
            wrap("m:Loop.step", "if batch is None", "with self.lock:"),
            SOURCE[SOURCE.index("        if batch") : SOURCE.index("        return batch")],
            "        with self.lock:\n            if batch is None:\n                return None\n"
            '            elif again:\n                text = """\nkept"""\n'
            "                self.log('text', text)\n",
        ),
        (
            first("m:Loop.step", "assert data"),
            "        # Reads a batch.\n",
            "        assert data\n        # Reads a batch.\n",
        ),
        (first("m:train", "gc.collect()"), "    def inner", "    gc.collect()\n    def inner"),
        (
            last("m:Loop", "\ndef close(self):\n    pass"),
            "        return batch\n",
            "        return batch\n    def close(self):\n        pass\n",
        ),
        (decorate("m:Loop.step", "@safely"), "    def step", "    @safely\n    def step"),
        (after("m", "import gc", "import os"), "import gc\n", "import gc\nimport os\n"),
    ],
    ids=lambda value: value.action if hasattr(value, "action") else None,
)
def test_an_edit_changes_its_place_and_no_other(edit, old, new):
    assert SOURCE.count(old) == 1
    assert edited(SOURCE, edit) == SOURCE.replace(old, new)


def test_an_anchor_may_have_other_quotes_and_line_breaks_than_the_source():
    edit = after("m:Loop.step", 'self.log(\n    "text",\n    text)', "pass")
    assert "            self.log('text', text)\n            pass\n" in edited(SOURCE, edit)


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        (after("m:train", "gc.enable()", "pass"), "`gc.enable()` is not in m:train"),
        (after("m:Loop.step", "return", "pass"), "m:Loop.step 2 times: lines 13, 18"),
        (after("m:Loop.stop", "x", "pass"), "m has no definitions of Loop.stop"),
        (after("m", "gc.disable()", "pass"), "`gc.disable()` is not in m"),
        (before("m:Loop.step", "if again", "pass"), "is an elif of m:Loop.step"),
        (substitute("m:Loop.step", "text", "t"), "one statement of m:Loop.step 2 times"),
        (substitute("m:train", "gc. disable", "t"), "`gc. disable` is not in m:train"),
        (
            wrap("m:train", "loop.step", "try:", until="gc.disable()"),
            "`gc.disable()` does not follow `loop.step` in m:train",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_an_anchor_that_is_not_there_once_is_an_error_by_name(edit, error):
    with pytest.raises(AnchorError, match=re.escape(error)):
        edited(SOURCE, edit)


REPAIRS = {
    "fits": [after("package.loop:train", "gc.disable()", "gc.collect()")],
    "builds-on-it": [after("package.loop:train", "gc.collect()", "gc.freeze()")],
    "half-fits": [
        after("package.loop:train", "inner(loop)", "assert loop.data is not None"),
        after("package.loop:train", "gc.thaw()", "gc.collect()"),
    ],
}


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Path:
    """A checkout with one module, and three repairs of it."""
    (tmp_path / "clone" / "package").mkdir(parents=True)
    (tmp_path / "clone" / "package" / "loop.py").write_text(SOURCE)
    made = {name: Repair(edits=tuple(edits)) for name, edits in REPAIRS.items()}
    made["builds-on-it"] = with_fields(made["builds-on-it"], after=("fits",))
    monkeypatch.setattr(repairs, "repaired", lambda: sorted(made))
    monkeypatch.setattr(repairs, "repair_of", made.__getitem__)
    return tmp_path / "clone"


def run(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["repairs.py", *map(str, arguments)])
    return repairs.main()


def test_apply_makes_each_repair_whole_or_not_at_all_and_once(clone, monkeypatch, capsys):
    assert run(monkeypatch, "apply", clone) == 1
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "fits: applied",
        "builds-on-it: applied",
        "half-fits: `gc.thaw()` is not in package.loop:train",
    ]
    text = (clone / "package" / "loop.py").read_text()
    lines = "        gc.disable()\n        gc.collect()\n        gc.freeze()\n"
    assert text == SOURCE.replace("        gc.disable()\n", lines)
    assert run(monkeypatch, "apply", clone, "builds-on-it") == 0
    said = capsys.readouterr().out.splitlines()
    assert said == ["fits: already applied", "builds-on-it: already applied"]
    assert (clone / "package" / "loop.py").read_text() == text


def test_a_repair_of_common_lines_is_not_taken_for_made(clone, monkeypatch, capsys):
    text = SOURCE + "\n\ntry:\n    import torch\nfinally:\n    gc.enable()\n"
    (clone / "package" / "loop.py").write_text(text)
    edit = wrap("package.loop:train", "inner(loop)", "try:", "finally:\n    gc.disable()")
    monkeypatch.setattr(repairs, "repair_of", lambda _: Repair(edits=(edit,)))
    for outcome in ("applied", "already applied"):
        assert run(monkeypatch, "apply", clone, "fits") == 0
        assert capsys.readouterr().out == f"fits: {outcome}\n"


def test_a_diff_has_one_repair_and_leaves_the_checkout(clone, monkeypatch, capsys):
    assert run(monkeypatch, "diff", clone, "builds-on-it") == 0
    shown = capsys.readouterr().out
    assert "+++ b/package/loop.py\n" in shown
    assert [line for line in shown.splitlines() if re.match(r"[+-][^+-]", line)] == [
        "+        gc.freeze()"
    ]
    assert changed_lines(shown) == 1
    assert run(monkeypatch, "diff", clone, "half-fits") == 1
    assert "`gc.thaw()` is not in package.loop:train" in capsys.readouterr().err
    assert (clone / "package" / "loop.py").read_text() == SOURCE


def test_lines_that_are_only_indented_are_not_counted():
    edit = wrap("m:train", "inner(loop)", "try:", "finally:\n    gc.enable()", until="...")
    old, new = (text.splitlines(keepends=True) for text in (SOURCE, edited(SOURCE, edit)))
    shown = "".join(difflib.unified_diff(old, new, "a/m.py", "b/m.py"))
    assert changed_lines(shown) == 3


STOCK = Result(
    statuses={"fits": "applied", "other": "applied"},
    reasons={"fits": "", "other": ""},
    reproductions={"fits": "Fault: it is there"},
    controls={"fits": [1.0]},
    unit_tests={
        "test_repair_fits.py": {"test_it": ["failed: it is there"]},
        "test_theirs.py": {"test_theirs": ["passed"]},
    },
    programs={"plain": (["all_reduce"], [b"bits"])},
)
MENDED = with_fields(
    STOCK,
    statuses={"fits": "fixed_upstream", "other": "applied"},
    reproductions={"fits": "ok"},
    unit_tests={
        "test_repair_fits.py": {"test_it": ["passed"]},
        "test_theirs.py": {"test_theirs": ["passed"]},
    },
)


def test_a_proof_that_holds_has_no_fault(clone):
    assert list(faults("fits", STOCK, MENDED)) == []


@pytest.mark.parametrize("before", [{"test_theirs": ["failed: of the hazard"]}, {}])
def test_upstreams_tests_may_pass_after_a_repair_that_did_not_before(clone, before):
    stock = with_fields(STOCK, unit_tests={**STOCK.unit_tests, "test_theirs.py": before})
    passed = {**MENDED.unit_tests, "test_theirs.py": {"test_theirs": ["passed"]}}
    assert list(faults("fits", stock, with_fields(MENDED, unit_tests=passed))) == []
    cut_off = {**MENDED.unit_tests, "test_theirs.py": {}}
    found = list(faults("fits", stock, with_fields(MENDED, unit_tests=cut_off)))
    assert found == [f"{test}: {was} before, cut off after" for test, was in before.items()]


def test_a_patch_stays_where_a_repair_leaves_a_part_of_its_hazard(clone, monkeypatch):
    repair = with_fields(repairs.repair_of("fits"), leaves="two instances")
    monkeypatch.setattr(repairs, "repair_of", lambda _: repair)
    for status in ("applied", "drifted"):
        kept = with_fields(MENDED, statuses={"fits": status, "other": "applied"})
        assert list(faults("fits", STOCK, kept)) == []
    assert list(faults("fits", STOCK, MENDED)) == ["apply() says fixed_upstream of fits: "]


def test_in_one_tree_each_repair_may_end_other_hazards_and_change_what_patches_rely_on(
    clone, monkeypatch
):
    named = {"fits": repairs.repair_of("fits"), "other": repairs.repair_of("half-fits")}
    monkeypatch.setattr(repairs, "repair_of", named.__getitem__)
    both = with_fields(MENDED, statuses=dict.fromkeys(("fits", "other"), "fixed_upstream"))
    assert list(faults("fits", STOCK, both)) == [
        "apply() says fixed_upstream of other, not applied: "
    ]
    assert list(faults("fits", STOCK, both, ("fits", "other"))) == []
    named["fits"] = with_fields(named["fits"], rereads=("other",))
    assert list(faults("fits", STOCK, both, ("fits", "other"))) == []
    drifted = with_fields(MENDED, statuses={"fits": "fixed_upstream", "other": "drifted"})
    assert list(faults("fits", STOCK, drifted)) == []
    assert len(list(faults("fits", STOCK, MENDED))) == 1


@pytest.mark.parametrize(
    ("stock", "mended", "fault"),
    [
        ({"reproductions": {"fits": "ok"}}, {}, "fits is not there before the repair"),
        ({}, {"reproductions": {"fits": "Fault: x"}}, "fits is still there: Fault: x"),
        (
            {},
            {"statuses": {"fits": "applied", "other": "applied"}},
            "apply() says applied of fits: ",
        ),
        (
            {},
            {"statuses": {"fits": "fixed_upstream", "other": "drifted"}},
            "apply() says drifted of other, not applied: ",
        ),
        ({}, {"controls": {"fits": [2.0]}}, "the correct program beside fits has other bits"),
        (
            {"unit_tests": {"test_repair_fits.py": {"test_it": ["passed"]}}},
            {"unit_tests": {"test_repair_fits.py": {"test_it": ["passed"]}}},
            "its unit test does not fail before the repair: {'test_it': ['passed']}",
        ),
        (
            {},
            {"unit_tests": {"test_repair_fits.py": {}}},
            "its unit test does not pass after the repair: {}",
        ),
        (
            {},
            {"unit_tests": {**MENDED.unit_tests, "test_theirs.py": {"test_theirs": ["failed"]}}},
            "test_theirs: ['passed'] before, ['failed'] after",
        ),
        (
            {"controls": {"fits": "ValueError: no"}},
            {"controls": {"fits": "ValueError: no"}},
            "the correct program beside fits fails on stock: ValueError: no",
        ),
        (
            {"programs": {"plain": "ValueError: no"}},
            {"programs": {"plain": "ValueError: no"}},
            "program plain fails on stock: ValueError: no",
        ),
        (
            {},
            {"programs": {"plain": (["all_reduce", "barrier"], [b"bits"])}},
            "program plain has other bits or collectives",
        ),
    ],
)
def test_a_proof_names_what_speaks_against_it(clone, stock, mended, fault):
    assert list(faults("fits", with_fields(STOCK, **stock), with_fields(MENDED, **mended))) == [
        fault
    ]


def test_a_repair_of_an_unknown_hazard_is_refused(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="nothing"):
        run(monkeypatch, "apply", tmp_path, "nothing")


@pytest.mark.parametrize("hazard_id", repaired())
def test_a_folder_has_what_a_pull_request_needs(hazard_id):
    folder = repairs.FOLDER / hazard_id
    repair = repairs.repair_of(hazard_id)
    assert {path.name for path in folder.iterdir() if path.is_file()} == {
        "repair.py",
        "test_repair.py",
        "message.md",
    }
    message = (folder / "message.md").read_text("utf-8")
    title = message.splitlines()[0]
    assert re.fullmatch(r"# fix(\(.+\))?: .{10,}", title)
    assert len(title) <= 74
    assert len(message.split()) <= 270
    for file in folder.iterdir():
        if file.suffix == ".md" or file.name == "test_repair.py":
            assert not re.search(
                r"megatron.idempotent|hazard", file.read_text("utf-8"), re.IGNORECASE
            )
    for own in (hazard_id, *repair.also):
        hazard = hazards()[own]
        assert isinstance(hazard, Patch)
        assert hazard.fixed_by or hazard.fixed_when or repair.leaves, "apply() has to know it"
        assert f"upstream/{hazard_id}" in hazard.case_file["Remove when"]
    assert {*repair.rereads, *repair.after} <= hazards().keys()


@pytest.mark.full
def test_drift_sees_each_repair_that_fits_the_installed_release(tmp_path):
    module = locate("megatron.core")
    assert module is not None
    tree = tmp_path / "Megatron-LM"
    repairs.copied(module.parents[1], tree / "megatron")
    outcomes = dict(make(tree, repairs.chosen(tree, [])))
    made = {name for name, outcome in outcomes.items() if outcome == "applied"}
    standings = {row.id: row.standing for row in compare(open_trees([tree]))}
    names = {own for name in made for own in (name, *repairs.repair_of(name).also)}
    names -= {name for name in made if repairs.repair_of(name).leaves}
    not_seen = {name: standings[name] for name in names if standings[name] != "fixed_upstream"}
    assert not not_seen
    assert made, outcomes
