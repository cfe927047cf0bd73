"""An adapter that saves and loads all of a run by itself, and bugs, each for one check of state."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import torch
from megatron.core import parallel_state as ps
from megatron.core.transformer.moe import moe_utils
from mutations import after, before, nothing, setting
from torch.utils import _pytree

import megatron_idempotent
from megatron_idempotent.megatron.optimizers import grad_scalers, stepping, unchained
from megatron_idempotent.proof.certify.adapters import SplitStep, Window, buffers, parameters_of
from megatron_idempotent.proof.certify.checkpoints import FullyReshardable, LowRank
from megatron_idempotent.proof.certify.protocol import KEEPS
from megatron_idempotent.proof.certify.states import put_random, random_states, steppers
from megatron_idempotent.step.snapshot import logged
from megatron_idempotent.window.params import ensure_params_synced


def copied(value: Any) -> Any:
    """Return a value with copies of its tensors where they are, at any depth."""
    return _pytree.tree_map_only(torch.Tensor, lambda each: each.detach().clone(), value)


@torch.no_grad()
def put_values(tensors: Iterable[Any], values: Iterable[Any]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def in_thread(write: Any) -> threading.Thread:
    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


def losses() -> dict[str, Any]:
    tracker = moe_utils.get_moe_layer_wise_logging_tracker()
    return {name: each["values"] for name, each in tracker.items()}


class Everything(SplitStep):
    """Writes a file of each rank, and loads it only if all ranks have read theirs; no bug yet."""

    keeps = tuple(name for name in KEEPS if name != "token counts")

    def build(self, subject: Any) -> None:
        super().build(subject)
        self.steps = self.saves = 0

    def finish(self, **how: Any) -> Any:
        self.steps += 1
        return super().finish(**how)

    def counters(self) -> dict[str, int]:
        return {"steps": self.steps}

    def stepped(self) -> list[tuple[Any, Any]]:
        return [
            (inner, each)
            for inner in steppers(self.subject.optimizer)
            for group in inner.param_groups
            for each in group["params"]
        ]

    def moments(self) -> list[dict[str, Any]]:
        return [inner.state.get(each, {}) for inner, each in self.stepped()]

    def buffers(self) -> list[Any]:
        return [b for chunk in self.subject.chunks for _, b in chunk.module.named_buffers()]

    def state(self) -> dict[str, Any]:
        ensure_params_synced(self.subject.chunks)
        plain = {n: v for n, v in vars(self.subject.scheduler).items() if n != "optimizer"}
        return {
            "weights": copied(parameters_of(self.subject)),
            "stepped": copied([each for _, each in self.stepped()]),
            "moments": copied(self.moments()),
            "buffers": copied(self.buffers()),
            "scheduler": plain,
            "scales": copied([each.state_dict() for each in grad_scalers(self.subject.optimizer)]),
            "random": random_states(),
            "losses": {name: len(value) for name, value in losses().items()},
            "logged": copied([*logged()]),
            "steps": self.steps,
        }

    def save(self) -> str:
        path = self.path()
        self.agreed(lambda: self.write(path, self.state()))
        return path

    def path(self) -> str:
        self.saves += 1
        return str(self.subject.folder / f"{self.steps}-{self.saves}")

    def write(self, path: str, state: Any) -> None:
        torch.save(state, self.file(path))

    def file(self, path: str) -> str:
        return f"{path}.{torch.distributed.get_rank()}"

    def read(self, path: str) -> Any:
        with open(self.file(path), "rb") as file:
            return torch.load(file, weights_only=False)

    def agreed(self, function: Any) -> Any:
        error = found = None
        try:
            found = function()
        except (EOFError, OSError, RuntimeError) as raised:
            error = raised
        told: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(told, error and str(error))
        if any(told):
            raise RuntimeError(next(filter(None, told))) from error
        return found

    def load(self, path: str) -> None:
        self.put(self.agreed(lambda: self.read(path)))

    def put(self, state: Any) -> None:
        self.put_weights(state)
        self.put_moments(state)
        self.put_buffers(state)
        self.put_scheduler(state)
        self.put_scales(state)
        self.put_random(state)
        self.put_logged(state)
        self.steps = state["steps"]

    def put_weights(self, state: Any) -> None:
        put_values(parameters_of(self.subject), state["weights"])
        put_values([each for _, each in self.stepped()], state["stepped"])

    def put_moments(self, state: Any) -> None:
        for (inner, each), moments in zip(self.stepped(), state["moments"], strict=True):
            inner.state[each] = copied(moments)

    def put_buffers(self, state: Any) -> None:
        for each, value in zip(self.buffers(), state["buffers"], strict=True):
            each.data = copied(value)  # Megatron makes biases 32 bits wide at the first forward

    def put_scheduler(self, state: Any) -> None:
        vars(self.subject.scheduler).update(state["scheduler"])
        self.subject.scheduler.step(0)

    def put_scales(self, state: Any) -> None:
        scalers = grad_scalers(self.subject.optimizer)
        for each, value in zip(scalers, state["scales"], strict=True):
            each.load_state_dict(copied(value))

    def put_random(self, state: Any) -> None:
        put_random(state["random"])

    def put_logged(self, state: Any) -> None:
        for name, layers in state["losses"].items():
            if name not in losses():  # a process that has taken no step
                moe_utils.save_to_aux_losses_tracker(name, torch.zeros(()), 1, layers)
        put_values(logged(), state["logged"])

    def load_weights(self, path: str) -> None:
        self.put_weights_alone(self.agreed(lambda: self.read(path)))

    def put_weights_alone(self, state: Any) -> None:
        put_values(parameters_of(self.subject), state["weights"])
        self.subject.optimizer.reload_model_params()

    def save_async(self) -> str:
        path = self.path()
        self.pending = path, self.state()
        return path

    def saved(self) -> None:
        self.agreed(lambda: self.write(*self.pending))


# Has a loss scale with which no gradient is finite.
Overflows = setting(Everything, optimizer_overrides={"initial_loss_scale": 2.0**40})


class AllocatesOnce(Everything):
    """Leaves moments out in later models of a process that have none yet."""

    allocated: ClassVar[bool] = False

    def put_moments(self, state: Any) -> None:
        if type(self).allocated and not any(self.moments()):
            return
        super().put_moments(state)

    def finish(self, **how: Any) -> Any:
        type(self).allocated = True
        return super().finish(**how)


class KeepsForeignMoments(Everything):
    """Leaves moments out where there are some and it has not saved itself."""

    def put_moments(self, state: Any) -> None:
        if self.saves or not any(self.moments()):
            super().put_moments(state)


class LoadsOnce(Everything):
    """Gives the optimizer the tensors that it has kept, so that steps change them."""

    kept: Any = None

    def save(self) -> str:
        found = super().save()
        self.kept = found, [dict(each) for each in self.state()["moments"]]
        return found

    def load(self, path: str) -> None:
        super().load(path)
        if self.kept is not None and self.kept[0] == path:
            for (inner, each), moments in zip(self.stepped(), self.kept[1], strict=True):
                inner.state[each] = moments


class LeavesMains(Everything):
    """Loads weights beside the optimizer."""

    def load_weights(self, path: str) -> None:
        mains = copied([each for _, each in self.stepped()])
        super().load_weights(path)
        put_values([each for _, each in self.stepped()], mains)


class SyncsMains(Everything):
    """Keeps the bits of main parameters that round to the weight already."""

    def put_weights_alone(self, state: Any) -> None:
        put_values(parameters_of(self.subject), state["weights"])
        megatron_idempotent.ensure_main_params_synced(self.subject.optimizer)


class RemembersItsSaves(Everything):
    """Has moments in memory, and none in the files."""

    known: ClassVar[dict[str, Any]] = {}

    def write(self, path: str, state: Any) -> None:
        self.known[path] = state["moments"]
        super().write(path, {**state, "moments": [{} for _ in state["moments"]]})

    def read(self, path: str) -> Any:
        found = super().read(path)
        return {**found, "moments": self.known.get(path, found["moments"])}


class LosesMomentsAlone(Everything):
    """Brings back zeros where the optimizer has been away alone."""

    def onload(self, *, training: bool = True) -> None:
        super().onload(training=training)
        if self._away == {"optimizer"}:
            for each in self.moments():
                each["exp_avg"].zero_()


class LeavesFrozenOut(Everything):
    """Loads the weights that are trained, and no others."""

    def put_weights(self, state: Any) -> None:
        frozen = [each for each in parameters_of(self.subject) if not each.requires_grad]
        before = copied(frozen)
        super().put_weights(state)
        put_values(frozen, before)


class StepsFrozen(Everything):
    """Steps on a gradient of zero where a weight is frozen, as Megatron without the patch does."""

    def finish(self, **how: Any) -> Any:
        frozen = [each for each in parameters_of(self.subject) if not each.requires_grad]
        for each in frozen:
            each.requires_grad_(True)
        found = super().finish(**how)
        for each in frozen:
            each.requires_grad_(False)
        return found


class OneRankKnowsOfWrites(Everything):
    def save(self) -> str:
        path = self.path()
        self.write(path, self.state())
        return path


class MissingIsNew(Everything):
    """Starts from the beginning where there is no file."""

    def load(self, path: str) -> None:
        def read() -> Any:
            try:
                return self.read(path)
            except FileNotFoundError:
                return None

        found = self.agreed(read)
        if found is not None:
            self.put(found)


class EmptiesFirst(Everything):
    """Makes room before it reads what it has opened."""

    def read(self, path: str) -> Any:
        with open(self.file(path), "rb") as file:
            with torch.no_grad():
                for each in parameters_of(self.subject):
                    each.zero_()
            return torch.load(file, weights_only=False)


class RankZeroLooks(Everything):
    """Has rank 0 look whether all files are whole, and then each rank read its own."""

    def load(self, path: str) -> None:
        def look() -> None:
            for file in sorted(Path(path).parent.glob(f"{Path(path).name}.*")):
                torch.load(file, weights_only=False)
            ranks = torch.distributed.get_world_size()
            assert all(Path(f"{path}.{rank}").exists() for rank in range(ranks))

        def agree() -> None:
            try:
                look()
            except AssertionError as error:
                raise RuntimeError("a file is missing") from error

        self.agreed(agree if torch.distributed.get_rank() == 0 else lambda: None)
        self.put(self.read(path))


class RemembersWhatItWrote(Everything):
    """Takes what is not there any more from what it has written itself, asynchronously."""

    pending = ("", None)

    def read(self, path: str) -> Any:
        return super().read(path) if Path(self.file(path)).exists() else self.pending[1]


def streams(state: Any, kept: str) -> Any:
    """Leave one of the random states as it is: of "python", "numpy", "torch" or the "tracker"."""
    return {**state["random"], kept: random_states()[kept]}


def tracker_without(state: Any, name: str) -> Any:
    now = random_states()["tracker"][name]
    return {**state["random"], "tracker": {**state["random"]["tracker"], name: now}}


def scales_with(state: Any, **values: Any) -> Any:
    return [{**each, **values} if each else each for each in state["scales"]]


def rest_apart(self: Any, path: str, state: Any) -> None:
    """Write all but weights and moments into another, smaller file."""
    large = ("weights", "stepped", "moments", "buffers")
    torch.save({name: state[name] for name in large}, self.file(path))
    torch.save({name: state[name] for name in state.keys() - large}, self.file(f"{path}.rest"))


def rest_if_there(self: Any, path: str) -> Any:
    rest = Path(self.file(f"{path}.rest"))
    state = Everything.read(self, path)
    return {
        **self.state(),
        **state,
        **(torch.load(rest, weights_only=False) if rest.exists() else {}),
    }


def put_by_halves(self: Any, path: str) -> None:
    """Put what is in the first file before the second one is read."""
    self.put({**self.state(), **self.agreed(lambda: Everything.read(self, path))})
    self.put({**self.state(), **self.agreed(lambda: Everything.read(self, f"{path}.rest"))})


def with_first_state(self: Any) -> str:
    """Fill a buffer at the first asynchronous save, and write it at each."""
    before = getattr(self, "pending", None)
    path = Everything.save_async(self)
    self.pending = path, before[1] if before else self.pending[1]
    return path


def written_in_vain(self: Any) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        self.write(*self.pending)
    torch.distributed.barrier()


def failed_for_good(self: Any) -> None:
    """Raise again what an earlier asynchronous save has raised."""
    try:
        Everything.saved(self)
    except RuntimeError as error:
        self.error = error
    if hasattr(self, "error"):
        raise self.error


def with_first_copies(self: Any, **how: Any) -> None:
    """Bring back the moments that the first offload of all has copied."""
    SplitStep.onload(self, **how)
    if len(self._away) == 1:
        return
    averages = [each["exp_avg"] for each in self.moments()]
    self.copies = getattr(self, "copies", None) or copied(averages)
    put_values(averages, self.copies)


def of_what_is_there(self: Any, **how: Any) -> None:
    """Copy moments to the host whenever they are asked for, though they may be there already."""
    there = [each["exp_avg"].is_cuda for each in self.moments()]
    SplitStep.offload(self, **how)
    for each, was_there in zip(self.moments(), there, strict=True):
        if not was_there:
            each["exp_avg"].zero_()


def known_at_the_end(self: Any, *, only: Any = None) -> None:
    """Note that all is away when it is, so that nothing comes back of an offload that failed."""
    try:
        SplitStep.offload(self, only=only)
    except MemoryError:
        self._away = set()
        raise


def loads(**changes: Any) -> dict[str, Any]:
    """Return a `put` that changes what was read, by functions of it."""

    def put(self: Any, state: Any) -> None:
        Everything.put(self, {**state, **{name: to(state) for name, to in changes.items()}})

    return {"put": put}


def of_async_saves(**changes: Any) -> dict[str, Any]:
    """Return a `save_async` that changes what it writes, by functions of it."""

    def save_async(self: Any) -> str:
        path = Everything.save_async(self)
        state = self.pending[1]
        self.pending = path, {**state, **{name: to(state) for name, to in changes.items()}}
        return path

    return {"save_async": save_async}


class ByWindow(Window, Everything):
    """Trains in `accumulation_window`, which refuses no write of gradients; no bug yet."""

    def build(self, subject: Any) -> None:
        super().build(subject)
        self.steps = self.saves = 0

    def finish(self) -> Any:
        self.steps += 1
        return super().finish()


class Threaded(Everything):
    """Copies the run, and writes it in a thread; no bug yet."""

    def build(self, subject: Any) -> None:
        super().build(subject)
        self.executor = ThreadPoolExecutor(1)
        self.executor.submit(int).result()  # its thread is there before the first save

    def save_async(self) -> str:
        path, state = self.path(), self.state()
        self.written = self.executor.submit(self.write, path, state)
        return path

    def saved(self) -> None:
        self.agreed(self.written.result)


class CopiesInThread(Threaded):
    """Copies in the thread, and waits for the copy; no bug either."""

    def save_async(self) -> str:
        path, copied_already = self.path(), threading.Event()

        def write() -> None:
            state = self.state()
            copied_already.set()
            self.write(path, state)

        self.written = self.executor.submit(write)
        copied_already.wait()
        return path


class OwnThread(Threaded):
    """Starts a thread for each save, which keeps what it raises for `saved`; no bug."""

    def save_async(self) -> str:
        path, state = self.path(), self.state()
        self.written = Future()

        def write() -> None:
            try:
                self.written.set_result(self.write(path, state))
            except (OSError, RuntimeError) as error:
                self.written.set_exception(error)

        in_thread(write)
        return path


def shared_with_thread(self: Any) -> str:
    """Write in a thread what the run has then."""
    path = self.path()
    self.written = self.executor.submit(lambda: self.write(path, self.state()))
    return path


def shared_with_own_thread(self: Any) -> str:
    """Write what the run has in a thread that the save starts."""
    path, self.written = self.path(), Future()
    in_thread(lambda: self.written.set_result(self.write(path, self.state())))
    return path


def views_for_thread(self: Any) -> str:
    """Write in a queue's thread what steps change in place."""
    if not hasattr(self, "queue"):
        self.queue: Any = queue.Queue()

        def write() -> None:
            while True:
                path, state, written = self.queue.get()
                written.set_result(torch.save(state, self.file(path)))

        in_thread(write)
        super(Threaded, self).save_async()  # the thread has begun before the save that counts
    path, state, self.written = self.path(), self.state(), Future()
    state["weights"] = [each.detach() for each in parameters_of(self.subject)]
    state["stepped"] = [each.detach() for _, each in self.stepped()]
    self.queue.put((path, state, self.written))
    return path


