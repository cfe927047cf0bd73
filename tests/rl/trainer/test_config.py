"""Settings of a run: one source of defaults, files, overrides, and what every mistake is told."""

import dataclasses
import json
import re
import traceback

import pytest

from megatron_idempotent.rl.controller.state import ControllerLimits, ControllerSettings
from megatron_idempotent.rl.engines.vllm import VllmEngine
from megatron_idempotent.rl.trainer import ConfigError
from megatron_idempotent.rl.trainer.async_run import make_settings
from megatron_idempotent.rl.trainer.config import (
    SECTIONS,
    Config,
    ControllerConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    as_toml,
    declared,
    load_config,
)
from megatron_idempotent.rl.trainer.main import main
from megatron_idempotent.settings import allowed, schema

ON_RAY = "run.mode=async controller.cluster=ray"


def flat(config):
    return {
        f"{name}.{key}": value
        for name, section in dataclasses.asdict(config).items()
        for key, value in section.items()
    }


#: The settings that a resumed run may have other values of: none of them affects a number.
MAY_CHANGE = """
    run: rollouts out checkpoint_every keep_checkpoints timeout_s
    task: data
    rollout: engine_url vllm_python vllm_arguments request_timeout_s
    sync: address bucket_mb deltas directory senders transport workers
    optimizer: chunks_per_step
    controller: engines cluster ray_address plane loggers timeline restarts drain_s stall_s
        call_timeout_s group_timeout_s group_attempts step_attempts rejected_steps
        cpus_per_engine cpus_per_rank gpus_per_engine gpus_per_rank
    evaluation: every
"""


def test_a_resumed_run_may_change_these_settings_and_no_other():
    expected = re.sub(r"\n {8}", " ", MAY_CHANGE).strip().splitlines()
    sections = dict(line.strip().split(": ") for line in expected)
    declared_keys = {name: set(keys) for name, keys in declared("may_change").items() if keys}
    assert declared_keys == {name: set(keys.split()) for name, keys in sections.items()}


def changed(config, base):
    return {key: value for key, value in flat(config).items() if value != flat(base)[key]}


def test_keys_that_nobody_gives_have_the_one_default_of_the_mode(tmp_path):
    path = tmp_path / "mine.toml"
    assert load_config() == Config()
    path.write_text("[task]\n")
    assert load_config(path) == Config()
    asynchronous = declared("with_async").items()
    others = {f"{name}.{key}": value for name, keys in asynchronous for key, value in keys.items()}
    path.write_text("[rollout]\nprompts = 16\n[run]\nmode = 'async'\n")
    by_file = load_config(path, ["evaluation.every=7"])
    given = {"run.mode": "async", "rollout.prompts": 16, "evaluation.every": 7}
    assert changed(by_file, Config()) == others | given
    path.write_text("[rollout]\nprompts = 16\n[run]\nmode = 'sync'\n")
    assert load_config(path, ["evaluation.every=7", "run.mode=async"]) == by_file


