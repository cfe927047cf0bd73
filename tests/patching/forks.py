"""A process that forks a child for every scenario, so that each has a process of its own.

Run as a script it is that process: it reads one JSON request per line and answers each with one.
It has imported nothing, and no pytest, which would be in the way of who looks at what is imported.
What needs an imported Megatron runs on a rank.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Patches outside of megatron.training, as many as most scenarios need; all take a second or two.
FEW = "pipeline-seed-offset,grad-scale-func,forward-pre-hook-reentry"


class Forks:
    """The client's end.

    Example:
        assert forks.run("scenarios.outcomes")["grad-scale-func"]["status"] == "pending_import"
    """

    def __init__(self) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("MEGATRON_IDEMPOTENT")}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )

    def run(
        self, scenario: str, *, among: str = "", timeout_s: float = 120, **arguments: Any
    ) -> Any:
        """Call a function in a child; its result, by way of JSON.

        Args:
            scenario: module and name of the function.
            among: ids of patches with commas between them; the child applies no others.
            timeout_s: after that, the stacks of all threads go to stderr and the child ends.
            arguments: of the function.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = json.dumps([scenario, arguments, among, timeout_s], default=str)
        self._process.stdin.write(f"{request}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        return value_of(json.loads(line) if line else {"error": "the forking process ended"})

    def close(self) -> None:
        """End the process: it leaves when its input does."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def serve() -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what scenarios print is no answer
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(forked(lambda r=request: _run(*r))), file=answers, flush=True)


def forked(work: Callable[[], Any]) -> dict[str, Any]:
    """Call `work` in a child; return its value or its error, by way of JSON."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = {"value": work()}
        except BaseException:  # noqa: BLE001 - the parent's test fails with it
            answer = {"error": traceback.format_exc()}
        with os.fdopen(send, "w") as pipe:
            pipe.write(json.dumps(answer))
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return json.loads(said or '{"error": "the child ended without an answer, or missed its time"}')  # type: ignore[no-any-return]


def value_of(answer: dict[str, Any]) -> Any:
    """Return what a child has answered.

    Raises:
        AssertionError: it has raised.
    """
    assert "error" not in answer, answer["error"]
    return answer["value"]


def _run(scenario: str, arguments: dict[str, Any], among: str, timeout_s: float) -> Any:
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    if among:
        os.environ["MEGATRON_IDEMPOTENT_ONLY"] = among
    module, _, name = scenario.rpartition(".")
    return getattr(importlib.import_module(module), name)(**arguments)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    serve()