def of_a_silent_thread(self: Any) -> str:
    """Let the thread end with what it raises, which nobody hears."""
    path, state = self.path(), self.state()
    self.thread = in_thread(lambda: self.write(path, state))
    return path


def waits_for_word(self: Any) -> str:
    """Wait in `saved` for a word that a thread which fails does not send."""
    path, state, self.written = self.path(), self.state(), Future()
    in_thread(lambda: self.written.set_result(self.write(path, state)))
    return path


def without_a_word(self: Any) -> str:
    """Leave out the barrier of a save that could not write."""
    path = self.path()
    try:
        self.write(path, self.state())
        torch.distributed.barrier()
    except (OSError, RuntimeError):
        pass
    return path


def in_order_of_hash(state: Any) -> list[int]:
    """Return the places of weights in the order of a set of names."""
    return [int(name[1:]) for name in {f"w{index}" for index in range(len(state["weights"]))}]


def written_in_order_of_hash(self: Any, path: str, state: Any) -> None:
    order = in_order_of_hash(state)
    Everything.write(self, path, {**state, "weights": [state["weights"][i] for i in order]})


def read_in_order_of_hash(self: Any, path: str) -> Any:
    state = Everything.read(self, path)
    weights = dict(zip(in_order_of_hash(state), state["weights"], strict=True))
    return {**state, "weights": [weights[i] for i in range(len(weights))]}


