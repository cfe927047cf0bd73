"""A process that forks a child for every scenario, so that each has a process of its own.

Run as a script it is that process: it reads one JSON request per line and answers each with one.
Warm, it has imported Megatron. A child throws Megatron's modules away before it begins, so that to
import them again costs it nothing else, unless it says that they may be there from the start.
Cold, it has imported nothing, and no pytest, which would be in the way of who looks at what is
imported.
"""

from __future__ import annotations

import faulthandler
import functools
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
        """Results of the warm process as it imported Megatron with the patches waiting."""

    def run(
        self,
        scenario: str,
        *,
        imported: bool = False,
        among: str | None = None,
        timeout_s: float = 120,
        **arguments: Any,
    ) -> Any:
        """Call a function in a child; its result, by way of JSON.

        Args:
            scenario: module and name of the function.
            imported: leave Megatron imported where the process is warm.
            among: ids of patches with commas between them; the child applies no others.
            timeout_s: after that, the stacks of all threads go to stderr and the child ends.
            arguments: of the function.
        """
        assert self._process.stdin is not None
        request = json.dumps([scenario, arguments, imported, among, timeout_s], default=str)
        self._process.stdin.write(f"{request}\n")
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
        return value_of(json.loads(line) if line else {"error": "the forking process ended"})


def in_child(
    *, imported: bool | Callable[..., bool] = True, among: str | None = FEW, timeout_s: float = 120
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a test's body run in a child of the warm process.

    Args:
        imported: leave Megatron imported; or tells it from the test's parameters.
        among: as for `Forks.run`.
        timeout_s: as for `Forks.run`.
    """

    def decorated(body: Callable[..., None]) -> Callable[..., None]:
        import inspect  # not in the cold process

        @functools.wraps(body)
        def test(warm: Forks, **parameters: Any) -> None:
            there = imported(**parameters) if callable(imported) else imported
            name = f"{body.__module__}.{body.__name__}"
            warm.run(name, imported=there, among=among, timeout_s=timeout_s, **parameters)

        mine = inspect.signature(test, follow_wrapped=False).parameters["warm"]
        signature = inspect.signature(body)
        test.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[mine, *signature.parameters.values()]
        )
        return test

    return decorated


def serve(warm: bool) -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what scenarios print is no answer
    first = _first_import() if warm else None
    print(json.dumps({"value": first}), file=answers, flush=True)
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


def _run(
    scenario: str, arguments: dict[str, Any], imported: bool, among: str | None, timeout_s: float
) -> Any:
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    if not imported:
        _forget("megatron")
    if among is not None:
        os.environ["MEGATRON_IDEMPOTENT_ONLY"] = among
    module, _, name = scenario.rpartition(".")
    function = getattr(importlib.import_module(module), name)
    return getattr(function, "__wrapped__", function)(**arguments)


def _first_import() -> Any:
    """Runs in this fresh interpreter: apply, import Megatron, look, revert, look again."""
    import megatron_idempotent

    before = {row.id: row.status for row in megatron_idempotent.apply()}
    scenarios = importlib.import_module("scenarios")
    scenarios.import_megatron()
    after = {row.id: row.status for row in megatron_idempotent.report()}
    patched = [not scenarios.stock(name) for name in scenarios.live()]
    megatron_idempotent.revert()
    reverted = [scenarios.stock(name) for name in scenarios.live()]
    _forget("megatron_idempotent")
    _forget("scenarios")
    importlib.import_module("pytest")  # which modules of tests import
    return {"before": before, "after": after, "patched": patched, "reverted": reverted}


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    serve(sys.argv[1] == "warm")
