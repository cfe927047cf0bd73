"""Settings: defaults, files, overrides, and what every mistake is told."""

import dataclasses

import pytest

from megatron_idempotent.trainer.config import Config
from megatron_idempotent.trainer.errors import ConfigError
from megatron_idempotent.trainer.sections import OptimizerConfig, RolloutConfig, RunConfig
from megatron_idempotent.trainer.settings import SECTIONS, as_toml, build_config, load_config


def test_the_shipped_file_is_a_valid_configuration():
    config = load_config()
    assert config.run.ranks == 2
    assert config.samples_per_rank * config.run.ranks == (
        config.rollout.prompts * config.rollout.group_size
    )


def test_overrides_come_last_and_have_the_type_of_their_key():
    config = load_config(overrides=["run.seed=5", "optimizer.lr=1", "loss.normalize_std=false"])
    assert config.run.seed == 5
    assert type(config.optimizer.lr) is float
    assert config.loss.normalize_std is False


def test_a_configuration_survives_the_way_through_toml(tmp_path):
    config = load_config(overrides=['run.out=a "b" \\ c', "optimizer.lr=0.00012345"])
    path = tmp_path / "config.toml"
    path.write_text(as_toml(config))
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=fast", "optimizer.lr is 'fast'; give a float, above 0, up to 1"),
        ("optimizer.lr=0", "optimizer.lr is 0.0; allowed: above 0, up to 1"),
        ("optimizer.lr=nan", "optimizer.lr is nan; allowed: above 0, up to 1"),
        ("run.ranks=0", "run.ranks is 0; allowed: 1 to 64"),
        ("run.ranks=2.5", "run.ranks is '2.5'; give a int"),
        ("run.timeout_s=inf", "run.timeout_s is inf; allowed: above 0"),
        ("loss.kl_reference=best", "loss.kl_reference is 'best'; allowed: initial or old"),
        ("loss.normalize_std=1", "loss.normalize_std is '1'; allowed: true or false"),
        ("optimizer.learning_rate=1", r"unknown key optimizer.learning_rate \(value '1'\)"),
        ("rollout.promts=1", "did you mean rollout.prompts?"),
        ("roll.prompts=1", "unknown section roll"),
        ("seed=1", "'seed=1'; write --set section.key=value"),
        ("model.heads=5", "model.heads is 5 and model.hidden is 64"),
        ("model.query_groups=3", "model.query_groups is 3; allowed: a divisor of model.heads"),
        ("rollout.prompts=63", "rollout.prompts is 63; allowed: a multiple of run.ranks"),
        ("optimizer.chunks_per_step=0", "optimizer.chunks_per_step is 0; allowed: 1 to 1024"),
        (
            "optimizer.chunks_per_step=3",
            "optimizer.chunks_per_step is 3; allowed: a divisor of "
            "optimizer.microbatches_per_step, which is 2",
        ),
        ("optimizer.steps_per_rollout=7", "allowed: a divisor of the 512 samples each rank"),
    ],
)
def test_an_impossible_value_is_refused_with_key_value_and_range(override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=[override])


def test_values_from_toml_are_checked_by_type():
    with pytest.raises(ConfigError, match=r"run.seed is '1', a str; give a int"):
        build_config({"run": {"seed": "1"}})
    with pytest.raises(ConfigError, match=r"run.rollouts is True, a bool; give a int"):
        build_config({"run": {"rollouts": True}})


def test_a_file_that_is_not_a_configuration_is_refused_by_name(tmp_path):
    path = tmp_path / "mine.toml"
    with pytest.raises(ConfigError, match=r"mine.toml: No such file.* --config"):
        load_config(path)
    path.write_text("seed = 1\n")
    with pytest.raises(ConfigError, match=r"unknown section seed"):
        load_config(path)
    path.write_text("run = 1\n")
    with pytest.raises(ConfigError, match=r"mine.toml: run is 1; write it as a table, \[run\]"):
        load_config(path)
    path.write_text("[run\n")
    with pytest.raises(ConfigError, match=r"mine.toml: not TOML"):
        load_config(path)


def test_sections_are_checked_when_built_and_cannot_change():
    with pytest.raises(ConfigError, match=r"rollout.group_size is 1; allowed: 2 to 1024"):
        RolloutConfig(group_size=1)
    config = Config(run=RunConfig(seed=3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run.seed = 4
    assert OptimizerConfig(lr=1).lr == 1.0


def test_every_section_of_a_configuration_can_be_set():
    assert set(SECTIONS) == {field.name for field in dataclasses.fields(Config)}
