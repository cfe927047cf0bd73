"""TensorBoard, Weights & Biases, and loggers by import path."""

import sys

import pytest
from starts import started

from megatron_idempotent.rl.metrics.loggers import (
    METRICS_FILE,
    Loggers,
    SettingsError,
    TensorBoardLogger,
    WandbLogger,
    logger_factories,
    read_metrics,
)


@pytest.fixture
def wandb(mocker):
    fake = mocker.MagicMock()
    fake.init.return_value.id = "abc123"
    mocker.patch.dict(sys.modules, {"wandb": fake})
    return fake


def test_tensorboard_holds_every_metric_at_its_step(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    for step in range(1, 4):
        logger.log({"train/reward": 0.25 * step}, step=step)
    logger.close()
    # What an interrupted run had written after its checkpoint is hidden.
    resumed = TensorBoardLogger(tmp_path, first_step=2)
    resumed.log({"train/reward": 0.9}, step=3)
    resumed.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("train/reward")
    assert [(event.step, round(event.value, 5)) for event in events] == [
        (1, 0.25),
        (2, 0.5),
        (3, 0.9),
    ]


def test_wandb_gets_the_metrics_over_their_step_and_a_resumed_run_goes_on(wandb, tmp_path, mocker):
    run = tmp_path / "run-7"
    run.mkdir()
    logger = WandbLogger(run)
    logger.log({"train/loss": 0.5}, step=3)
    logger.close()
    # Without a mode: given here, it would win over WANDB_MODE=offline.
    wandb.init.assert_called_once_with(dir=str(run), name="run-7", id=None, resume=None)
    for first_step, run_id in ((4, "abc123"), (0, None)):
        WandbLogger(run, first_step=first_step)
        assert wandb.init.call_args.kwargs["id"] == run_id
        assert wandb.init.call_args.kwargs["resume"] == ("allow" if run_id else None)
    told = wandb.init.return_value
    told.define_metric.assert_has_calls([mocker.call("step"), mocker.call("*", step_metric="step")])
    told.log.assert_called_once_with({"step": 3, "train/loss": 0.5})
    told.finish.assert_called_once_with()


@pytest.mark.exhaustive  # it starts wandb's own processes; the calls are held above
def test_the_real_wandb_takes_it_offline(tmp_path):
    pytest.importorskip("wandb")
    program = (
        "import pathlib\n"
        "from megatron_idempotent.rl.metrics.loggers import WandbLogger\n"
        "for first_step in (0, 3):\n"
        "    logger = WandbLogger(pathlib.Path('.'), first_step=first_step)\n"
        "    logger.log({'train/loss': 0.5}, step=first_step + 1)\n"
        "    logger.close()\n"
    )
    given = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    started(sys.executable, "-c", program, cwd=tmp_path, **given).check_returncode()
    (run_id,) = {path.stem for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb")}
    assert run_id == f"run-{(tmp_path / 'wandb-run-id').read_text().strip()}"


def test_loggers_are_made_from_their_names_where_they_run(tmp_path, monkeypatch):
    (tmp_path / "my_loggers_of_watch.py").write_text(
        "def mine(directory, *, first_step):\n"
        "    from megatron_idempotent.rl.metrics.loggers import JsonlLogger\n"
        "    return JsonlLogger(directory / f'from-{first_step}.txt')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = ("jsonl", "my_loggers_of_watch:mine")
    factories = logger_factories(names, tmp_path, first_step=2)
    assert not (tmp_path / "from-2.txt").exists()
    loggers = Loggers(factories, threaded=True)
    loggers.log({"loss": 0.5}, step=3)
    loggers.close()
    for file in ("from-2.txt", METRICS_FILE):
        assert read_metrics(tmp_path / file) == [{"step": 3, "loss": 0.5}]


@pytest.mark.parametrize(
    "name", ["mlflow", "no_such_module_at_all:f", "json:no_such_name", "math:pi"]
)
def test_a_name_that_is_no_logger_is_told_before_the_run(tmp_path, name, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SettingsError, match=f"^loggers .*'{name}'"):
        logger_factories([name], tmp_path)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_logger_that_is_asked_for_and_not_installed_is_told_before_the_run(
    tmp_path, name, monkeypatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(SettingsError, match=f"^loggers .*'{name}'.*pip install {name}"):
        logger_factories([name], tmp_path)
