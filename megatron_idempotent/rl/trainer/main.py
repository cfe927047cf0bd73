"""Implements `megatron-idempotent train`: parses the command line, checks and runs the job.

Importing the module imports neither torch nor Megatron; the ranks do.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_idempotent.rl.metrics.loggers import SettingsError

from . import CheckpointError, ConfigError, TrainerError, torchrun

if TYPE_CHECKING:
    from .config import Config
    from .output import Job
    from .task.prompts import PromptSet

_NEEDED = ("pydantic", "torch", "megatron", "tokenizers", "transformers", "rich", "tomli_w")

#: Section, key and value of a setting → the further modules that it needs.
_NEEDED_BY = {
    ("rollout", "engine", "vllm"): ("aiohttp",),
    ("sync", "transport", "bucket"): ("fsspec", "zstandard"),
    ("controller", "cluster", "ray"): ("ray",),
    ("controller", "plane", "transfer_queue"): ("ray", "transfer_queue"),
}


def main(argv: Sequence[str]) -> int:
    """Run the command `train` with the arguments after it; return the exit code.

    It is 0 for a complete run, 1 if ranks or the controller failed, 2 for a mistake in the
    settings, the data, the output directory or the checkpoint, 130 after Ctrl-C, and 143 if SIGTERM
    stopped the run with a checkpoint.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    # `--help` and `--schema` need pydantic alone.
    options = None if "pydantic" in missing else parser().parse_args(list(argv))
    if options is not None and options.schema:
        from megatron_idempotent.settings import schema

        from .config import Config

        print(json.dumps(schema(Config), indent=1))
        return 0
    if options is None or missing:
        needed = ", ".join(missing)
        print(
            f"the trainer needs {needed}: pip install 'megatron-idempotent[trainer]'",
            file=sys.stderr,
        )
        return 2
    try:
        return _run(options)
    except (TrainerError, SettingsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    # Imported here, because `--help` must not wait for them.
    from megatron_idempotent.proof import cpu
    from megatron_idempotent.proof.cpu.errors import LauncherLost
    from megatron_idempotent.rl.controller.protocol import ControllerError
    from megatron_idempotent.rl.trainer.task.prompts import read_prompts
    from megatron_idempotent.rl.workers.protocol import RankFailed, RanksLost

    from .config import load_config
    from .output import CONFIG_FILE, data_path, is_unused, prepare, run_to_resume, say

    began_s, rank = time.time(), torchrun.rank()
    # One thread per rank: the ranks use all cores, and sums have a fixed order.
    os.environ["OMP_NUM_THREADS"] = "1"
    overrides = list(options.set)
    values = {name: value for name, value in vars(options).items() if "." in name}
    overrides += [f"{name}={value}" for name, value in values.items() if value is not None]
    config_file: Path | None = options.config
    resume: bool = options.resume
    if resume:
        # A resumed run uses the settings in its directory, from any working directory.
        directories = [text.partition("=")[2] for text in overrides if text.startswith("run.out=")]
        named_out = directories[-1].strip() if directories else ""
        # torchrun restarts ranks with their first arguments, when there may have been no run yet.
        resume = rank is None or not named_out or not is_unused(Path(named_out))
    if resume:
        out = run_to_resume(named_out)
        overrides.append(f"run.out={out}")
        if config_file is None and (out / CONFIG_FILE).is_file():
            config_file = out / CONFIG_FILE
    config = load_config(config_file, overrides, ranks=torchrun.size())
    if rank is not None:
        torchrun.check(config)
    prompts = read_prompts(data_path(config), words=not config.model.path)
    if rank:
        job = torchrun.join(config)
    else:  # only one process prints
        if not options.quiet:
            say("checking settings, prompts and model", began_s)
        check(config, prompts)
        job = prepare(config, resume=resume, quiet=options.quiet, began_s=began_s)
        job.say(f"starting {config.run.ranks} ranks: importing torch and Megatron")
        if rank is not None:
            torchrun.join(config, job)
    hint = f"continue with --resume --out {job.out}"
    try:
        if launch(job, prompts):
            return 0
        code, text = 143, f"stopped; {hint}"
    except KeyboardInterrupt:
        code, text = 130, f"\ninterrupted; {hint}"
    except cpu.NoDeviceError as error:
        code, text = 2, f"error: {error}"
    except cpu.RankError as error:
        log = job.out / "logs" / f"rank-{error.rank}.log"
        text = f"{error}\n\nrank {error.rank} failed; what it printed is in {log}\n{hint}"
        code = 1
    except (ControllerError, RanksLost, RankFailed, LauncherLost) as error:
        code, text = 1, f"{error}\n{hint}"
    except cpu.RankTimeout:
        limit = f"run.timeout_s is {config.run.timeout_s:g} s; raise it with --set run.timeout_s=…"
        code, text = 1, f"{traceback.format_exc()}{limit}, and {hint}"
    if sys.stderr.isatty():
        # Show the cursor: rank 0 hides it for its progress bar, and may have died since.
        print("\x1b[?25h", end="", file=sys.stderr)
    print(text, file=sys.stderr)
    return code


def check(config: Config, prompts: PromptSet) -> None:
    """Raise an error if settings, model, tokenizer and data do not fit together, before anything is
    written.

    Raises:
        DataError: the data uses words that the tokenizer reserves, or lacks fields that the
            verifier needs.
        CheckpointError: the checkpoint has no tokenizer, or a file is damaged.
        ConfigError: answers do not fit into a response, sequences do not fit into a pack, ranks
            cannot split the model as in `[parallel]`, the sampler or a logger is unknown, the
            sampler cannot work with the sizes, the verifier cannot score the first prompt, or a
            package is missing.
        SettingsError: there is no such verifier.
    """
    _check_packages(config)  # before seconds of imports

    from megatron_idempotent.rl.controller.samplers import SamplerError

    from . import async_run, policy, report
    from .task import prompts as data
    from .task import reward, tokenizer

    try:
        sampler = async_run.make_sampler(config)
        report.named_loggers(config, Path(config.run.out))
        if config.run.mode == "async":
            async_run.make_settings(config).checked_capacity(sampler)
    except (SettingsError, SamplerError) as error:
        raise ConfigError(f"[controller]: {error}") from error
    text_tokenizer = tokenizer.make_tokenizer(config, prompts)
    if config.model.path:
        _check_checkpoint(config)
    longest = config.rollout.max_response_tokens
    data.check_answers_fit(prompts, text_tokenizer.encode_answer, max_response_tokens=longest)
    policy.check_budget(config, prompts, text_tokenizer)
    # The ranks load it again; this reports mistakes early.
    reward.Verifier(reward.load_reward(config.task.reward)).check(prompts)


def _check_packages(config: Config) -> None:
    """Raise `ConfigError` if an optional package that the chosen settings need is not installed."""
    from megatron_idempotent.lazy import REMEDIES

    for (section, key, value), modules in _NEEDED_BY.items():
        if getattr(getattr(config, section), key) != value:
            continue
        for name in modules:
            if importlib.util.find_spec(name) is None:
                raise ConfigError(
                    f"{section}.{key} is {value!r}, and {name} is not installed: {REMEDIES[name]}"
                )


def _check_checkpoint(config: Config) -> None:
    """Raise an error if the checkpoint at `model.path` is damaged or incomplete, or if the ranks
    cannot split its model evenly.
    """
    from megatron_idempotent.rl.hf import Architecture
    from megatron_idempotent.rl.weights.safetensors_io import Checkpoint

    from .output import SUMS, check_sums

    folder = Path(config.model.path)
    check_sums(folder, f"fetch it again, or write {SUMS} again if you have changed it")
    try:
        arch = Architecture.read(folder)
        Checkpoint(folder).close()
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    width = "moe_intermediate_size" if arch.experts else "intermediate_size"
    sizes = {
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.query_groups,
        width: arch.expert_ffn if arch.experts else arch.ffn,
        "num_hidden_layers": arch.layers,
        "num_experts": arch.experts,
    }
    try:
        config.parallel.check_sizes(sizes)
    except ValueError as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from error


def launch(job: Job, prompts: PromptSet) -> bool:
    """Run the job, draw its curves and print its table; return whether the run is complete.

    It is not if SIGTERM stopped an asynchronous run, which can be resumed.

    Raises:
        RankError: a rank failed in a synchronous run; see `cpu.RankPool.run`.
        Exception: as in `run_controller` for an asynchronous run.
    """
    from megatron_idempotent.rl.metrics.loggers import METRICS_FILE, read_metrics

    from .report import CURVES_FILE, draw_curves, print_summary

    ended, step = True, "rollout"
    if job.config.run.mode == "async":
        from .async_run import run_controller

        ended, step = run_controller(job, prompts), "optimizer step"
    else:
        start_ranks(job)
    if torchrun.rank():
        return ended
    rows = read_metrics(job.out / METRICS_FILE)
    draw_curves(rows, job.out / CURVES_FILE, step=step)
    if not job.quiet:
        print_summary(rows, job.out)
    return ended


def start_ranks(job: Job) -> None:
    """Start all ranks, which call `loop.work`, and wait until they end; under torchrun, train as
    this process's rank.

    Raises:
        RankError: a rank failed.
        RankTimeout: the run took longer than `run.timeout_s`.
    """
    if torchrun.rank() is not None:
        torchrun.train(job)
        return
    from megatron_idempotent.proof import cpu

    from .loop import work

    # The launcher imports these once for all ranks; of models only Llama.
    preload = (
        *cpu.PROGRAM_PRELOAD,
        "megatron_idempotent.rl.trainer.loop",
        "megatron_idempotent.rl.engines.transformers",
        "transformers.models.llama.modeling_llama",
    )
    run = job.config.run
    with cpu.RankPool(run.ranks, preload=preload, device=run.device) as pool:
        pool.run(run.ranks, work, job, timeout_s=run.timeout_s)


def parser() -> argparse.ArgumentParser:
    """Return the parser of `megatron-idempotent train`, with an option for each setting."""
    from megatron_idempotent.settings import allowed, schema

    from .config import SECTIONS

    parser = _Parser(
        prog="megatron-idempotent train",
        usage="%(prog)s [options] [--SECTION.KEY VALUE ...]",
        description="Trains a decoder by GRPO on a verifiable task: real Megatron on CPU ranks, "
        "each optimizer step taken in chunks, and engines that are given the new weights. Exit "
        "code 0 at the end; 1 where ranks or the controller failed; 2 for a mistake in settings, "
        "data, output or checkpoint; 130 after Ctrl-C; 143 after SIGTERM, with a checkpoint. "
        "Options win over FILE. Of [controller], a synchronous run reads only loggers.",
        allow_abbrev=False,  # `--rollout.prompt` is no setting
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="settings in TOML; others keep their defaults"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="the same as --SECTION.KEY VALUE; may be repeated",
    )
    parser.add_argument(
        "--async",
        action="store_const",
        const="async",
        dest="run.mode",
        help="sample and train at the same time, whatever FILE says; settings that FILE leaves out "
        "get the defaults of --async",
    )
    switches = {
        "--schema": "print the JSON schema of FILE, for editors, and end",
        "--resume": "continue the run in --out",
        "--quiet": "print errors only",
    }
    for option, text in switches.items():
        parser.add_argument(option, action="store_true", help=text)
    for section, kind in SECTIONS.items():
        group = parser.add_argument_group(f"[{section}]")
        for key, field in schema(kind)["properties"].items():
            short, _, metavar = field.get("flag", "").partition(" ")
            names = [name for name in (short, f"--{section}.{key}") if name]
            default = _default_text(field["default"])
            if "with_async" in field:
                default += f", with --async {_default_text(field['with_async'])}"
            text = f"{field['description']} Default: {default}; allowed: {allowed(field)}."
            group.add_argument(
                *names,
                dest=f"{section}.{key}",
                metavar=metavar or "VALUE",
                help=text.replace("`", "").replace("%", "%%"),
            )
    return parser


def _default_text(default: object) -> str:
    """Return a setting's default as text for the help: a bool in lower case, "empty" for an empty
    text.
    """
    return str(default).lower() if isinstance(default, bool) else str(default) or "empty"


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises if `--help` is written to a pipe that its reader has closed;
    argparse ignores that error.
    """

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message)
