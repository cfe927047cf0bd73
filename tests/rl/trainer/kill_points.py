"""Kills processes of a run at named places in its code, which does not know of it.

Python tells a tool when a function begins and returns (`sys.monitoring`, from 3.12 on): nothing is
wrapped or replaced, so that all happens in the order in which it does without the tool. In the same
way it notes what a run has at each checkpoint and each publish.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

#: Names the file with the kills that are left; each process of a run reads it.
PLAN = "RECOVERY_KILLS"
#: Says what runs the ranks: `embedded`, `ray` or `torchrun`.
RUNNER = "RECOVERY_RUNNER"
_TOOL = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill:
    """One process dies, or several, when a process comes by a place for the `nth` time."""

    phase: str
    place: str
    """`module:function`, by the last part of the module's name and the function's whole one."""
    when: str = "call"
    """`call` or `return`."""
    nth: int = 1
    """Counted in each process; in a later process it happens at the next time."""
    at: str = "rank 1"
    """The process that comes by: `rank 0`, `rank 1` or `command`."""
    who: str = "rank 1"
    """Whom it kills: `rank 1`, `all ranks`, `launcher`, `command`, `engine` or `all`."""


class _Watch:
    """Looks out for the first kill of the plan in this process, and notes what it has."""

    def __init__(self, plan: Path) -> None:
        self._plan = plan
        self._seen: dict[Kill, int] = {}
        self._functions = {kill.place.partition(":")[2] for kill in self._left()}
        self._functions |= _NOTED.keys() | _COMES.keys()

    def _left(self) -> list[Kill]:
        return [Kill(**fields) for fields in json.loads(self._plan.read_text())]

    def passes(self, code, when):
        """Note and kill, if it is time to; return whether the function may be looked at again."""
        name = code.co_qualname
        if name not in self._functions:
            return False
        me = f"rank {os.environ['RANK']}" if "RANK" in os.environ else "command"
        if when == _NOTED.get(name, (None,))[0]:
            self._note("notes", _NOTED[name][1](sys._getframe(2).f_locals))
        if when == "call" and _COMES.get(name) == Path(code.co_filename).stem:
            self._note("processes", {me: [named(os.getpid()), named(os.getppid())]})
        left = self._left()
        for kill in left:
            module, _, function = kill.place.partition(":")
            if (function, kill.at, kill.when) != (name, me, when):
                continue
            if Path(code.co_filename).stem != module:
                continue
            self._seen[kill] = self._seen.get(kill, 0) + 1
            if kill == left[0] and self._seen[kill] >= kill.nth:
                self._fire(kill, left[1:])
        return True

    def _note(self, name, value):
        with (self._plan.parent / name).open("ab", buffering=0) as file:
            # At once: other ranks append, and it may be killed.
            file.write(f"{json.dumps(value)}\n".encode())

    def _whom(self):
        """Return the processes of a run that live, by what they are in it."""
        newest = {}
        for line in (self._plan.parent / "processes").read_text().splitlines():
            newest |= json.loads(line)
        # What is killed has to be what was noted, and not one that has its number now.
        living = {name: own[0] for name, (own, _) in newest.items() if alive(*own)}
        parents = {name: [of[0]] if alive(*of) else [] for name, (_, of) in newest.items()}
        pids = {name: [pid] for name, pid in living.items()}
        ranks = [pid for name, pid in sorted(living.items()) if name != "command"]
        above = list({pid for name in living if name != "command" for pid in parents[name]})
        started = pids.get("command", [])
        if os.environ[RUNNER] == "torchrun":  # its ranks' parent, and no command beside them
            started = above
        everyone = dict.fromkeys([*(each for pid in started for each in descendants(pid)), *ranks])
        return {
            **pids,
            "all ranks": ranks,
            "launcher": above,
            "all": [pid for pid in everyone if alive(pid)],
            "engine": self._engine(),
        }

    def _engine(self):
        """Return the processes of the server that samples, if there is one, and it lives."""
        file = self._plan.with_suffix(".engine")
        pid = int(file.read_text()) if file.exists() else 0
        return descendants(pid) if pid and alive(pid) else []

    def _fire(self, kill, others):
        living = self._whom()
        whom = living.get(kill.who)
        if not whom:  # ranks that died before are not there again: the next time, then
            return
        with self._plan.with_suffix(".spent").open("a") as file:
            json.dump([named(pid) for pid in living["all"]], file)
            file.write("\n")
        draft = self._plan.with_suffix(".draft")
        draft.write_text(json.dumps([dataclasses.asdict(each) for each in others]))
        draft.replace(self._plan)
        me = os.getpid()
        for pid in sorted(whom, key=lambda pid: pid == me):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)  # if it is none of them, it sees them gone


def watch() -> None:
    """Kill from now on, in this process and in those that it forks, as the plan says."""
    monitoring, watched = sys.monitoring, _Watch(Path(os.environ[PLAN]))
    events = {"call": monitoring.events.PY_START, "return": monitoring.events.PY_RETURN}
    monitoring.use_tool_id(_TOOL, "kill points")

    def told(when):
        return lambda code, *_: None if watched.passes(code, when) else monitoring.DISABLE

    for when, event in events.items():
        monitoring.register_callback(_TOOL, event, told(when))
    monitoring.set_events(_TOOL, events["call"] | events["return"])


def _digest(*values):
    """The hash of tensors and of what JSON or `repr` knows, in any nesting."""
    import torch

    found = hashlib.sha256()

    def add(value):
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                add([str(key), value[key]])
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)
        elif isinstance(value, torch.Tensor):
            found.update(f"{value.dtype} {tuple(value.shape)}".encode())
            found.update(
                value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        else:
            found.update(getattr(value, "tobytes", repr(value).encode)())
        found.update(b"|")

    add(values)
    return found.hexdigest()


def _saved(local):
    """Note all that a rank has when it saves, which decides how it goes on."""
    import numpy
    import torch
    from megatron.core import tensor_parallel

    stock, noted = local["policy"].stock, {}
    for optimizer in getattr(stock.optimizer, "chained_optimizers", [stock.optimizer]):
        for group in optimizer.optimizer.param_groups:
            # A load leaves a `step` in the groups; torch's Adam counts in each parameter's state.
            left_out = ("params", "step")
            settings = {name: value for name, value in group.items() if name not in left_out}
            noted.setdefault("optimizer", []).append(repr(sorted(settings.items())))
            for parameter in group["params"]:
                state = optimizer.optimizer.state.get(parameter, {})
                noted["optimizer"].append(_digest(parameter, state))
    noted["scheduler"] = _digest(stock.scheduler.state_dict())
    noted["random"] = [
        _digest(random.getstate()),
        _digest(numpy.random.get_state()),
        _digest(torch.get_rng_state()),
        _digest(torch.cuda.get_rng_state()),
        _digest(tensor_parallel.get_cuda_rng_tracker().get_states()),
    ]
    return {f"checkpoint {local['iteration']}, rank {os.environ['RANK']}": noted}


def _published(local):
    """The bytes that each engine serves for a version of the trainer."""
    rank = os.environ.get("RANK", "command")
    served = {}
    for name, engine in local["self"]._engines.items():
        if hasattr(engine, "_updates"):  # the weights of a server are not here
            served[name] = _served(engine)
        elif hasattr(engine, "_actor"):
            import ray

            served[name] = ray.get(engine._actor.__ray_call__.remote(_served_by_actor))
    return {f"version {local['version']}, {rank}": served}


def _served_by_actor(actor):
    return _served(actor._engine)


def _served(engine):
    return _digest(engine._updates._weights._tensors)


#: The command comes by the first of these, and each rank by the second.
_COMES = {"prepare": "output", "start_policy": "policy"}
_NOTED = {"save_weights": ("call", _saved), "Fleet.publish": ("return", _published)}


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "0"]


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def named(pid: int) -> tuple[int, str]:
    """Return a process id and when its process began: the id alone may be another's soon."""
    stat = _stat(pid)
    return pid, stat[19] if len(stat) > 19 else ""


def alive(pid: int, began: str | None = None) -> bool:
    """Return whether there is such a process, and it has not ended."""
    return _stat(pid)[0] not in "ZX" and began in (None, named(pid)[1])


def descendants(pid: int) -> list[int]:
    """A process and all that it and its children have started, in the order of their starts."""
    parents = {int(each.name): _parent(int(each.name)) for each in Path("/proc").glob("[0-9]*")}
    found = [pid]
    for each in found:  # grows meanwhile
        found += sorted(child for child, parent in parents.items() if parent == each)
    return found
