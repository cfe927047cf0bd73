"""docs/benchmarks.md, its grid and pictures, and that of the history are what their data say."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import _device, _grid, _history, _record, page

ROOT = Path(__file__).parents[2]
DRAWN = page.DOCS / page.PICTURES
REMEDY = "run `python -m benchmarks.page` in the repository"


def test_the_page_is_current():
    found = page.known(ROOT)
    assert (ROOT / page.PAGE).read_text("utf-8") == page.page(found), REMEDY
    grid = _grid.text(page.grid(found, page.summaries(ROOT)))
    assert (ROOT / _grid.FOLDER / "benchmarks.json").read_text("utf-8") == grid, REMEDY
    drawn = {path.stem: path.read_text("utf-8") for path in (ROOT / DRAWN).glob("*.svg")}
    assert drawn == page.pictures(found), REMEDY


def test_the_picture_of_the_history_is_current():
    found = json.loads((ROOT / _history.FOUND).read_text("utf-8"))
    drawn = _history.draw(found, _history.pinned(found, ROOT))
    remedy = f"run `python -m benchmarks._history {_history.FOUND}` in the repository"
    assert (ROOT / _history.PICTURE).read_text("utf-8") == drawn, remedy


def test_every_benchmark_is_on_the_page_or_measures_no_ratio():
    names = {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")} - {"page"}
    assert names - set(page.MEANINGS) == {"compiled_kernels"}
    assert set(page.MEANINGS) <= names


@pytest.fixture(scope="module")
def machine():
    return _record.machine() | {"use_per_core": 0.0}


def left(folder, name, its, found):
    _record.record(folder, name, its, ["--json"], found)
    return folder


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    return tmp_path


def blocks(root, title):
    """The blocks that the written grid has of a benchmark."""
    grid = json.loads((root / _grid.FOLDER / "benchmarks.json").read_text("utf-8"))
    (found,) = (section["blocks"] for section in grid if section["title"] == title)
    return found


def test_only_ratios_are_shown_and_a_new_run_replaces_the_old_one(checkout, machine):
    found = {"first_s": 3.0, "later_s": 0.75, "ratio": 0.25}
    for folder, ratio in (("a", 0.25), ("b", 0.125)):
        left(checkout / folder, "rank_calls", machine, found | {"ratio": ratio})
        page.main([str(checkout / folder)], checkout)
    text = (checkout / page.PAGE).read_text("utf-8")
    assert "| a call on warm CPU ranks ÷ the first call | 12.5 % |\n" in text
    assert "`patched_step`, " in text.partition("\nNot run yet: ")[2]
    _, told, _, command, table = blocks(checkout, "Calling CPU ranks")
    assert "ranks that are warm takes 12.5 % of the time of the first one" in told["text"]
    assert table == {"head": ["", "ratio"], "rows": [["ratio", "0.125"]]}
    assert f"{machine['cpu']}, {machine['cores']} cores" in command["text"]


def test_the_use_of_a_core_is_measured(machine):
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        found = _record.machine()["use_per_core"]
        other.kill()
    assert found is None or found > 0.5 / machine["cores"]


@pytest.mark.parametrize("how", [{"busy": True}, {"use_per_core": 0.5}])
def test_a_run_on_a_busy_machine_is_marked(checkout, machine, how):
    left(checkout / "a", "rank_calls", machine | how, {"ratio": 0.25})
    page.main([str(checkout / "a")], checkout)
    assert "| 25.0 %, busy |\n" in (checkout / page.PAGE).read_text("utf-8")
    assert "The machine was busy" in blocks(checkout, "Calling CPU ranks")[1]["text"]


def test_rows_of_a_list_are_named_by_their_words():
    rows = [{"what": "top-k", "dtype": "float32", "side": "ours", "seconds": 2.0, "time": 0.5}]
    assert page.ratios("distillation", rows) == {"top-k, float32, ours, time": 0.5}


def test_rows_with_the_same_words_are_told_apart_by_what_they_keep():
    rows = [{"side": "ours", "tokens": 8, "kept": kept, "memory": kept} for kept in (1.0, 0.4)]
    assert page.ratios("token_logprobs", rows) == {
        "ours, 8 tokens, memory": 1.0,
        "ours, 8 tokens, 40% kept, memory": 0.4,
    }


def test_a_gpu_stands_beside_the_cpu_with_its_limit(checkout, machine):
    lower = {"of_lower_quartiles": 1.0}
    cpu, gpu = {"ratio": 1.25}, {"ratio": _device.aim(1.5, 1.75)}
    for label, wall in (("", cpu), ("h100", gpu)):
        folder = left(checkout / f"on{label}", "patched_step", machine, {"wall": wall | lower})
        page.main([str(folder), *(["--machine", label] if label else [])], checkout)
    text = (checkout / page.PAGE).read_text("utf-8")
    assert "| | CPU | H100 |\n" in text
    assert "| a step with patches ÷ stock Megatron's | 1.250 | 1.500 |\n" in text
    _, on_cpu, on_gpu, picture, *_ = blocks(checkout, "A step with patches")
    assert on_cpu["text"].startswith("CPU: A training step that hits no hazard takes 1.250 times")
    assert on_gpu["text"].startswith("H100: A training step that hits no hazard takes 1.500 times")
    assert picture["alt"] == "1.0 is stock Megatron's step: CPU wall 1.25; H100 wall 1.5"
    assert (checkout / _grid.FOLDER / picture["picture"]).resolve().is_file()
    drawn = (checkout / DRAWN / "patched_step.svg").read_text("utf-8")
    assert drawn.index(">CPU<") < drawn.index(">1.25<") < drawn.index(">H100<")
    assert drawn.count("stroke-width") == 1
    assert ">1.5 (at most 1.75)<" in drawn


def test_a_row_and_a_sentence_are_left_out_where_its_numbers_are_missing(checkout, machine):
    found = {"shared_memory": {"of_a_copy": 0.125}, "gloo": {"of_a_copy": 0.5}}
    left(checkout / "a", "weight_transports", machine, found)
    page.main([str(checkout / "a")], checkout)
    text = (checkout / page.PAGE).read_text("utf-8")
    assert "| weights through shared memory ÷ a copy in memory | 12.5 % |\n" in text
    told = blocks(checkout, "Carrying weights to another process")[1]["text"]
    assert "Shared memory carries weights at 12.5 % of the rate" in told
    assert "CUDA IPC" not in text + told


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (None, "", "has no NAME.json"),
        ("mine", "{}", "is of no benchmark"),
        ("rank_calls", "[", "is not what `python -m benchmarks --json` writes"),
        ("rank_calls", "{}", "is not what `python -m benchmarks --json` writes"),
    ],
)
def test_results_that_cannot_be_read_are_refused(tmp_path, name, content, said):
    if name is not None:
        (tmp_path / f"{name}.json").write_text(content)
    with pytest.raises(ValueError, match=said):
        page.read(tmp_path)


def test_a_result_without_a_ratio_is_refused(tmp_path, machine):
    with pytest.raises(ValueError, match="ratio"):
        page.read(left(tmp_path, "rank_calls", machine, {"first_s": 3.0}))


def test_what_a_benchmark_prints_beside_its_json_is_refused():
    with pytest.raises(ValueError, match="first call"):
        _record.captured("rank_calls", lambda: print("first call 3 s"))


def test_a_part_is_said_on_standard_error_beside_the_json(capfd):
    def main() -> None:
        _record.progress("two stages")
        print('{"ratio": 1.5}')

    assert _record.captured("rank_calls", main) == {"ratio": 1.5}
    out, err = capfd.readouterr()
    assert (out, err[8:]) == ("", " two stages …\n")


def test_a_result_that_goes_into_a_file_is_printed_too(tmp_path, monkeypatch, capsys):
    quick = ModuleType("benchmarks.rank_calls")
    quick.main = lambda: print('{"ratio": 1.5}')
    monkeypatch.setitem(sys.modules, quick.__name__, quick)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "rank_calls", "--json", str(tmp_path)])
    runpy.run_path(str(ROOT / "benchmarks" / "__main__.py"))
    heading, result = capsys.readouterr().out.splitlines()
    assert (heading, result.split()) == ("# rank_calls", ["ratio", "1.5"])
    assert json.loads((tmp_path / "rank_calls.json").read_text())["found"] == {"ratio": 1.5}


@pytest.mark.exhaustive
def test_the_command_writes_what_the_page_reads(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "rank_calls", "--busy", "--json", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run = page.read(tmp_path)["rank_calls"]
    assert run["machine"]["busy"]
    assert [*page.ratios("rank_calls", run["found"])] == ["ratio"]