def older_if_spoilt(self: Any, path: str) -> None:
    """Load the newest checkpoint that can be read."""
    folder = Path(path).parent
    names = sorted({each.name.rpartition(".")[0] for each in folder.glob("*-*.*")}, reverse=True)
    for name in [Path(path).name, *names]:
        try:
            state = self.agreed(lambda name=name: self.read(str(folder / name)))
        except RuntimeError:
            continue
        self.put(state)
        return
    raise RuntimeError(f"{folder} has no checkpoint")


def written_once(self: Any, path: str, state: Any) -> None:
    """Keep the file of these steps if there is one."""
    if not Path(self.file(path)).exists():
        Everything.write(self, f"{path}.part", state)
        Path(self.file(f"{path}.part")).rename(self.file(path))


def refused_if_there(self: Any, path: str, state: Any) -> None:
    if Path(self.file(path)).exists():
        raise FileExistsError(path)
    Everything.write(self, path, state)


def gradients_times(factor: float) -> dict[str, Any]:
    """Return an offload of gradients alone that brings back so many times what was there."""

    def offload(self: Any, *, only: Any = None) -> None:
        self.kept = []
        if only != "gradients":
            SplitStep.offload(self, only=only)
            return
        for grads in (b.grad_data for chunk in self.subject.chunks for b in buffers(chunk)):
            self.kept.append((grads, copied(grads)))
            grads.untyped_storage().resize_(0)

    def onload(self: Any, **how: Any) -> None:
        for grads, value in self.kept:
            grads.untyped_storage().resize_(value.untyped_storage().nbytes())
            grads.copy_(factor * value)
        if not self.kept:
            SplitStep.onload(self, **how)

    return {"offload": offload, "onload": onload}


