"""`megatron-idempotent train`: the command line, and what happens before and after the ranks run.

Free of torch and Megatron: the ranks import them.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from megatron_idempotent.trainer.errors import TrainerError
from megatron_idempotent.trainer.failures import explain_failure
from megatron_idempotent.trainer.settings import DEFAULT_FILE, load_config

_NAMED = {
    "rollouts": "run.rollouts",
    "seed": "run.seed",
    "ranks": "run.ranks",
    "out": "run.out",
    "data": "task.data",
    "model": "model.path",
    "engine": "rollout.engine",
    "engine_url": "rollout.engine_url",
}
_NEEDED = ("torch", "megatron", "tokenizers", "transformers", "rich")


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments behind `train`; returns the exit code.

    0: trained. 1: the ranks failed. 2: a mistake in the settings, the data, the output directory
    or the checkpoint. 130: interrupted.
    """
    options = _parser().parse_args(list(argv))
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"the trainer needs {', '.join(missing)}: pip install 'megatron-idempotent[trainer]'",
            file=sys.stderr,
        )
        return 2
    try:
        return _run(options)
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    # Here and not above: `--help` should not wait for the tokenizer and the progress bar.
    from megatron_idempotent import cpu
    from megatron_idempotent.trainer.job import data_path
    from megatron_idempotent.trainer.launch import check, launch
    from megatron_idempotent.trainer.output import CONFIG_FILE, prepare, run_to_resume
    from megatron_idempotent.trainer.task.prompts import read_prompts
    from megatron_idempotent.trainer.task.reward import load_reward

    overrides = list(options.set)
    for name, path in _NAMED.items():
        value = getattr(options, name)
        if value is not None:
            overrides.append(f"{path}={value}")
    config_file = options.config or DEFAULT_FILE
    if options.resume:
        # A run is continued with the settings that it left behind, wherever it is started from.
        out = run_to_resume(_setting(overrides, "run.out"))
        overrides.append(f"run.out={out}")
        if options.config is None and (out / CONFIG_FILE).is_file():
            config_file = out / CONFIG_FILE
    config = load_config(config_file, overrides)
    prompts = read_prompts(data_path(config))
    check(config, prompts)
    load_reward(config.task.reward)  # the ranks load it again; a mistake is told here
    job = prepare(config, resume=options.resume, quiet=options.quiet)
    try:
        launch(job, prompts)
    except KeyboardInterrupt:
        _restore_cursor()
        print(f"\ninterrupted; continue with --resume --out {job.out}", file=sys.stderr)
        return 130
    except cpu.RankError as error:
        _restore_cursor()
        print(explain_failure(error, job), file=sys.stderr)
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
    """What the last override of a setting says, or nothing."""
    values = [text.partition("=")[2] for text in overrides if text.startswith(f"{path}=")]
    return values[-1].strip() if values else ""


def _restore_cursor() -> None:
    """Rank 0 hid it for its bar, and was ended before it could show it again."""
    if sys.stderr.isatty():
        print("\x1b[?25h", end="", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-idempotent train",
        description="Train a decoder by GRPO on a verifiable task: real Megatron on CPU ranks, "
        "each optimizer step taken in chunks, and engines that are given the new weights.",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="settings in TOML, instead of the shipped ones"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one setting; may be repeated",
    )
    parser.add_argument("--rollouts", metavar="N", help="rollouts in the whole run")
    parser.add_argument("--seed", metavar="N", help="seed of everything random")
    parser.add_argument("--ranks", metavar="N", help="data-parallel processes")
    parser.add_argument("--out", metavar="DIR", help="output directory, empty or new")
    parser.add_argument("--data", metavar="FILE", help="prompts in JSONL")
    parser.add_argument("--model", metavar="DIR", help="Hugging Face checkpoint to start from")
    parser.add_argument("--engine", metavar="NAME", help="transformers, vllm or sglang")
    parser.add_argument("--engine-url", metavar="URL", help="servers of vllm or sglang: URL[,URL]")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    return parser
