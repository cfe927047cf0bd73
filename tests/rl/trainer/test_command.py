"""The command line: what it refuses before any rank starts, and what it costs to ask for help."""

import importlib.util
import signal
import subprocess
import sys

import pytest

from megatron_idempotent.proof.cpu import RankError, RankFailure
from megatron_idempotent.rl.trainer import main as command
from megatron_idempotent.rl.trainer.main import main

needs_the_trainer = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "megatron", "tokenizers")),
    reason="the command asks for its packages first",
)


def test_asking_for_help_imports_neither_torch_nor_megatron():
    program = (
        "import sys\n"
        "from megatron_idempotent.rl.trainer.main import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as exit:\n    assert exit.code == 0\n"
        "assert not {'torch', 'megatron', 'tokenizers', 'rich'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--resume" in done.stdout
    shown = " ".join(done.stdout.split())
    assert "--rollouts N, --run.rollouts N Rollouts in the run; each" in shown


@needs_the_trainer
def test_the_first_phase_is_told_before_torch_is_imported(tmp_path):
    program = (
        "import sys\n"
        "import megatron_idempotent.rl.trainer.main as command\n"
        "command.check = lambda *_: sys.exit('torch' in sys.modules)\n"
        "command.main(['--rollouts', '1'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.stderr.endswith(" s  checking settings, prompts and model\n")
    assert done.returncode == 0, "it has imported torch"


def test_where_only_the_base_is_installed_help_names_the_one_extra_that_is_needed():
    program = (
        "import importlib.util, sys\n"
        "found = importlib.util.find_spec\n"
        "gone = {'pydantic', 'torch', 'tokenizers', 'rich'}\n"
        "importlib.util.find_spec = lambda name, *a: None if name in gone else found(name, *a)\n"
        "sys.modules.update(dict.fromkeys(gone))\n"
        "from megatron_idempotent.cli.main import main\n"
        "assert main(['train', '--help']) == 2\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        "the trainer needs pydantic, torch, tokenizers, rich: pip install "
        "'megatron-idempotent[trainer]'\n"
    )


@needs_the_trainer
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--set optimizer.lr=0", "optimizer.lr 0"),
        ("--optimizer.lr 0", "optimizer.lr 0"),
        ("--ranks none", "run.ranks 'none'"),
        ("--run.ranks none", "run.ranks 'none'"),
        ("--config nothing.toml", "nothing.toml"),
        ("--data nothing.jsonl", "nothing.jsonl"),
        ("--out /dev/null/run", "/dev/null --out"),
        ("--set rollout.max_response_tokens=3", "rollout.max_response_tokens 3 4"),
        ("--set optimizer.max_tokens_per_microbatch=8", "max_tokens_per_microbatch 8 9"),
        ("--cp 2 --set optimizer.max_tokens_per_microbatch=11", "_per_microbatch 11 9 12"),
        ("--set task.reward=nothing", "task.reward 'nothing'"),
        ("--set task.reward=nowhere:f", "task.reward 'nowhere'"),
        ("--set task.reward=json:f", "task.reward 'json:f'"),
        ("--set task.reward=operator:concat", "task.reward reward(response,"),
        ("--model .", "tokenizer.json:"),
        ("--resume", "runs: --out"),
        ("--cluster ray", "controller.cluster 'ray' run.mode 'sync'"),
        ("--async --set controller.loggers=nothing", "[controller] loggers 'nothing' jsonl"),
        ("--set controller.loggers=nothing", "[controller] loggers 'nothing' jsonl"),
        ("--async --set controller.sampler=none", "[controller] sampler 'none' first_ready"),
        ("--set controller.sampler=none", "[controller] sampler 'none' first_ready"),
        ("--set controller.sampler=builtins:object", "[controller] sampler no name"),
        ("--async --set controller.capacity=5", "capacity 5 96"),
        ("--async --set controller.stall_s=9", "controller.stall_s 9 900"),
        (
            "--async --set controller.sampler=strict --set optimizer.steps_per_rollout=2",
            "[controller] strict target_groups",
        ),
    ],
)
def test_a_mistake_is_told_in_one_line_before_anything_is_written(
    arguments, named, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    told = refused(arguments.split(), capsys)
    assert [word for word in named.split() if word not in told] == []
    assert not list(tmp_path.iterdir())


@needs_the_trainer
def test_the_beginning_of_a_settings_name_is_no_option(capsys):
    with pytest.raises(SystemExit):
        main(["--rollout.prompt", "2"])
    assert "unrecognized arguments: --rollout.prompt 2" in capsys.readouterr().err


@needs_the_trainer
@pytest.mark.parametrize(
    ("arguments", "module", "message"),
    [
        (
            ["--engine", "vllm", "--engine-url", "http://localhost:1"],
            "aiohttp",
            "rollout.engine is 'vllm', and aiohttp is not installed: pip install "
            "'megatron-idempotent[http]'",
        ),
        (
            ["--set", "sync.transport=bucket", "--set", "sync.directory=s3://weights/run"],
            "zstandard",
            "sync.transport is 'bucket', and zstandard is not installed: pip install",
        ),
        (["--async", "--cluster", "ray"], "ray", "controller.cluster is 'ray', and ray is not "),
    ],
)
def test_a_package_that_a_setting_needs_is_told_before_anything_is_written(
    arguments, module, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    assert message in refused(arguments, capsys)
    assert not list(tmp_path.iterdir())


@needs_the_trainer
def test_a_rank_that_dies_is_told_with_its_log_and_how_to_go_on(tmp_path, monkeypatch, capsys):
    died = RankFailure(
        rank=1, exception_type="", message="", traceback="", exit_code=-signal.SIGSEGV
    )

    def launch(job, prompts):
        raise RankError([died], {})

    monkeypatch.setattr(command, "launch", launch)
    assert main(["--out", str(tmp_path), "--quiet"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("rank 1 died with signal SIGSEGV")
    log = tmp_path / "logs" / "rank-1.log"
    assert f"what it printed is in {log}\ncontinue with --resume --out {tmp_path}\n" in told


@needs_the_trainer
def test_async_is_asynchronous_whatever_the_file_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.toml"
    asked = ["--async", "--rollouts", "1", "--config"]
    for text in ("", "[run]\nmode = 'sync'\n"):
        # Below what a group may take.
        file.write_text(f"{text}[controller]\nstall_s = 9\n")
        assert "controller.stall_s is 9" in refused([*asked, str(file)], capsys)


def refused(arguments, capsys):
    """The one line that the command leaves, after the one that says what it does."""
    assert main(arguments) == 2
    said = capsys.readouterr().err.splitlines(keepends=True)
    told = "".join(
        line for line in said if not line.endswith(" s  checking settings, prompts and model\n")
    )
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    return told