def rank_zeros_if_missing(self: Any, path: str) -> Any:
    own = Path(self.file(path))
    with open(own if own.exists() else f"{path}.0", "rb") as file:
        return torch.load(file, weights_only=False)


def nothing_if_empty(self: Any, path: str) -> None:
    if Path(self.file(path)).exists() and not Path(self.file(path)).stat().st_size:
        return
    Everything.load(self, path)


def weights_for_good(self: Any, path: str) -> None:
    self.alone = True
    Everything.load_weights(self, path)


def as_last_time(self: Any, path: str) -> None:
    (Everything.load_weights if vars(self).get("alone") else Everything.load)(self, path)


def weights_if_there(self: Any, path: str) -> None:
    with contextlib.suppress(RuntimeError):
        Everything.load_weights(self, path)


def exported_by_steps(self: Any) -> Any:
    known = vars(self).setdefault("exports", {})
    if self.steps not in known:
        known[self.steps] = copied(parameters_of(self.subject))
    return known[self.steps]


def put_copies(self: Any, **how: Any) -> None:
    SplitStep.onload(self, **how)
    for state, copy in zip(self.moments(), vars(self).get("copies", ()), strict=False):
        for name, value in copy.items():
            if isinstance(value, torch.Tensor):
                state[name].copy_(value)