def test_a_configuration_survives_the_way_through_toml(tmp_path):
    config = load_config(
        overrides=['run.out=a "b" \\ c', "optimizer.lr=0.00012345", "loss.normalize_std=false"]
    )
    assert (config.loss.normalize_std, config.run.out) == (False, 'a "b" \\ c')
    path = tmp_path / "config.toml"
    path.write_text(as_toml(config))
    assert load_config(path) == config
    assert type(load_config(path, ["optimizer.lr=1"]).optimizer.lr) is float
    assert load_config(path, ["run.out=123", 'task.data="4"']).run.out == "123"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("optimizer.lr=fast", "optimizer.lr is 'fast'; give a number, above 0, up to 1"),
        ("optimizer.lr=0", "optimizer.lr is 0; allowed: above 0, up to 1"),
        ("optimizer.lr=nan", "optimizer.lr is nan; allowed: above 0, up to 1"),
        ("run.ranks=0", "run.ranks is 0; allowed: 1 to 64"),
        ("run.ranks=2.5", "run.ranks is 2.5; give a whole number, 1 to 64"),
        ("run.timeout_s=inf", "run.timeout_s is inf; allowed: above 0"),
        ("loss.kl_reference=best", "loss.kl_reference is 'best'; allowed: initial or old"),
        ("loss.normalize_std=1", "loss.normalize_std is 1; allowed: true or false"),
        ("loss.correction_low=1.5", "correction_low is 1.5; allowed: 0 to 1"),
        ("optimizer.learning_rate=1", "unknown key optimizer.learning_rate (value 1)"),
        ("optimizer.group_size=1", "did you mean rollout.group_size?"),
        ("rollout.promts=1", "did you mean rollout.prompts?"),
        ("roll.prompts=1", "unknown section roll; did you mean rollout?"),
        ("seed=1", "unknown key seed (value 1); did you mean run.seed?"),
        ("seed", "--set 'seed'; write key=value, or section.key=value"),
        ("run.seed.x=1", "run.seed is {'x': 1}; give a whole number"),
        ("run=1", "run is 1; write it as a table, [run]"),
        ("model.heads=5", "model.heads is 5 and model.hidden is 64"),
        (
            "model.query_groups=3",
            "model.query_groups is 3 and model.heads is 4; allowed: a divisor",
        ),
        (
            "rollout.prompts=63",
            "run.ranks / (tp x cp x pp) is 2 and rollout.prompts is 63; allowed: a",
        ),
        ("rollout.engine=vllm", "rollout.engine is 'vllm' and rollout.engine_url is ''; allowed"),
        ("rollout.engine_url=http://a", "is 'transformers' and rollout.engine_url is 'http://a'"),
        (
            "optimizer.chunks_per_step=3",
            "is 3 and optimizer.microbatches_per_step is 2; allowed: a divisor",
        ),
        (
            "optimizer.steps_per_rollout=7",
            "is 14 and a replica's number of samples of a rollout is 512; allowed",
        ),
        ("controller.cpus_per_rank=0", "controller.cpus_per_rank is 0; allowed: 1 or more"),
        ("controller.cpus_per_engine=2", "cpus_per_engine is 2, gpus_per_engine is 0 and"),
        ("controller.gpus_per_rank=-1", "controller.gpus_per_rank is -1; allowed: 0 or more"),
        ("controller.cpus_per_rank=2", "cpus_per_rank is 2, gpus_per_rank is 0 and controller.cl"),
        ("controller.gpus_per_rank=1", "is 'embedded'; allowed: controller.cluster = 'ray', which"),
        (f"{ON_RAY} controller.gpus_per_rank=1", "gpus_per_rank is 1 and run.device is 'cpu';"),
        (f"{ON_RAY} run.device=cuda", "gpus_per_rank is 0 and run.device is 'cuda'; allowed: one"),
        ("parallel.tp=4", "parallel.tp x cp x pp is 4 and run.ranks is 2; allowed: a divisor"),
        ("parallel.ep=2", "parallel.ep is 2 and model.num_experts is 0; allowed: a divisor"),
        ("parallel.vpp=2", "parallel.vpp is 2 and parallel.pp is 1; allowed: 2 or more stages"),
        ("parallel.sequence_parallel=true", "parallel.tp is 1; allowed: 2 or more ranks"),
        ("model={num_experts=1}", "model.experts_per_token is 2 and model.num_experts is 1"),
        ("run.ranks=8 parallel.tp=8", "parallel.tp is 8 and model.heads is 4"),
        ("run.ranks=4 parallel.tp=4", "parallel.tp is 4 and model.query_groups is 2"),
        ("parallel.tp=2 model.ffn=9", "parallel.tp is 2 and model.ffn is 9; allowed: a"),
        ("parallel.pp=2 parallel.vpp=2", "parallel.pp x vpp is 4 and model.layers is 2"),
        ("parallel.pp=2 model.layers=3", "parallel.pp x vpp is 2 and model.layers is 3"),
        ("parallel.ep=2 model.num_experts=3", "parallel.ep is 2 and model.num_experts is 3;"),
        (
            "parallel.tp=2 parallel.ep=2 model.num_experts=4",
            "parallel.ep is 2 and run.ranks / (tp x pp) is 1; allowed: a divisor",
        ),
        (
            "parallel.tp=2 model.num_experts=4",
            "parallel.sequence_parallel is false, parallel.tp is 2 and model.num_experts is 4",
        ),
        (
            "run.ranks=4 parallel.tp=2 rollout.prompts=63",
            "run.ranks / (tp x cp x pp) is 2 and rollout.prompts is 63; allowed: a divisor of it",
        ),
        (
            "parallel.pp=2 parallel.vpp=2 model.layers=4 optimizer.chunks_per_step=2",
            "parallel.pp is 2 and optimizer.microbatches_per_step / chunks_per_step is 1; allowed",
        ),
    ],
)
def test_an_impossible_value_is_refused_with_keys_values_and_range(overrides, message):
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=overrides.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_chunk_has_a_microbatch_for_each_stage_where_that_is_possible():
    def chunks(microbatches, *overrides):
        settings = [f"optimizer.microbatches_per_step={microbatches}", *overrides]
        return load_config(overrides=settings).chunks

    piped = ("run.ranks=4", "parallel.pp=4", "model.layers=4")
    assert (chunks(8), chunks(8, *piped), chunks(2, *piped)) == (8, 2, 1)
    assert chunks(8, *piped, "optimizer.chunks_per_step=8") == 8


