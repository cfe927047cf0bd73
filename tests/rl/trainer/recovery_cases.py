"""Kills a run of the trainer in each phase, and compares it with one that nothing killed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import signal
import sys
import time
from pathlib import Path

import pytest
import recovery_command
from kill_points import PLAN, RUNNER, Kill, alive
from trainer_cases import ASYNC, needs_megatron_training, rows

from megatron_idempotent.proof.cpu import RankError
from megatron_idempotent.rl.trainer import output

MARKS = [
    needs_megatron_training,
    pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12"),
]

LAST = 6
_SMALL = (f"run.rollouts={LAST}", "run.checkpoint_every=2", "evaluation.every=3")
MODES = {
    "sync": ("run.mode=sync", "controller.sampler=in_order"),
    "async": ("controller.drain_s=60",),
}
RANK, FIRST, CONTROLLER = "rank 1", "rank 0", "command"
#: Phase → place, when, and who comes by: in a synchronous and in an asynchronous run.
PHASES = {
    "start: the model is built": ("megatron_setup:build_megatron_model", "call", RANK, RANK),
    "start: the checkpoint is loaded": ("checkpoint:load_weights", "call", RANK, RANK),
    "start: ranks are awaited": ("ranks:_Session.exchange", "call", "", CONTROLLER),
    "start: the state is put back": ("checkpoint:put_back", "return", "", CONTROLLER),
    "generation": ("transformers_batch:DecodeBatch.draw", "return", RANK, CONTROLLER),
    "scoring": ("rewards:Scorer.rewards", "call", RANK, CONTROLLER),
    "before a step": ("policy:MegatronPolicy.begin", "call", RANK, RANK),
    "step: forward": ("gpt_model:GPTModel.forward", "call", RANK, RANK),
    "step: backward": (
        "param_and_grad_buffer:_ParamAndGradBucketGroup.register_grad_ready",
        "call",
        RANK,
        RANK,
    ),
    "step: between two pieces": ("policy:MegatronPolicy.microbatch", "return", RANK, RANK),
    "step: reduction": (
        "param_and_grad_buffer:_ParamAndGradBucketGroup.finish_grad_sync",
        "call",
        RANK,
        RANK,
    ),
    "step: update, moments done and weights not": (
        "distrib_optimizer:DistributedOptimizer._copy_main_params_to_model_params",
        "call",
        RANK,
        RANK,
    ),
    "step: updated, and nobody told": ("lifecycle:SplitStep.finish", "return", RANK, RANK),
    "step: told, and not counted": ("async_ranks:RankPolicy.finish", "return", "", CONTROLLER),
    "step: counted, groups not cleared": ("train_loop:TrainPump._clear", "call", "", CONTROLLER),
    "publish: stage": ("transformers_weights:WeightVersions.stage", "call", RANK, CONTROLLER),
    "publish: pause": ("transformers:TransformersEngine.pause", "return", RANK, CONTROLLER),
    "publish: half of the commit": (
        "transformers_weights:ServedWeights._put",
        "return",
        RANK,
        CONTROLLER,
    ),
    "publish: verify": ("weight_sync:attempts", "return", RANK, CONTROLLER),
    "publish: resume": ("weight_sync:resume", "call", RANK, CONTROLLER),
    "publish: stamp": ("train_loop:TrainPump._release_rollouts", "call", "", CONTROLLER),
    "evaluation": ("rewards:evaluation_means", "call", RANK, CONTROLLER),
    "between steps: the row": ("loggers:JsonlLogger.log", "return", FIRST, CONTROLLER),
    "checkpoint: before": ("checkpoint:save_weights", "call", RANK, RANK),
    "checkpoint: a file of tensors is written": (
        "filesystem_async:FileSystemWriterAsync.write_preloaded_data",
        "return",
        RANK,
        RANK,
    ),
    "checkpoint: all files, no list": ("output:seal_checkpoint", "call", FIRST, CONTROLLER),
    "checkpoint: the list, not the name": ("output:_of_list", "return", FIRST, CONTROLLER),
    "checkpoint: after": ("output:seal_checkpoint", "return", FIRST, CONTROLLER),
    "checkpoint: an old one is half removed": ("output:_remove", "call", FIRST, CONTROLLER),
    "end: the trained model is written": ("save:_Writer._copy_rest", "call", FIRST, FIRST),
}


#: What runs the ranks, and how → who dies in turn, in each row of the table of a phase.
TURNS = {
    ("embedded", "sync"): (["rank 1", "all ranks", "launcher", "command"], ["all"]),
    ("embedded", "async"): (["rank 1", "all ranks", "command", "launcher"], ["all"]),
    ("ray", "async"): (["rank 1", "all ranks", "command"], ["command", "rank 1", "all"]),
    ("torchrun", "sync"): (["rank 1", "all ranks", "launcher"], ["all"]),
}
#: So many die one after another in one run: each costs a start of all.
IN_A_ROW = 6


def planned(runner, mode, turn):
    """Return a kill in each phase of a mode, in the order in which phases come."""
    whom, column = TURNS[runner, mode][turn], list(MODES).index(mode) + 2
    found = [(phase, *row[:2], row[column]) for phase, row in PHASES.items() if row[column]]
    kills = [
        Kill(phase=phase, place=place, when=when, at=at, who=whom[number % len(whom)])
        for number, (phase, place, when, at) in enumerate(found)
    ]
    # No rank is there yet that could die alone.
    return [
        dataclasses.replace(kill, who="all")
        if kill.phase == "start: ranks are awaited" and "rank" in kill.who
        else kill
        for kill in kills
    ]


def pieces(*runners, short):
    """Return parameters: what runs the ranks, the mode, the turn, and the first of its kills.

    Those of `short` are run each time; one may be past the end of the table, for one kill alone.
    """
    return [
        pytest.param(*row, marks=() if row in short else pytest.mark.exhaustive)
        for runner, mode in TURNS
        if runner in runners
        for turn in (0, 1)
        for at in range(0, len(planned(runner, mode, turn)) + IN_A_ROW, IN_A_ROW)
        if (row := (runner, mode, turn, at))
    ]


@dataclasses.dataclass(kw_only=True)
class Run:
    """A run of the command, killed as a plan says and continued until it ends."""

    out: Path
    runner: str
    codes: list[int | None]
    """The exit code of each start; None for one that was killed."""
    said: str
    pids: list[tuple[int, str]]
    """Processes that there were when something was killed; see `kill_points.named`."""
    temporary: Path

    def found(self):
        """All that two runs are compared by."""
        newest = output.complete_checkpoints(self.out / "checkpoints")[-1]
        assert output.rollouts_of(newest) == LAST
        sealed = json.loads((newest / output.MARKER).read_text())
        found = {"weights": sealed["state"]["weights sha256"]}
        found["groups and prompts"] = sealed["files"].get("controller.json")
        files = sorted((self.out / "model").iterdir())
        found["model"] = {
            each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in files
        }
        found["rows"] = rows(self)
        for line in (self.out.parent / "notes").read_text().splitlines():
            # What was noted again, after a kill, is what was noted before it.
            for name, noted in json.loads(line).items():
                assert found.setdefault(name, noted) == noted, name
        return found

    def left(self):
        """Names of all that is in its directories."""
        names = {str(path.relative_to(self.out)) for path in self.out.rglob("*")}
        return {name for name in names if "tensorboard/" not in name}


def launch(pool, folder, runner, mode, *kills, more=(), start=recovery_command.train):
    """Start the command, and again until it ends by itself; return the run.

    Args:
        pool: forks processes that have all imported.
        folder: a new one, for the run and for what is noted of it.
        runner: what runs the ranks: `embedded`, `ray` or `torchrun`.
        mode: `sync` or `async`.
        kills: who dies, one after another.
        more: settings besides those of the mode.
        start: runs in the process that is forked, with the arguments of the command.
    """
    out, plan, said, temporary = (folder / name for name in ("run", "plan", "said", "t"))
    temporary.mkdir()
    plan.write_text(json.dumps([dataclasses.asdict(kill) for kill in kills]))
    settings = (*ASYNC, *MODES[mode], *_SMALL, *more)
    first = ["--out", str(out), *(word for text in settings for word in ("--set", text))]
    # torchrun starts ranks again with the same words.
    codes, argv = [], [*first, *(["--resume"] if runner == "torchrun" else [])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLAN, str(plan))
        patch.setenv(RUNNER, runner)
        patch.setenv("TMPDIR", str(temporary))
        patch.setenv("OMP_NUM_THREADS", "1")
        while not codes or codes[-1] != 0:
            assert len(codes) <= len(kills), said.read_text()
            try:
                codes += pool.run(1, start, argv, str(said), distributed=False, timeout_s=600)
            except RankError as error:
                if error.failures[0].exit_code != -signal.SIGKILL:
                    raise
                codes.append(None)
            argv = ["--resume", "--out", str(out)]
    assert json.loads(plan.read_text()) == [], "a kill never happened"
    spent = plan.with_suffix(".spent")
    pids = [json.loads(line) for line in spent.read_text().splitlines()] if kills else []
    return Run(
        out=out,
        runner=runner,
        codes=codes,
        said=said.read_text(),
        pids=[pid for each in pids for pid in each],
        temporary=temporary,
    )


def piece(runner, mode, turn, first):
    """Return the kills of a piece of the table, and one before all of them."""
    row = planned(runner, mode, turn)
    kills = row[first : first + IN_A_ROW]
    (step,) = (kill for kill in row if kill.phase == "before a step")
    # In the third step, after a checkpoint that the others go on from, or in the first.
    nth = 1 if turn and first else 3
    return [dataclasses.replace(step, nth=nth, who=(kills or row)[-1].who), *kills]


def check(run, found, left):
    """Compare a run with what was found in, and left by, one that nothing killed."""
    assert run.found() == found
    # Who has to start it again is told how; under torchrun, by each rank that fails.
    told = run.said.count(f"continue with --resume --out {run.out}")
    assert told == run.codes.count(1) or run.runner == "torchrun"
    # Nothing is stranded: processes, files, folders.
    until = time.monotonic() + 10
    while alone := [each for each in run.pids if alive(*each)]:
        assert time.monotonic() < until, f"processes are left: {alone}"
        time.sleep(0.05)
    assert run.left() == left
    # wandb makes folders when it is imported, and torchrun when it starts; both remove them only
    # where a process ends by itself.
    there = [each.name for each in run.temporary.iterdir()]
    assert [name for name in there if "wandb" not in name and "torchelastic_" not in name] == []