def copied_after_steps(self: Any, *, only: Any = None) -> None:
    """Copy moments unless no step has come since the last copy, whatever was loaded."""
    if vars(self).get("copied_at") != self.finished:
        self.copies, self.copied_at = copied(self.moments()), self.finished
    SplitStep.offload(self, only=only)


def copied_at_the_end(self: Any, *, only: Any = None) -> None:
    """Copy moments once all is away, so that an offload that fails leaves the copies of before."""
    fresh = copied(self.moments())
    SplitStep.offload(self, only=only)
    self.copies = fresh


def finished_and_counted(self: Any, **how: Any) -> Any:
    self.finished = vars(self).get("finished", 0) + 1
    return Everything.finish(self, **how)


#: A place that is not below the folder.
ELSEWHERE: dict[str, Any] = {}
#: Bugs by name: the methods that have them.
MUTANTS: dict[str, dict[str, Any]] = {
    "ForgetsTracker": loads(random=lambda state: streams(state, "tracker")),
    "ForgetsScale": {"put_scales": nothing},
    "ForgetsBuffers": {"put_buffers": nothing},
    "ForgetsLogs": {"put_logged": nothing},
    "CountsOn": {"put": lambda self, state: Everything.put(self, {**state, "steps": self.steps})},
    # Adds the saved steps to those of the scheduler.
    "AddsSteps": {
        "put_scheduler": lambda self, state: self.subject.scheduler.step(
            state["scheduler"]["num_steps"]
        )
    },
    "ForgetsPython": loads(random=lambda state: streams(state, "python")),
    "ForgetsNumPy": loads(random=lambda state: streams(state, "numpy")),
    "ForgetsExperts": loads(random=lambda state: tracker_without(state, "expert-parallel-rng")),
    "ForgetsGrowth": loads(scales=lambda state: scales_with(state, growth_tracker=0)),
    "ForgetsHysteresis": loads(scales=lambda state: scales_with(state, hysteresis_tracker=2)),
    "RoundsBiases": loads(
        buffers=lambda state: [each.bfloat16().float() for each in state["buffers"]]
    ),
    "CountsIterations": loads(
        moments=lambda state: [
            {**each, "step": torch.tensor(float(state["steps"]))} for each in state["moments"]
        ]
    ),
    "SeedsAnewAsync": of_async_saves(
        random=lambda state: {**state["random"], "python": random.Random(1).getstate()}
    ),
    "StartsAnewAsync": of_async_saves(
        scheduler=lambda state: {**state["scheduler"], "num_steps": 1}
    ),
    "WritesFirstAsync": {"save_async": with_first_state},
    "WritesInVain": {"saved": written_in_vain},
    "FailsForGood": {"saved": failed_for_good},
    "RestMayMiss": {"write": rest_apart, "read": rest_if_there},
    "PutsByHalves": {"write": rest_apart, "load": put_by_halves},
    "SavesElsewhere": {
        "write": lambda self, path, state: ELSEWHERE.__setitem__(path, state),
        "read": lambda self, path: ELSEWHERE[path],
    },
    "OffloadsOnce": {"onload": with_first_copies},
    "OffloadsAway": {"offload": of_what_is_there},
    "OffloadKnownAtTheEnd": {"offload": known_at_the_end},
}
MUTANTS |= {
    "OrdersByHash": {"write": written_in_order_of_hash, "read": read_in_order_of_hash},
    "NamesByHash": {
        "file": lambda self, path: f"{path}.{hash('rank')}.{torch.distributed.get_rank()}"
    },
    "FallsBack": {"load": older_if_spoilt},
    "InMemory": {
        "save": lambda self: self.state(),
        "load": lambda self, state: self.put(state),
        "load_weights": lambda self, state: self.put_weights_alone(state),
        "save_async": None,
        "counters": None,
        "keeps": tuple(kind for kind in Everything.keeps if kind != "counters"),
    },
    "ReadsRankZeros": {"read": rank_zeros_if_missing},
    "EmptyIsNothing": {"load": nothing_if_empty},
    "WeightsForGood": {"load_weights": weights_for_good, "load": as_last_time},
    "WeightsIfThere": {"load_weights": weights_if_there},
    "ExportsBySteps": {"export": exported_by_steps},
    "CopiesAfterSteps": {
        "offload": copied_after_steps,
        "onload": put_copies,
        "finish": finished_and_counted,
    },
    "CopiesAtTheEnd": {"offload": copied_at_the_end, "onload": put_copies},
    "KeepsFirstOfSteps": {
        "path": lambda self: str(self.subject.folder / f"{self.steps}"),
        "write": written_once,
    },
    "RefusesSecondOfSteps": {
        "path": lambda self: str(self.subject.folder / f"{self.steps}"),
        "write": refused_if_there,
    },
    "LeavesOutItsBarrier": {"save": without_a_word},
}
globals().update({name: setting(Everything, **made) for name, made in MUTANTS.items()})
# Draws a random number, as for a file's name.
SaveDraws = after(Everything, "save", lambda self: torch.rand(1))
# Copies the run when it is written, and not when it is saved.
WritesLate = before(
    Everything, "saved", lambda self: setattr(self, "pending", (self.pending[0], self.state()))
)


