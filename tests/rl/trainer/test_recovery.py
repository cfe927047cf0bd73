"""A run in which any process dies, anywhere, goes on to the bits of one in which nothing died."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import signal
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")  # comes with the extra `trainer`

import recovery_command
from kill_points import PLAN, Kill, alive
from trainer_cases import ASYNC, needs_megatron_training, rows

from megatron_idempotent.proof.cpu import RankError
from megatron_idempotent.rl.trainer import output

pytestmark = [
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
    "start: ranks are awaited": ("socket_ranks:SocketRanks._complete", "call", "", CONTROLLER),
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


def words(mode, out):
    settings = (*ASYNC, *MODES[mode], *_SMALL)
    return ["--out", str(out), *(word for text in settings for word in ("--set", text))]


@dataclasses.dataclass(kw_only=True)
class Run:
    """A run of the command, killed as a plan says and continued until it ends."""

    out: Path
    codes: list[int | None]
    """The exit code of each start; None for one that was killed."""
    said: str
    pids: list[int]
    """Processes that there were when something was killed."""
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


@pytest.fixture(scope="session")
def launch(megatron_rank_pool, tmp_path_factory):
    def launch(mode, *kills):
        folder = tmp_path_factory.mktemp("r")
        out, plan, said, temporary = (folder / name for name in ("run", "plan", "said", "t"))
        temporary.mkdir()
        plan.write_text(json.dumps([dataclasses.asdict(kill) for kill in kills]))
        codes, argv = [], words(mode, out)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(PLAN, str(plan))
            patch.setenv("TMPDIR", str(temporary))
            patch.setenv("OMP_NUM_THREADS", "1")
            while not codes or codes[-1] != 0:
                assert len(codes) <= len(kills), said.read_text()
                try:
                    codes += megatron_rank_pool.run(
                        1, recovery_command.train, argv, str(said), distributed=False
                    )
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
            codes=codes,
            said=said.read_text(),
            pids=[pid for each in pids for pid in each],
            temporary=temporary,
        )

    return launch


@pytest.fixture(scope="session")
def whole(launch):
    """Return what is found in and left by a run in which nothing dies."""

    @functools.cache
    def whole(mode):
        run = launch(mode)
        return run.found(), run.left()

    return whole


def planned(mode, whom):
    """A kill in each phase of a mode, in the order in which phases come; `whom` die in turn."""
    column = list(MODES).index(mode) + 2
    found = [(phase, *row[:2], row[column]) for phase, row in PHASES.items() if row[column]]
    return [
        Kill(phase=phase, place=place, when=when, at=at, who=whom[number % len(whom)])
        for number, (phase, place, when, at) in enumerate(found)
    ]


#: Two kills in each phase of each mode: of all processes, and of some.
TABLE = {
    (mode, name): planned(mode, whom)
    for mode, turns in {
        "sync": ["rank 1", "all ranks", "launcher", "command"],
        "async": ["rank 1", "all ranks", "command", "launcher"],
    }.items()
    for name, whom in {"some": turns, "all": ["all"]}.items()
}
#: So many die one after another in one run: each costs a start of all.
_IN_A_ROW = 6
_SHORT = {("sync", "some", 6), ("async", "some", 18)}


@pytest.mark.parametrize(
    ("mode", "name", "first"),
    [
        pytest.param(*of, at, marks=() if (*of, at) in _SHORT else pytest.mark.exhaustive)
        for of, kills in TABLE.items()
        for at in range(0, len(kills), _IN_A_ROW)
    ],
)
def test_a_run_that_is_killed_ends_with_the_bits_of_one_that_is_not(
    mode, name, first, launch, whole
):
    kills = TABLE[mode, name][first : first + _IN_A_ROW]
    (step,) = (kill for kill in TABLE[mode, name] if kill.phase == "before a step")
    # Before all in the third step, after a checkpoint, from which the others go on.
    run = launch(mode, dataclasses.replace(step, nth=3, who=kills[-1].who), *kills)
    found, left = whole(mode)
    assert run.found() == found
    # Nothing is stranded: processes, files, folders.
    until = time.monotonic() + 10
    while alone := [pid for pid in run.pids if alive(pid)]:
        assert time.monotonic() < until, f"processes are left: {alone}"
        time.sleep(0.05)
    assert run.left() == left
    # wandb makes folders when it is imported, and removes them only where a process ends by itself.
    assert [each for each in run.temporary.iterdir() if "wandb" not in each.name] == []


def test_the_page_has_a_row_for_each_phase_and_says_who_dies_in_it():
    page = (Path(__file__).parents[3] / "docs" / "recovery.md").read_text()
    for phase in PHASES:
        cells = []
        for mode in MODES:
            kills = [*TABLE[mode, "some"], *TABLE[mode, "all"]]
            cells.append(", ".join(kill.who for kill in kills if kill.phase == phase) or "–")
        assert f"| {phase} | {cells[0]} | {cells[1]} |" in page