def test_all_mistakes_of_a_file_are_told_at_once_each_with_its_line(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("# mine\n[run]\nseed = '1'\nrollouts = true\n\n[optimizer]\nlr=2\nbeta=0.9\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["loss.clip_low=7", "optimizer.lr=3", "evaluation={every=-1}"])
    assert set(str(caught.value).splitlines()) == {
        f"{path}:3: run.seed is '1'; give a whole number, 0 to 2147483647",
        f"{path}:4: run.rollouts is True; give a whole number, 1 or more",
        "optimizer.lr is 3; allowed: above 0, up to 1",
        f"{path}:8: unknown key optimizer.beta (value 0.9); did you mean optimizer.beta2?",
        "loss.clip_low is 7; allowed: 0 to 1",
        "evaluation.every is -1; allowed: 0 or more",
    }


def test_a_file_that_is_not_a_configuration_is_refused_by_name(tmp_path):
    path = tmp_path / "mine.toml"
    for text, message in [
        (None, "mine.toml: No such file"),
        ("seed = 1\n", "mine.toml:1: unknown key seed"),
        ("run = 1\n", r"mine.toml:1: run is 1; write it as a table, \[run\]"),
        ("[run\n", "mine.toml: not TOML"),
        ("[run]\nseed = 2020-01-01\n", "mine.toml:2: run.seed is '2020-01-01'; give a whole"),
        ("[model]\nheads = 5\n", "mine.toml:1: model.heads is 5 and model.hidden is 64"),
    ]:
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_config(path)


def test_sections_are_checked_when_built_and_cannot_change():
    with pytest.raises(ConfigError) as caught:
        RolloutConfig(group_size=1, promts=2)
    assert "rollout.group_size is 1; allowed: 2 to 1024" in str(caught.value)
    assert "unknown key rollout.promts (value 2); did you mean rollout.prompts?" in str(
        caught.value
    )
    config = Config(run=RunConfig(seed=3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run.seed = 4
    assert type(OptimizerConfig(lr=1).lr) is float


def test_a_limit_of_the_controller_is_declared_and_checked_once():
    shared = ControllerLimits.__dataclass_fields__.keys()
    own = vars(ControllerConfig)["__annotations__"].keys()
    assert shared
    assert not shared & own
    assert not shared & vars(ControllerSettings)["__annotations__"].keys()
    for build in (
        lambda: load_config(overrides=["controller.stall_s=9"]),
        lambda: ControllerConfig(stall_s=9.0),
    ):
        with pytest.raises(ConfigError, match=r"^controller\.stall_s is 9 .*group_timeout_s 300"):
            build()
    config = load_config(overrides=["run.mode=async", "controller.restarts=7"])
    assert make_settings(config).restarts == 7


def test_editors_get_a_schema_of_every_key_with_its_range_and_meaning(capsys):
    assert main(["--schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == schema(Config)
    assert list(printed["properties"]) == list(SECTIONS)
    keys = printed["$defs"]["LossConfig"]
    assert not keys["additionalProperties"]
    assert keys["properties"]["correction"]["enum"] == ["none", "truncate", "mask"]
    assert keys["properties"]["clip_low"].items() >= {"minimum": 0, "maximum": 1}.items()
    for section in SECTIONS.values():
        for key, field in printed["$defs"][section.__name__]["properties"].items():
            assert field["description"].endswith("."), f"{section.__name__}.{key}"
            assert field["default"] == getattr(section(), key)


def test_the_help_has_every_setting_with_its_default_range_and_meaning(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert "\n  rollouts: 150; with --async 600 (1 or more). Rollouts in the run; " in printed
    for name, section in SECTIONS.items():
        own = printed.partition(f"\n[{name}]\n")[2].partition("\n\n")[0]
        lines = dict(line.strip().split(": ", 1) for line in own.splitlines())
        fields = schema(section)["properties"]
        assert [*lines] == [*fields]
        for key, field in fields.items():
            meaning = " ".join(field["description"].split()).replace("`", "")
            assert lines[key].endswith(f"({allowed(field)}). {meaning}")


def test_a_bucket_is_a_transport_by_its_url(tmp_path):
    pytest.importorskip("zstandard")
    from megatron_idempotent.rl.trainer.engines import make_sender
    from megatron_idempotent.rl.weights.transports import BucketSender

    place = str(tmp_path)
    config = load_config(None, ["sync.transport=bucket", f"sync.directory={place}"])
    sender = make_sender(config, tmp_path)
    assert isinstance(sender, BucketSender)
    assert sender._objects.address == place
    for wrong in ("reference://::data:,{}", "http://a/b", "s3://a/../b"):
        with pytest.raises(
            ConfigError, match=r"sync.directory: .* is not the location of a store; give"
        ):
            load_config(None, ["sync.transport=bucket", f"sync.directory={wrong}"])


@pytest.mark.parametrize(
    ("key", "url", "remedy"),
    [
        ("sync.directory", "s3://key:se%2Fcret@weights", "AWS_SECRET_ACCESS_KEY"),
        ("sync.directory", "s3://key:se/cret@weights/run", "AWS_SECRET_ACCESS_KEY"),
        ("sync.directory", "http://a/b?token=secret", "AWS_SECRET_ACCESS_KEY"),
        ("rollout.engine_url", "http://key:cret@127.0.0.1:8000", "a proxy on this machine"),
        ("rollout.engine_url", "http://a:8000,https://cret@b:8000", "a proxy on this machine"),
    ],
)
def test_a_url_with_a_secret_is_refused_before_it_is_written_and_does_not_show(key, url, remedy):
    section, _, name = key.partition(".")
    for build, error, words in (
        (lambda: load_config(None, [f"{key}={url}"]), ConfigError, remedy),
        (lambda: load_config(None, ["rollout.engine=vllm", f"{key}={url}"]), ConfigError, remedy),
        (lambda: SECTIONS[section](**{name: url}), ConfigError, remedy),
        (lambda: VllmEngine(url), ValueError, "api_key"),
    ):
        with pytest.raises(error, match=f"({key}|engine) has a password.* without.*{words}") as e:
            build()
        shown = "".join(traceback.format_exception(e.value))
        assert not re.search("cret@|token", shown), shown


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.engine_urls={}", "unknown key rollout.engine_urls (value not shown: a URL"),
        ("rollout.group_size={}", "rollout.group_size is not shown: a URL may hold secrets"),
        ("rollout='{}'", "rollout is not shown: a URL may hold secrets; write it as a table"),
        ("rollout.engine_url {}", "--set not shown: a URL may hold secrets; write key=value"),
    ],
)
def test_a_mistake_about_a_url_does_not_show_it(override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override.format("http://key:pa55@127.0.0.1:8000")])
    assert message in str(caught.value)
    assert "pa55" not in str(caught.value)


def test_a_url_in_the_place_of_a_section_does_not_show():
    overrides = ["rollout=http://key:pa55@127.0.0.1:8000", "rollout.group_size=4"]
    with pytest.raises(ConfigError, match=r"rollout is not shown: a URL may .*, and no section"):
        load_config(None, overrides)


@pytest.mark.parametrize(
    "url", ["s3://weights/run@3", "abfs://box@account.host/run", "http://host:90/a@b", "/tmp/a:b@c"]
)
def test_a_url_without_a_secret_is_taken(url):
    assert load_config(None, [f"sync.directory={url}"]).sync.directory == url