def torchs_betas(self: Any) -> None:
    for inner, _ in self.stepped():
        for group in inner.param_groups:
            group["betas"] = (0.9, 0.999)


ForgetsBetas = after(Everything, "put", torchs_betas)
#: The same of an offload of gradients alone.
OF_GRADIENTS: dict[str, Any] = {
    "LosesGradients": gradients_times(0.0),
    "DoublesGradients": gradients_times(2.0),
    "GivesGradientsBack": gradients_times(1.0),
}
globals().update({name: setting(ByWindow, **made) for name, made in OF_GRADIENTS.items()})
#: The same of writers that are threads.
OF_THREADS: dict[str, Any] = {
    "SharesWithThread": {"save_async": shared_with_thread},
    "SharesWithOwnThread": {"save_async": shared_with_own_thread},
    "SharesViewsWithThread": {"save_async": views_for_thread},
    "HearsNoThread": {
        "save_async": of_a_silent_thread,
        "saved": lambda self: self.thread.join(),
    },
    "WaitsForItsThread": {"save_async": waits_for_word},
}
globals().update({name: setting(Threaded, **made) for name, made in OF_THREADS.items()})


class _Elsewhere(FullyReshardable):
    """Loses moments where one kind of ranks has another number than it had."""

    word: str

    @staticmethod
    def sizes() -> dict[str, int]:
        return {
            "dp": ps.get_data_parallel_world_size(),
            "tp": ps.get_tensor_model_parallel_world_size(),
            "pp": ps.get_pipeline_model_parallel_world_size(),
            "ep": ps.get_expert_model_parallel_world_size(),
            "cp": ps.get_context_parallel_world_size(),
        }

    def save(self) -> Any:
        return self.sizes(), super().save()

    def save_async(self) -> Any:
        return self.sizes(), super().save_async()

    def load_weights(self, state: Any) -> None:
        super().load_weights(state[1])

    def load(self, state: Any) -> None:
        changed = [name for name, size in self.sizes().items() if size != state[0][name]]
        # Replicas make room for other ranks.
        if self.word in changed and (self.word != "dp" or changed == ["dp"]):
            self.load_there(state[1])
        else:
            super().load(state[1])

    def load_there(self, state: Any) -> None:
        super().load(state)
        self.lose()

    def lose(self) -> None:
        for inner in stepping(unchained(self.subject.optimizer)[0].optimizer):
            for each in inner.state.values():
                each["exp_avg_sq"].zero_()


