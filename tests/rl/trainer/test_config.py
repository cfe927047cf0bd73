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
from megatron_idempotent.rl.trainer.main import main, parser
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
    ("overrides", "named"),
    [
        ("optimizer.lr=fast", "optimizer.lr 'fast' number"),
        ("optimizer.lr=nan", "optimizer.lr nan"),
        ("run.ranks=2.5", "run.ranks 2.5 whole"),
        ("run.timeout_s=inf", "run.timeout_s inf"),
        ("loss.kl_reference=best", "loss.kl_reference 'best' initial old"),
        ("loss.normalize_std=1", "loss.normalize_std true false"),
        ("optimizer.learning_rate=1", "unknown optimizer.learning_rate"),
        ("optimizer.group_size=1", "unknown rollout.group_size?"),
        ("rollout.promts=1", "unknown rollout.prompts?"),
        ("roll.prompts=1", "unknown section roll; rollout?"),
        ("seed=1", "unknown run.seed?"),
        ("seed", "--set 'seed' section.key=value"),
        ("run.seed.x=1", "run.seed whole"),
        ("run=1", "run [run]"),
        ("model.heads=5", "model.heads 5 hidden 64"),
        ("model.query_groups=3", "model.query_groups 3 model.heads 4"),
        ("rollout.engine=vllm", "rollout.engine rollout.engine_url"),
        ("rollout.engine_url=http://a", "rollout.engine engine_url 'http://a'"),
        (
            "optimizer.chunks_per_step=3",
            "optimizer.chunks_per_step optimizer.microbatches_per_step",
        ),
        ("optimizer.steps_per_rollout=7", "optimizer.steps_per_rollout 14 samples 512"),
        ("controller.cpus_per_engine=2", "controller.cpus_per_engine gpus_per_engine cluster"),
        ("controller.gpus_per_rank=1", "controller.cpus_per_rank gpus_per_rank cluster"),
        (f"{ON_RAY} controller.gpus_per_rank=1", "controller.gpus_per_rank 1 run.device 'cpu'"),
        (f"{ON_RAY} run.device=cuda", "controller.gpus_per_rank 0 run.device 'cuda'"),
        ("controller.cluster=ray", "controller.cluster 'ray' run.mode 'sync'"),
        ("rollout.router_replay=replay", "rollout.router_replay model.num_experts"),
        ("loss.correction=mask", "loss.correction 'mask' old_logprobs 'behaviour'"),
        ("parallel.tp=4", "parallel.tp 4 run.ranks 2"),
        ("parallel.ep=2", "parallel.ep 2 model.num_experts 0"),
        ("parallel.vpp=2", "parallel.vpp 2 pp 1"),
        ("parallel.sequence_parallel=true", "parallel.sequence_parallel true tp 1"),
        ("model={num_experts=1}", "model.experts_per_token 2 num_experts 1"),
        ("run.ranks=8 parallel.tp=8", "parallel.tp 8 model.heads 4"),
        ("run.ranks=4 parallel.tp=4", "parallel.tp 4 model.query_groups 2"),
        ("parallel.tp=2 model.ffn=9", "parallel.tp 2 model.ffn 9"),
        ("parallel.pp=2 parallel.vpp=2", "parallel.pp vpp 4 model.layers 2"),
        ("parallel.ep=2 model.num_experts=3", "parallel.ep 2 model.num_experts 3"),
        ("parallel.tp=2 parallel.ep=2 model.num_experts=4", "parallel.ep 2 run.ranks 1"),
        ("parallel.tp=2 model.num_experts=4", "parallel.sequence_parallel false parallel.tp 2"),
        ("rollout.prompts=63", "run.ranks 2 rollout.prompts 63"),
        (
            "parallel.pp=2 parallel.vpp=2 model.layers=4 optimizer.chunks_per_step=2",
            "parallel.pp 2 optimizer.microbatches_per_step chunks_per_step 1",
        ),
    ],
)
def test_an_impossible_value_is_refused_with_its_keys_and_values(overrides, named):
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=overrides.split())
    told = str(caught.value)
    assert [word for word in named.split() if word not in told] == []
    assert "\n" not in told


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
        ("[model]\nheads = 5\n", "mine.toml:1: model.heads is 5 and hidden is 64"),
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
        with pytest.raises(
            ConfigError, match=r"^controller\.stall_s is 9.0 .*group_timeout_s is 300"
        ):
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


def test_every_setting_is_an_option_with_its_meaning_default_and_range():
    options = {action.dest: action for action in parser()._actions if action.nargs != 0}
    for name, section in SECTIONS.items():
        for key, field in schema(section)["properties"].items():
            option = options[f"{name}.{key}"]
            assert f"--{name}.{key}" in option.option_strings
            assert option.help.startswith(field["description"].replace("`", ""))
            assert option.help.endswith(f"; allowed: {allowed(field)}.")
    assert options["run.rollouts"].option_strings == ["--rollouts", "--run.rollouts"]
    assert " Default: 150, with --async 600; allowed: 1 or more." in options["run.rollouts"].help


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
