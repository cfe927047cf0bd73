"""Loggers, the metrics file, the bar, the curves and the table."""

import io

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")

from megatron_idempotent.trainer.names import (
    GRAD_NORM,
    HELD_OUT,
    LOSS,
    REWARD,
    TOKENS_PER_S,
    TOTAL_S,
)
from megatron_idempotent.trainer.settings import load_config
from megatron_idempotent.trainer.watch.loggers import Loggers, TensorBoardLogger
from megatron_idempotent.trainer.watch.progress import ProgressBar, make_progress
from megatron_idempotent.trainer.watch.report import (
    draw_curves,
    print_summary,
    summarize,
)
from megatron_idempotent.trainer.watch.rows import JsonlLogger, read_metrics


def row(reward, held_out=None):
    metrics = {REWARD: reward, LOSS: 0.1, GRAD_NORM: 1.0, TOTAL_S: 2.0, TOKENS_PER_S: 50.0}
    return metrics if held_out is None else {**metrics, HELD_OUT: held_out}


class Remembering:
    def __init__(self):
        self.seen = []

    def log(self, metrics, *, rollout):
        self.seen.append(rollout)

    def close(self):
        self.seen.append("closed")


class Broken:
    def __init__(self):
        self.calls = 0

    def log(self, metrics, *, rollout):
        self.calls += 1
        raise OSError("no space left on device")

    def close(self):
        self.calls += 1


def test_a_logger_that_raises_is_dropped_and_the_others_go_on(capsys):
    broken, remembering = Broken(), Remembering()
    loggers = Loggers([broken, remembering])
    for rollout in range(3):
        loggers.log(row(0.5), rollout=rollout)
    loggers.close()
    assert broken.calls == 1
    assert remembering.seen == [0, 1, 2, "closed"]
    assert "Broken failed and is dropped: OSError: no space" in capsys.readouterr().err


def test_an_interrupt_is_not_taken_for_a_broken_logger():
    class Interrupted(Remembering):
        def log(self, metrics, *, rollout):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Loggers([Interrupted()]).log({}, rollout=0)


def test_a_resumed_metrics_file_forgets_what_came_behind_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    for rollout in range(6):
        logger.log(row(0.1 * rollout), rollout=rollout)
    logger.close()
    path.write_text(path.read_text() + '{"rollout": 6, "cut of')
    resumed = JsonlLogger(path, first_rollout=3)
    resumed.log(row(0.9), rollout=4)
    resumed.close()
    assert [entry["rollout"] for entry in read_metrics(path)] == [0, 1, 2, 3, 4]
    assert read_metrics(path)[-1][REWARD] == 0.9


def test_tensorboard_holds_every_metric_at_its_rollout(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    for rollout in range(1, 4):
        logger.log(row(0.25 * rollout), rollout=rollout)
    logger.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars(REWARD)] == [(1, 0.25), (2, 0.5), (3, 0.75)]


def test_without_a_terminal_there_is_a_line_per_evaluation():
    output = io.StringIO()
    progress = make_progress(load_config(), first_rollout=0, terminal=output)
    progress.log({HELD_OUT: 0.05}, rollout=0)
    progress.log(row(0.3), rollout=1)
    progress.log(row(0.4, held_out=0.35), rollout=2)
    progress.close()
    lines = output.getvalue().splitlines()
    assert lines[0].endswith("held-out 0.050")
    assert "reward 0.400  held-out 0.350  loss +0.1000  grad norm 1.00  50 tokens/s" in lines[1]
    assert len(lines) == 2


def test_the_bar_shows_the_last_numbers_and_the_last_held_out_reward():
    output = io.StringIO()
    bar = ProgressBar(10, 0, output)
    bar.log(row(0.4, held_out=0.35), rollout=2)
    bar.log(row(0.5), rollout=3)
    bar.close()
    assert "3/10" in output.getvalue()
    assert "reward 0.50 held-out 0.35 loss +0.10 grad 1.0 50 tok/s" in output.getvalue()


def test_the_report_sums_time_and_finds_first_last_and_best(tmp_path, capsys):
    rows = [
        {"rollout": 0, HELD_OUT: 0.05},
        {"rollout": 1, **row(0.2, held_out=0.9)},
        {"rollout": 2, **row(0.3, held_out=0.8)},
    ]
    summary = summarize(rows)
    assert (summary.first_held_out, summary.last_held_out, summary.best_held_out) == (
        0.05,
        0.8,
        0.9,
    )
    assert (summary.rollouts, summary.seconds, summary.tokens_per_s) == (2, 4.0, 50.0)
    print_summary(summary, tmp_path)
    assert "0.800" in capsys.readouterr().out


def test_the_curves_are_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{"rollout": 0, HELD_OUT: 0.05}, {"rollout": 1, **row(0.2, held_out=0.9)}]
    draw_curves(rows, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
