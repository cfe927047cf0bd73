"""The table and the lines of progress, the curves, the table and the loggers of a run."""

import importlib
import io
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")

from megatron_idempotent.rl.metrics.console import RolloutProgress
from megatron_idempotent.rl.metrics.loggers import read_metrics
from megatron_idempotent.rl.metrics.names import (
    GRAD_NORM,
    HELD_OUT,
    LOSS,
    POSITIONS,
    REWARD,
    TOKENS_PER_S,
    TOTAL_S,
)
from megatron_idempotent.rl.trainer.config import load_config
from megatron_idempotent.rl.trainer.output import Job
from megatron_idempotent.rl.trainer.report import (
    draw_curves,
    make_loggers,
    print_summary,
    summarize,
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def row(reward, **more):
    counted = {TOTAL_S: 2.0, TOKENS_PER_S: 50.0, POSITIONS: 200.0}
    return {REWARD: reward, LOSS: 0.1, GRAD_NORM: 1.0, **counted, **more}


ROWS = [
    {"step": 0, HELD_OUT: 0.05},
    {"step": 1, **row(0.2, **{HELD_OUT: 0.9})},
    {"step": 2, **row(0.3, **{HELD_OUT: 0.8})},
    {"step": 3, **row(0.5)},
]


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_terminal_has_a_table_and_a_file_a_line_per_evaluation(kind):
    output = kind()
    progress = RolloutProgress(output, rollouts=150)
    for each in ROWS:
        progress.log(each, step=each["step"])
    progress.close()
    said = output.getvalue()
    if kind is Terminal:
        assert "3/150" in said
        last = said.split("3/150")[-1]
        for shown in ("0.500", "0.800", "+0.100", "1.0", "50 tok/s", "5 min"):
            assert shown in last
    else:
        last = "rollout 2/150 reward 0.300 held-out 0.800 loss +0.100 grad 1.0 speed 50 tok/s"
        first, _, third = said.splitlines()
        assert (first, third) == ("rollout 0/150 held-out 0.050", last)


def test_the_table_sums_time_and_finds_first_last_and_best_and_curves_are_drawn(tmp_path, capsys):
    assert list(summarize(ROWS).values()) == [3, 0.05, 0.8, 0.9, 6.0, 50.0, 2.0]
    print_summary(ROWS, tmp_path)
    assert "0.800" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    figure = draw_curves(ROWS, tmp_path / "curves.png", step="rollout")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    axes, _ = figure.axes
    # A run that was stopped in its first rollout has nothing but an evaluation.
    stopped, _ = draw_curves(ROWS[:1], tmp_path / "stopped.png", step="rollout").axes
    assert [list(line.get_ydata()) for line in stopped.lines] == [[], [0.05]]
    legend = axes.get_legend().get_window_extent()
    assert legend.y0 >= axes.bbox.y1, "above the axes, it lies on no line"
    assert figure.bbox.contains(legend.x1, legend.y1)
    assert figure.bbox.containsx(legend.x0)


@pytest.mark.parametrize("threaded", [False, True])
def test_every_logger_of_a_run_hears_of_every_row(threaded, tmp_path, monkeypatch):
    module = f"my_logger_{threaded}"
    (tmp_path / f"{module}.py").write_text(
        "HEARD = []\n"
        "class Mine:\n"
        "    def __init__(self, directory, *, first_step): ...\n"
        "    def log(self, metrics, *, step): HEARD.append((step, metrics))\n"
        "    def close(self): HEARD.append('closed')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    job = Job(config=load_config(None, [f"controller.loggers={module}:Mine"]), out=tmp_path)
    table = importlib.import_module(module).Mine(tmp_path, first_step=0)
    loggers = make_loggers(job, table, threaded=threaded)
    loggers.log({REWARD: 0.5}, step=3)
    loggers.close()
    assert [(3, {REWARD: 0.5})] * 2 + ["closed"] * 2 == sys.modules[module].HEARD
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 3, REWARD: 0.5}]
