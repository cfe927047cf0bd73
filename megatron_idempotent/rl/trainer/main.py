"""Implements `megatron-idempotent train`: reads the command line, runs the job, explains failures.

The module does not import torch and Megatron; the ranks do.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from .errors import TrainerError

_NAMED = {
    "rollouts": "run.rollouts",
    "seed": "run.seed",
    "ranks": "run.ranks",
    "device": "run.device",
    "tp": "parallel.tp",
    "pp": "parallel.pp",
    "vpp": "parallel.vpp",
    "cp": "parallel.cp",
    "ep": "parallel.ep",
    "out": "run.out",
    "data": "task.data",
    "model": "model.path",
    "engine": "rollout.engine",
    "engine_url": "rollout.engine_url",
    "cluster": "controller.cluster",
}
_NEEDED = ("pydantic", "torch", "megatron", "tokenizers", "transformers", "rich", "tomli_w")


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments after `train`; return the exit code.

    It is 0 if the run came to its end, 1 if ranks or the controller failed, 2 for a mistake in the
    settings, the data, the output directory or the checkpoint, 130 after Ctrl-C, and 143 if SIGTERM
    stopped it with a checkpoint.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if "pydantic" in missing:  # without which there are no settings, and no defaults to show
        return _tell(missing)
    options = _parser().parse_args(list(argv))
    options.argv = list(argv)
    if missing and not options.schema:
        return _tell(missing)
    if options.schema:
        from megatron_idempotent.settings import schema

        from .config import Config

        print(json.dumps(schema(Config), indent=1))
        return 0
    try:
        return _run(options)
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _tell(missing: Sequence[str]) -> int:
    print(
        f"the trainer needs {', '.join(missing)}: pip install 'megatron-idempotent[trainer]'",
        file=sys.stderr,
    )
    return 2


def _run(options: argparse.Namespace) -> int:
    # Here and not above: `--help` should not wait for the tokenizer and the progress bar.
    from megatron_idempotent.proof import cpu
    from megatron_idempotent.rl.controller.protocol import ControllerError
    from megatron_idempotent.rl.trainer.task.prompts import read_prompts
    from megatron_idempotent.rl.trainer.task.reward import FieldsOf, load_reward
    from megatron_idempotent.rl.workers import under_torchrun
    from megatron_idempotent.rl.workers.protocol import RankFailed, RanksLost

    from .async_run import serve_rank, torchrun_overrides
    from .config import load_config
    from .launch import check, explain_failure, launch
    from .output import CONFIG_FILE, data_path, prepare, run_to_resume

    overrides = list(options.set)
    for name, path in _NAMED.items():
        value = getattr(options, name)
        if value is not None:
            overrides.append(f"{path}={value}")
    if options.run_async:
        overrides.append("run.mode=async")
    config_file: Path | None = options.config
    if options.resume:
        # A run is continued with the settings that it left, wherever it is started from.
        out = run_to_resume(_setting(overrides, "run.out"))
        overrides.append(f"run.out={out}")
        if config_file is None and (out / CONFIG_FILE).is_file():
            config_file = out / CONFIG_FILE
    if under_torchrun() and not options.controller:
        return serve_rank(config_file, overrides, options.argv)
    if options.controller:
        overrides += torchrun_overrides()
    config = load_config(config_file, overrides)
    prompts = read_prompts(data_path(config), words=not config.model.path)
    check(config, prompts)
    # The ranks load it again; a mistake is told here.
    FieldsOf(load_reward(config.task.reward)).check(prompts)
    job = prepare(
        config, resume=options.resume, quiet=options.quiet, started_anew=options.controller
    )
    try:
        if not launch(job, prompts):
            print(f"stopped; continue with --resume --out {job.out}", file=sys.stderr)
            return 143
    except KeyboardInterrupt:
        _restore_cursor()
        print(f"\ninterrupted; continue with --resume --out {job.out}", file=sys.stderr)
        return 130
    except cpu.NoDeviceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except cpu.RankError as error:
        _restore_cursor()
        print(explain_failure(error, job), file=sys.stderr)
        return 1
    except (ControllerError, RanksLost, RankFailed) as error:
        _restore_cursor()
        print(f"{error}\ncontinue with --resume --out {job.out}", file=sys.stderr)
        return 1
    except cpu.RankTimeout:
        _restore_cursor()
        traceback.print_exc()
        print(
            f"run.timeout_s is {config.run.timeout_s:g} s; raise it with --set run.timeout_s=…, "
            f"and continue with --resume --out {job.out}",
            file=sys.stderr,
        )
        return 1
    return 0


def _setting(overrides: Sequence[str], path: str) -> str:
    """Return the value of the last override of a setting, or "" if there is none."""
    values = [text.partition("=")[2] for text in overrides if text.startswith(f"{path}=")]
    return values[-1].strip() if values else ""


def _restore_cursor() -> None:
    """Show the terminal's cursor, which rank 0 hid for its bar and did not live to show again."""
    if sys.stderr.isatty():
        print("\x1b[?25h", end="", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    from .config import SECTIONS
    from .reference import default

    parser = argparse.ArgumentParser(
        prog="megatron-idempotent train",
        description="Train a decoder by GRPO on a verifiable task: real Megatron on CPU ranks, "
        "each optimizer step taken in chunks, and engines that are given the new weights.",
    )

    def named(flag: str, metavar: str, text: str, empty: str = "") -> None:
        """Add the option of a setting, with its default; `empty` says what the empty one means."""
        section, _, key = _NAMED[flag[2:].replace("-", "_")].partition(".")
        shown = empty or default(section, key, getattr(SECTIONS[section](), key)).replace("`", "")
        parser.add_argument(flag, metavar=metavar, help=f"{text} (default: {shown})")

    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="settings in TOML; others keep their defaults"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one setting; may be repeated",
    )
    parser.add_argument(
        "--async",
        action="store_true",
        dest="run_async",
        help="sample and train at the same time, whatever FILE says; other defaults where it is "
        "silent",
    )
    named("--rollouts", "N", "rollouts in the whole run")
    named("--seed", "N", "seed of everything random")
    named("--ranks", "N", "processes, over all replicas")
    named("--tp", "N", "tensor-parallel ranks of a replica")
    named("--pp", "N", "pipeline stages of a replica")
    named("--vpp", "N", "chunks of layers on each pipeline stage")
    named("--cp", "N", "context-parallel ranks of a replica")
    named("--ep", "N", "expert-parallel ranks")
    named("--device", "NAME", "cpu, or cuda for this machine's GPUs")
    named("--out", "DIR", "output directory, empty or new", "the next free runs/train-NNN")
    named("--data", "FILE", "prompts in JSONL", "those that ship")
    named("--model", "DIR", "Hugging Face checkpoint to start from", "random weights")
    named("--engine", "NAME", "transformers or vllm")
    named("--engine-url", "URL", "servers of vllm: URL[,URL]", "none")
    named("--cluster", "NAME", "of --async: embedded or ray")
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON schema of FILE, for editors, and end"
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    # The first rank of a torchrun starts it so; see `async_run.serve_rank`.
    parser.add_argument("--controller", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    return parser
