"""Several loggers as one: what raises is dropped, what is slow holds up nothing."""

import json
import math
import resource
import threading

import pytest

from megatron_idempotent.rl.metrics.loggers import (
    JsonlLogger,
    Loggers,
    read_metrics,
    write_whole,
)


class Remembering:
    def __init__(self):
        self.seen = []
        self.threads = {threading.current_thread().name}

    def log(self, metrics, *, step):
        self.seen.append((step, metrics["loss"]))
        self.threads.add(threading.current_thread().name)

    def close(self):
        self.seen.append("closed")


class Broken:
    def __init__(self):
        self.calls = 0

    def log(self, metrics, *, step):
        self.calls += 1
        raise OSError("no space left on device")

    def close(self):
        self.calls += 1


class Held(Remembering):
    """Takes its first record, and goes on when it may."""

    def __init__(self):
        super().__init__()
        self.taken, self.may_go_on = threading.Event(), threading.Event()

    def log(self, metrics, *, step):
        self.taken.set()
        assert self.may_go_on.wait(30)
        super().log(metrics, step=step)


@pytest.mark.parametrize("threaded", [False, True])
def test_a_logger_that_raises_is_dropped_and_the_others_go_on(capsys, threaded):
    broken, remembering = Broken(), Remembering()
    loggers = Loggers([broken, remembering], threaded=threaded)
    for step in range(3):
        loggers.log({"loss": 0.5}, step=step)
    assert loggers.flush()
    assert remembering.seen == [(0, 0.5), (1, 0.5), (2, 0.5)]
    loggers.close()
    loggers.close()
    assert broken.calls == 1
    assert remembering.seen == [(0, 0.5), (1, 0.5), (2, 0.5), "closed"]
    assert "Broken failed and is dropped: OSError: no space" in capsys.readouterr().err


@pytest.mark.parametrize("threaded", [False, True])
def test_a_logger_that_cannot_be_built_or_closed_is_left_out_with_a_warning(capsys, threaded):
    class Absent:
        def __init__(self):
            raise ModuleNotFoundError("No module named 'tensorboard'")

        def log(self, metrics, *, step):
            raise AssertionError("it was never built")

    class Stuck(Remembering):
        def close(self):
            raise OSError("broken pipe")

    remembering = Remembering()
    loggers = Loggers([Absent, Stuck, lambda: remembering], threaded=threaded)
    loggers.log({"loss": 1.0}, step=1)
    loggers.close()
    assert remembering.seen == [(1, 1.0), "closed"]
    told = capsys.readouterr().err
    assert "Absent failed and is dropped: ModuleNotFoundError: No module" in told
    assert "Stuck failed and is dropped: OSError: broken pipe" in told


def test_an_interrupt_is_not_taken_for_a_broken_logger():
    class Interrupted(Remembering):
        def log(self, metrics, *, step):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Loggers([Interrupted()]).log({}, step=0)


def test_threaded_loggers_are_built_and_called_on_one_thread_that_is_not_the_callers():
    built = []

    def build():
        built.append(Remembering())
        return built[-1]

    loggers = Loggers([build], threaded=True)
    metrics = {"loss": 1.0}
    loggers.log(metrics, step=1)
    metrics["loss"] = 2.0  # the caller may go on with its own
    loggers.close()
    (logger,) = built
    assert logger.threads == {"loggers"}
    assert logger.seen == [(1, 1.0), "closed"]


def test_a_slow_logger_holds_up_nothing_and_what_does_not_fit_is_counted(capsys):
    slow = Held()
    loggers = Loggers([slow], threaded=True, queued=2)
    loggers.log({"loss": 0.0}, step=0)
    assert slow.taken.wait(30)
    for step in range(1, 6):
        loggers.log({"loss": 0.0}, step=step)
    assert loggers.left_out == 3
    slow.may_go_on.set()
    loggers.close()
    assert [each if each == "closed" else each[0] for each in slow.seen] == [0, 1, 2, "closed"]
    told = capsys.readouterr().err
    assert "loggers have 2 records waiting" in told
    assert "3 records of metrics were left out" in told
    loggers.log({"loss": 0.0}, step=7)
    assert loggers.left_out == 4


def test_a_logger_that_hangs_does_not_hang_the_end_of_the_run(capsys):
    slow = Held()
    loggers = Loggers([slow], threaded=True, close_timeout_s=0.01)
    for step in range(3):
        loggers.log({"loss": 0.0}, step=step)
    assert slow.taken.wait(30)
    loggers.close()
    assert "did not end in 0.01 s, with up to 4 records still queued" in capsys.readouterr().err
    assert not loggers.flush(0.01)
    slow.may_go_on.set()


def test_a_resumed_metrics_file_forgets_what_came_behind_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    for step in range(6):
        logger.log({"loss": 0.1 * step}, step=step)
    logger.close()
    path.write_text(path.read_text() + '{"step": 6, "cut of')
    resumed = JsonlLogger(path, first_step=3)
    resumed.log({"loss": 0.9}, step=4)
    resumed.close()
    assert [entry["step"] for entry in read_metrics(path)] == [0, 1, 2, 3, 4]
    assert read_metrics(path)[-1]["loss"] == 0.9


def test_steps_that_were_taken_again_count_once_by_their_last_row(tmp_path):
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    for step, reward in [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3), (2, 0.7), (3, 0.8), (4, 0.9)]:
        logger.log({"reward": reward}, step=step)
    logger.close()
    found = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["reward"]) for row in found] == [
        (0, 0.0),
        (1, 0.1),
        (2, 0.7),
        (3, 0.8),
        (4, 0.9),
    ]


def test_a_row_without_a_number_is_json_and_is_read_as_nan_also_after_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for first_step in (0, 2):
        logger = JsonlLogger(path, first_step=first_step)
        for step in range(first_step + 1, first_step + 3):
            logger.log({"loss": math.nan, "grad_norm": math.inf, "reward": 0.5}, step=step)
        logger.close()
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(math.isnan(row["loss"]) and row["reward"] == 0.5 for row in rows)


def test_a_run_that_begins_anew_keeps_no_row_of_the_one_before(tmp_path):
    for reward in (0.1, 0.2):
        logger = JsonlLogger(tmp_path / "metrics.jsonl")
        logger.log({"evaluation/reward": reward}, step=0)
        logger.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "evaluation/reward": 0.2}]


def test_a_metrics_file_that_cannot_be_made_anew_keeps_its_rows(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    logger.log({"loss": 0.5}, step=1)
    logger.close()
    monkeypatch.setattr(type(path), "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        JsonlLogger(path, first_step=1)
    assert read_metrics(path) == [{"step": 1, "loss": 0.5}]


def test_a_file_that_does_not_fit_leaves_the_old_one_and_no_draft(tmp_path):
    path = tmp_path / "status.json"
    write_whole(path, "old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_whole(path, "new" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "old"
