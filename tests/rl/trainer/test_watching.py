"""The bar, the curves and the table."""

import io

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")

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
from megatron_idempotent.rl.trainer.report import (
    ProgressBar,
    draw_curves,
    make_progress,
    print_summary,
    summarize,
)


def row(reward, held_out=None):
    counted = {TOTAL_S: 2.0, TOKENS_PER_S: 50.0, POSITIONS: 200.0}
    metrics = {REWARD: reward, LOSS: 0.1, GRAD_NORM: 1.0, **counted}
    return metrics if held_out is None else {**metrics, HELD_OUT: held_out}


def test_without_a_terminal_there_is_a_line_per_evaluation():
    output = io.StringIO()
    progress = make_progress(load_config(), first_rollout=0, terminal=output)
    progress.log({HELD_OUT: 0.05}, step=0)
    progress.log(row(0.3), step=1)
    progress.log(row(0.4, held_out=0.35), step=2)
    progress.close()
    lines = output.getvalue().splitlines()
    assert lines[0].endswith("held-out 0.050")
    assert "reward 0.400  held-out 0.350  loss +0.1000  grad norm 1.00  50 tokens/s" in lines[1]
    assert len(lines) == 2


def test_the_bar_shows_the_last_numbers_and_the_last_held_out_reward():
    output = io.StringIO()
    bar = ProgressBar(10, 0, output)
    bar.log(row(0.4, held_out=0.35), step=2)
    bar.log(row(0.5), step=3)
    bar.close()
    assert "3/10" in output.getvalue()
    assert "reward 0.50 held-out 0.35 loss +0.10 grad 1.0 50 tok/s" in output.getvalue()


def test_the_report_sums_time_and_finds_first_last_and_best(tmp_path, capsys):
    rows = [
        {"step": 0, HELD_OUT: 0.05},
        {"step": 1, **row(0.2, held_out=0.9)},
        {"step": 2, **row(0.3, held_out=0.8)},
    ]
    summary = summarize(rows)
    assert (summary.first_held_out, summary.last_held_out, summary.best_held_out) == (
        0.05,
        0.8,
        0.9,
    )
    assert (summary.rollouts, summary.seconds, summary.tokens_per_s) == (2, 4.0, 50.0)
    assert summary.positions_per_token == 2.0
    print_summary(summary, tmp_path)
    assert "0.800" in capsys.readouterr().out


def test_the_curves_are_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{"step": 0, HELD_OUT: 0.05}, {"step": 1, **row(0.2, held_out=0.9)}]
    draw_curves(rows, tmp_path / "curves.png", step="rollout")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
