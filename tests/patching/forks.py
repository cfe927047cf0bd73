"""A process that forks a child for every scenario, so that each has a process of its own.

Run as a script it is that process: it reads one JSON request per line and answers each with one.
Warm, it has imported Megatron. A child throws Megatron's modules away before it begins, so that to
import them again costs it nothing else, unless it says that they may be there from the start.
This imports no pytest, which would be in the way of scenarios that look at `sys.modules`.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any


class Forks:
    """The client's end.

    Example:
        assert forks.run("statuses", alter={...})["grad-scale-func"]["status"] == "drifted"
    """

    def __init__(self, *, warm: bool) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("MEGATRON_IDEMPOTENT")}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "warm" if warm else "cold"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        self.first = self._answer()
        """Returns what the warm process saw when it imported Megatron with the patches waiting."""

    def run(
        self, scenario: str, *, imported: bool = False, timeout_s: float = 120, **arguments: Any
    ) -> Any:
        """Call a function in a child; its result, by way of JSON.

        Args:
            scenario: name of the function, with its module where that is not `scenarios`.
            imported: leave Megatron imported where the process is warm.
            timeout_s: after that, the stacks of all threads go to stderr and the child ends.
            arguments: of the function.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([scenario, arguments, imported, timeout_s]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process: it leaves when its input does."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the forking process ended"}
        assert "error" not in answer, answer["error"]
        return answer["value"]


def serve(warm: bool) -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what scenarios print is no answer
    first = _first_import() if warm else None
    print(json.dumps({"value": first}), file=answers, flush=True)
    for line in sys.stdin:
        print(_in_child(*json.loads(line)), file=answers, flush=True)


def _in_child(scenario: str, arguments: dict[str, Any], imported: bool, timeout_s: float) -> str:
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(timeout_s, exit=True)
        if not imported:
            _forget("megatron")
        try:
            module, _, name = scenario.rpartition(".")
            function = getattr(importlib.import_module(module or "scenarios"), name)
            answer = {"value": function(**arguments)}
        except BaseException:  # noqa: BLE001 - the parent's test fails with it
            answer = {"error": traceback.format_exc()}
        with os.fdopen(send, "w") as pipe:
            pipe.write(json.dumps(answer))
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer or json.dumps({"error": f"{scenario} did not end within {timeout_s} s"})


def _first_import() -> Any:
    """Runs in this fresh interpreter: apply, import Megatron, look, revert, look again."""
    import megatron_idempotent

    before = {row.id: row.status for row in megatron_idempotent.apply()}
    scenarios = importlib.import_module("scenarios")
    scenarios.import_megatron()
    after = {row.id: row.status for row in megatron_idempotent.report()}
    patched = {name: not scenarios.stock(name) for name in scenarios.live()}
    megatron_idempotent.revert()
    reverted = {name: scenarios.stock(name) for name in scenarios.live()}
    _forget("megatron_idempotent")
    _forget("scenarios")
    return {"before": before, "after": after, "patched": patched, "reverted": reverted}


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    serve(sys.argv[1] == "warm")