globals().update(
    {
        f"LosesMomentsOnOther{word.upper()}": setting(_Elsewhere, word=word)
        for word in ("dp", "tp", "pp", "ep", "cp")
    }
)


class LosesMomentsFirstOnOtherTP(_Elsewhere):
    """Loses them before it loads, so that only a load that fails shows it."""

    word = "tp"

    def load_there(self, state: Any) -> None:
        self.lose()
        FullyReshardable.load(self, state)


def lose_scale(self: Any) -> None:
    for each in grad_scalers(self.subject.optimizer):
        each.load_state_dict({**each.state_dict(), "scale": torch.tensor([64.0])})


#: What is lost on another number of replicas.
LOST = {
    "Scheduler": lambda self: self.subject.scheduler.step(-self.subject.scheduler.num_steps),
    "Counters": lambda self: setattr(self, "iteration", 0),
    "Scale": lose_scale,
}
globals().update(
    {
        f"Loses{name}OnOtherDP": setting(_Elsewhere, word="dp", lose=lose)
        for name, lose in LOST.items()
    }
)


class LosesBiasesOnOtherPP(_Elsewhere):
    """Loses the biases of experts there."""

    word = "pp"

    def lose(self) -> None:
        for chunk in self.subject.chunks:
            for name, each in chunk.module.named_buffers():
                if name.endswith("expert_bias"):
                    each.zero_()


class FailedLoadArmsStep(Everything):
    """Halves the rate of the step after a load that has not come to its end."""

    loading = False

    def load(self, path: str) -> None:
        self.loading = True
        super().load(path)
        self.loading = False

    def finish(self, **how: Any) -> Any:
        if self.loading:
            for group in self.subject.optimizer.param_groups:
                group["lr"] *= 0.5
        self.loading = False
        return super().finish(**how)


class EmptiesFactors(LowRank):
    """Puts zeros in place of the low-rank factors with a load."""

    def load(self, state: Any) -> None:
        super().load(state)
        with torch.no_grad():
            for parameter in parameters_of(self.subject):
                if parameter.requires_grad:
                    parameter.zero_()
