"""docs/layouts.md, docs/state.md and their grids are what their data say."""

import json
from pathlib import Path

import pytest

from benchmarks import _grid, _states
from benchmarks import _layouts as page
from megatron_idempotent.proof.certify import Result
from megatron_idempotent.proof.certify.main import as_json

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("page", [page, _states])
def test_the_page_is_current(page):
    found = json.loads((ROOT / page.FOUND).read_text("utf-8"))
    remedy = f"run `python -m {page.__name__}` in the repository"
    assert (ROOT / page.PAGE).read_text("utf-8") == page.page(found), remedy
    written = (ROOT / _grid.FOLDER / f"{page.PAGE.stem}.json").read_text("utf-8")
    assert written == _grid.text(page.grid(found)), remedy


def sections(root, name):
    """The sections of a grid that was written below a folder, by their titles."""
    grid = json.loads((root / _grid.FOLDER / f"{name}.json").read_text("utf-8"))
    return {section["title"]: section["blocks"] for section in grid}


def left(folder, megatron, adapter, *results):
    path = folder / megatron / f"{adapter}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_json(results), encoding="utf-8")
    return folder


def result(layout, verdict="passed", of_bound=0.125, **others):
    return Result(check="whole-step", layout=layout, verdict=verdict, of_bound=of_bound, **others)


def test_findings_are_merged_by_megatron_and_adapter(tmp_path):
    (tmp_path / "docs").mkdir()
    for name, results in {
        "0.1": [result("dp2"), result("pp2", "failed", fault="it is off")],
        "0.2": [result("dp2", "not offered"), result("pp2", of_bound=0.5)],
    }.items():
        folder = left(tmp_path / name, name, "Window", *results)
        left(tmp_path / name, name, "SplitStep", *results)
        assert page.main([str(folder)], tmp_path) == 0
    text = (tmp_path / page.PAGE).read_text("utf-8")
    assert f"| {page.ADAPTERS['Window']} | **1**/2, 0.12 | 1/1, 0.5 |\n" in text
    assert "\n- 0.1, `pp2`, `whole-step`: it is off\n" in text
    grid = sections(tmp_path, "layouts")
    _, checks = grid["`TrainStep`: faults, resumes and the rest"]
    rows = {name: cells for name, *cells in checks["rows"]}
    assert rows["`whole-step`"][:2] == ["1 of 2", "1 of 1"]
    assert rows["`whole-step`"][2].startswith("a step in one call ")
    assert rows["`nan`"][:2] == ["not run", "not run"]
    table, faults = grid[page.ADAPTERS["Window"]]
    assert table["head"] == ["layout", "0.1", "0.2"]
    assert table["rows"] == [["`dp2`", "0.12", "–"], ["`pp2`", "failed", "0.5"]]
    assert faults["list"] == ["0.1, `pp2`, `whole-step`: it is off"]


def test_bits_are_told_by_the_numbers_of_replicas_that_have_the_same(tmp_path):
    (tmp_path / "docs").mkdir()
    rows = [
        Result(check="same-bits", layout=name, verdict=verdict)
        for name, verdict in {
            "dp1": "passed",
            "dp4": "passed",
            "dp1-moe": "passed",
            "dp2-moe": "failed",
            "ep2": "not offered",
        }.items()
    ]
    assert page.main([str(left(tmp_path, "0.1", "OrderStable", *rows))], tmp_path) == 0
    _, table, _ = sections(tmp_path, "layouts")[page.ADAPTERS["OrderStable"]]
    assert table["rows"] == [["`dp`", "1, 4"], ["`moe`", "differ"], ["`ep2`", "–"]]
    assert "| **3**/4 |\n" in (tmp_path / page.PAGE).read_text("utf-8")


def test_some_layouts_that_are_run_again_leave_the_others_as_they_were(tmp_path):
    (tmp_path / "docs").mkdir()
    for folder, results in {
        "a": [result("dp2", "failed", fault="it is off"), result("pp2", of_bound=0.5)],
        "b": [result("dp2", of_bound=0.25)],
    }.items():
        assert page.main([str(left(tmp_path / folder, "0.1", "Window", *results))], tmp_path) == 0
    text = (tmp_path / page.PAGE).read_text("utf-8")
    assert "| 2/2, 0.5 |\n" in text
    assert "it is off" not in text
    (table,) = sections(tmp_path, "layouts")[page.ADAPTERS["Window"]]
    assert table["rows"] == [["`dp2`", "0.25"], ["`pp2`", "0.5"]]


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda folder: None, "has no MEGATRON/ADAPTER.json"),
        (lambda folder: left(folder, "0.1", "Mine", result("dp2")), "is of no adapter"),
        (lambda folder: left(folder, "0.1", "Window").joinpath("0.1/Window.json").write_text("["),
         "is not what `certify --json` prints"),
    ],
)  # fmt: skip
def test_findings_that_cannot_be_read_are_refused(tmp_path, write, said):
    write(tmp_path)
    with pytest.raises(ValueError, match=said):
        page.read(tmp_path)


def test_a_grid_without_our_own_step_has_no_table_of_its_checks(tmp_path):
    (tmp_path / "docs").mkdir()
    page.main([str(left(tmp_path / "of", "0.1", "Window", result("dp2")))], tmp_path)
    assert [*sections(tmp_path, "layouts")] == [page.ADAPTERS["Window"]]


def test_a_format_is_told_by_check_and_megatron(tmp_path):
    (tmp_path / "docs").mkdir()
    rows = [
        Result(check="rollback", layout="dp2", verdict="passed"),
        Result(check="rollback", layout="ep2", verdict="declared", fault="it is known"),
        Result(check="reshard-dp", layout="ep2", verdict="declared", fault="it is known"),
        Result(check="keeps-random", layout="ep2", verdict="declared", fault="it is known"),
        Result(check="async-save", layout="dp2", verdict="not offered"),
        Result(check="save-and-go-on", layout="ep2", verdict="passed"),
    ]
    assert _states.main([str(left(tmp_path, "0.1", "Legacy", *rows))], tmp_path) == 0
    assert _states.main([str(left(tmp_path / "b", "0.2", "Legacy", *rows[:1]))], tmp_path) == 0
    text = (tmp_path / _states.PAGE).read_text("utf-8")
    assert f"| {_states.ADAPTERS['Legacy']} | **1**/4 | 1/1 |\n" in text
    _, table, faults = sections(tmp_path, "state")[_states.ADAPTERS["Legacy"]]
    rows = {name: cells for name, *cells in table["rows"]}
    assert rows["`rollback`"][:2] == ["no", "ok"]
    assert rows["`save-and-go-on`"][:2] == ["ok", "not run"]
    assert rows["`save-and-go-on`"][2].startswith("a save, ")
    assert "`async-save`" not in rows
    assert faults["list"] == ["0.1, `ep2`, `rollback`, `reshard-dp`, `keeps-random`: it is known"]
