"""Runs a function on several ranks of this machine: `run_ranks` and `RankPool`.

A pool has a launcher, a process that imports once and then forks fresh ranks for every call
(`launcher.py`). The forkserver of multiprocessing would not do: it ignores import errors of modules
that it preloads, imports the caller's main module on every rank, and keeps the environment of its
start. It neither reads the stacks of hung ranks nor ends what they have started.

Importing this does not import torch: the ranks do, not the caller.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import io
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from megatron_idempotent.lazy import naming_the_remedy, untried_torch

from . import gpu
from .errors import LauncherLost, NoDeviceError, RankError, RankFailure, RankTimeout
from .gpu import Device, chosen_device

#: Modules that the launcher imports before it forks; it skips those that are not installed.
PRELOAD = (
    "torch",
    "torch._dynamo",  # imported by the first optimizer that is built
    "megatron.core",
    "megatron.core.distributed",
    "megatron.core.dist_checkpointing",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.mimo.optimizer",  # imported by the first optimizer that is built
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.training.training",
)
#: Modules for pools that run `cpu.program`, whose tokenizers import transformers for seconds.
PROGRAM_PRELOAD = (
    *PRELOAD,
    "megatron.core.tokenizers.text.libraries",
    "megatron.core.tokenizers.text.models",
)
#: Seconds for the imports: torch and Megatron take 10 to 30 s on a slow disk.
START_TIMEOUT_S = 300.0
#: Deadlines that detect hangs grow by up to this factor on a busy machine: some checks took above
#: 60 s where three ran at once on two cores, and none had hung.
PATIENCE = 4.0
#: Seconds after the deadline for reading the stacks of all ranks and ending them.
_MARGIN_S = 30.0


class RankPool:
    """Runs functions on ranks, which it forks in milliseconds from a process that has imported
    Megatron.

    A launcher process imports torch and Megatron with the CPU runtime on and forks fresh ranks
    for every call, so that a call finds everything as it is after the import: no process
    groups, no Megatron globals, no patches, the caller's present environment. It starts with
    the first call (some ten seconds) and ends with `close()`, the `with` block or the process.

    Args:
        max_world_size: the largest number of ranks of a call.
        preload: modules to import before the first call, from the caller's `sys.path` then.
        stdout: the file descriptor for the ranks' standard output, and for upstream's while it is
            imported; None for that of this process.
        device: "cpu" for the runtime and gloo; "checked" for the same with ranks that refuse what a
            GPU would (`cpu.placement`); "cuda" for the GPUs of this machine and NCCL, or gloo if
            ranks outnumber them. None for the device in MEGATRON_IDEMPOTENT_DEVICE, and without it
            the CPU.

    Example:
        with RankPool(2) as pool:
            losses = pool.run(2, train, 10)
    """

    def __init__(
        self,
        max_world_size: int,
        *,
        preload: Sequence[str] = PRELOAD,
        stdout: int | None = None,
        device: str | None = None,
    ) -> None:
        if max_world_size < 1:
            raise ValueError(f"max_world_size must be at least 1, found {max_world_size}")
        self.max_world_size = max_world_size
        self._preload = tuple(preload)
        self._stdout = stdout
        self.device = chosen_device(device)
        self._lock = threading.Lock()
        self._launcher: _Launcher | None = None
        self._environ: dict[str, str] = {}
        self._rehashing_pool: RankPool | None = None

    def hashing_differently(self) -> RankPool:
        """Return a pool like this one, but with another seed of string hashes, and so other orders
        of sets.

        It imports everything at its first call, and closes with this pool.
        """
        if self._rehashing_pool is None:
            pool = RankPool(
                self.max_world_size,
                preload=self._preload,
                stdout=self._stdout,
                device=self.device,
            )
            pool._environ["PYTHONHASHSEED"] = (
                "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
            )
            self._rehashing_pool = pool
        return self._rehashing_pool

    def run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = 120.0,
        patience: float = 1.0,
        distributed: bool = True,
        already_applied: bool = False,
        pipes: Sequence[socket.socket] = (),
        **kwargs: Any,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on `world_size` ranks; return their results, by rank.

        `fn` is defined at the top level of a module, or in a notebook or at a prompt, and is then
        pickled by value; its arguments and results are pickled. In a rank the CPU runtime is on
        unless the pool is on "cuda", RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are
        set and, with `distributed`, the default group is up. With `already_applied` the ranks have
        all patches from their start, and a call of `apply()` on them takes milliseconds; without it
        they have no patches. `timeout_s` counts from the fork of the ranks. With `patience` the
        time for which ranks have waited for a processor is added to it, up to so many times
        `timeout_s` in all: a busy machine is not a hang. It needs Linux's `/proc/PID/schedstat`;
        without that nothing is added. `pipes` has a connected socket for each rank, whose function
        gets it as its first argument; they are closed here.

        Raises:
            RankError: a rank raised or died.
            RankTimeout: the ranks missed the deadline; it has the stacks of all of them.
            ValueError: `fn` is a lambda or a closure, or `world_size` is out of range.
            ModuleNotFoundError: torch is missing; or `fn` is of a notebook or a prompt, and
                cloudpickle is missing.
            RuntimeError: a rank imports the module that calls this, which would go on for ever.
        """
        __tracebackhide__ = True
        if _importing:
            raise RuntimeError(
                f"{_importing[0]} starts ranks while a rank imports it, and each of those would "
                'import it again: put what starts them under `if __name__ == "__main__":`'
            )
        if pipes and len(pipes) != world_size:
            raise ValueError(f"{len(pipes)} pipes, and there are {world_size} ranks")
        if not 1 <= world_size <= self.max_world_size:
            raise ValueError(
                f"world_size must be between 1 and this pool's max_world_size "
                f"{self.max_world_size}, found {world_size}"
            )
        main_file = getattr(sys.modules["__main__"], "__file__", None)
        if main_file is not None and not os.path.exists(main_file):
            main_file = None  # <stdin>
        by_value = _typed_in(fn)
        arguments = b"" if by_value else _by_name(fn, args, kwargs)
        if by_value or (main_file is None and b"__main__" in arguments):  # of a notebook's class
            with naming_the_remedy("to run on ranks, a function or class that no file has"):
                import cloudpickle
            by_value, arguments = True, cloudpickle.dumps((fn, args, kwargs))
        home = sys.modules.get(fn.__module__)
        file = getattr(home, "__file__", None)
        call = Call(
            module=fn.__module__,
            file=file and os.path.abspath(file),
            arguments=arguments,
            by_value=by_value,
            rewritten=_rewritten_by_pytest(),
            world_size=world_size,
            timeout_s=timeout_s,
            patience=patience,
            distributed=distributed,
            already_applied=already_applied,
            # An empty entry means the current directory, which may change before it is used.
            sys_path=tuple(entry or os.getcwd() for entry in sys.path),
            cwd=os.getcwd(),
            environ=dict(os.environ),
            main_file=main_file and os.path.abspath(main_file),
            device=self.device,
            has_pipes=bool(pipes),
        )
        closing, unless_answered = contextlib.ExitStack(), contextlib.ExitStack()
        with self._lock, closing, unless_answered:
            for pipe in pipes:
                closing.callback(pipe.close)
            # Also on KeyboardInterrupt: ranks without a listener must not go on.
            unless_answered.callback(self.close)
            if self._launcher is None:
                with naming_the_remedy("a rank"):
                    if find_spec("torch") is None:
                        raise ModuleNotFoundError("No module named 'torch'", name="torch")
                self._launcher = _Launcher(self._preload, self._stdout, self._environ, call)
            outcome = self._launcher.run_call(call, pipes)
            unless_answered.pop_all()
        if outcome.failures and not outcome.timed_out:
            raise RankError(outcome.failures, outcome.stacks)
        results = {rank: pickle.loads(outcome.results[rank]) for rank in sorted(outcome.results)}
        if outcome.timed_out:
            raise RankTimeout(timeout_s, outcome.stacks, results)
        return list(results.values())

    def close(self) -> None:
        """End the launcher process and its ranks; a later `run` starts a new one."""
        if self._rehashing_pool is not None:
            self._rehashing_pool.close()
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    distributed: bool = True,
    device: str | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call a function on ranks of a `RankPool` that is made for this call; return their results, by
    rank. It imports torch and Megatron each time, and leaves no process.

    Example:
        from megatron_idempotent.proof import cpu
        losses = cpu.run_ranks(2, train, 10)
    """
    with RankPool(world_size, device=device) as pool:
        return pool.run(
            world_size, fn, *args, timeout_s=timeout_s, distributed=distributed, **kwargs
        )


class _Launcher:
    """The pool's handle on its launcher process: starts the process, sends it calls over a
    connection, and receives their outcomes.
    """

    def __init__(
        self,
        preload: Sequence[str],
        stdout: int | None,
        environ_of_its_own: dict[str, str],
        first_call: Call,
    ) -> None:
        self._connection, child_end = Pipe()
        program = (
            # The caller handles Ctrl-C: it closes the connection, which ends the launcher. A
            # session of its own would do, too, and slow ranks down (`yield_to_the_running`).
            "import os; os.setpgrp(); "
            "from megatron_idempotent.proof.cpu.launcher import main; "
            f"main({child_end.fileno()}, {tuple(preload)!r}, {first_call.device!r})"
        )
        on_device = gpu.ENVIRONMENT if first_call.device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
        environ = {**os.environ, **on_device, **environ_of_its_own}
        # Ranks share few cores, and OpenMP threads of the launcher would not survive a fork.
        environ.setdefault("OMP_NUM_THREADS", "1")
        # 0.15 builds an allocator while it is imported, and where there is a CUDA compiler but no
        # device torch fails to choose an architecture for it. Nothing here calls what it builds.
        environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0")
        # What upstream warns about while it is imported concerns GPUs; a caller who has set
        # PYTHONWARNINGS=error would not get past it.
        environ["PYTHONWARNINGS"] = "ignore"
        environ[MARK] = self._mark = uuid.uuid4().hex
        with contextlib.closing(child_end):
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=(child_end.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                env=environ,
            )
        self.close = weakref.finalize(self, _end, self._connection, self._process, self._mark)
        self._ready = False
        # It imports what its ranks would: a Megatron that the caller has put on `sys.path`, and not
        # the installed one; and a test's modules with their assertions rewritten.
        with contextlib.suppress(OSError):  # it has ended, which `run_call` reports
            self._connection.send((first_call.sys_path, first_call.rewritten))

    def run_call(self, call: Call, pipes: Sequence[socket.socket]) -> Outcome:
        if not self._ready:
            word = self._receive(START_TIMEOUT_S, "importing torch and Megatron")
            if isinstance(word, RankFailure):
                if word.exception_type.endswith(NoDeviceError.__name__):
                    raise NoDeviceError(word.message)
                summary = f"the ranks could not be started: {word.exception_type}: {word.message}"
                lines = filter(None, (summary, untried_torch(), word.traceback))
                raise RuntimeError("\n".join(lines))
            if (untried := untried_torch()) is not None:
                logging.getLogger(__name__).warning(untried)
            self._ready = True
        self._connection.send_bytes(pickle.dumps(call))
        send_pipes(self._connection, [pipe.fileno() for pipe in pipes])
        for pipe in pipes:  # or the rank's end would go unseen
            pipe.close()
        outcome = self._receive(call.longest_s + _MARGIN_S, "running the ranks")
        assert isinstance(outcome, Outcome)
        return outcome

    def _receive(self, timeout_s: float, doing: str) -> Any:
        if not self._connection.poll(timeout_s):
            raise RankTimeout(timeout_s, {-1: f"the launcher was {doing} and gave no answer"}, {})
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError) as gone:
            raise LauncherLost(
                f"the process that starts the ranks ended while {doing}, with exit code "
                f"{_reap(self._process, self._mark)}"
            ) from gone


def _end(connection: Connection, process: subprocess.Popen[bytes], mark: str) -> None:
    """Close the connection to the launcher, which then ends its ranks and itself; wait until it has
    ended.
    """
    connection.close()
    _reap(process, mark)


def _reap(process: subprocess.Popen[bytes], mark: str) -> int:
    """Wait up to 5 s for the launcher to end, then kill all processes with its mark in their
    environment; return the launcher's exit code.

    A launcher that was killed has ended none of the processes that its ranks started.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5.0)
    entry = f"{MARK}={mark}".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if entry in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)
    process.kill()  # where there is no /proc; it may have ended
    return process.wait()


# Calls: messages between a pool, its launcher and its ranks; functions go by reference.

#: The environment variable by which a launcher, its ranks and all that these start are known.
MARK = "_MEGATRON_IDEMPOTENT_LAUNCHER"
#: The name multiprocessing gives the parent's main module in a child; importing multiprocessing
#: makes it an alias of `__main__` in the parent, so that pickles travel both ways.
MAIN_IN_RANK = "__mp_main__"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The message that asks a launcher to run a function on all ranks, with arguments and
    environment.
    """

    #: The function's module.
    module: str
    #: The module's source file; None for one without.
    file: str | None
    #: Pickled (function, args, kwargs), which a rank can read once it has the caller's sys.path.
    arguments: bytes
    #: True if cloudpickle has written the arguments, and writes the results.
    by_value: bool
    #: The file of each module whose assertions pytest has rewritten in the caller, by name.
    rewritten: dict[str, str]
    world_size: int
    timeout_s: float
    patience: float
    distributed: bool
    already_applied: bool
    sys_path: tuple[str, ...]
    cwd: str
    environ: dict[str, str]
    #: The file of the caller's `__main__`, for arguments whose classes are defined there.
    main_file: str | None
    device: Device = "cpu"
    #: True if a pipe for each rank follows the call.
    has_pipes: bool = False

    @property
    def longest_s(self) -> float:
        """The most seconds that a call may take. Between `timeout_s` and this, ranks may run on
        only for as long as they have waited for free processors.
        """
        return self.timeout_s * max(self.patience, 1.0)


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Holds the results and failures of one call on all ranks. `results` is complete exactly if
    nothing failed or hung.
    """

    #: The pickled return value of each rank.
    results: dict[int, bytes] = field(default_factory=dict)
    #: The failures in the order in which they came.
    failures: list[RankFailure] = field(default_factory=list)
    #: The stacks of ranks that missed the deadline, or were ended because a peer had failed.
    stacks: dict[int, str] = field(default_factory=dict)
    #: True if the deadline passed.
    timed_out: bool = False


def send_pipes(connection: Connection, descriptors: Sequence[int]) -> None:
    """Send file descriptors over a connection; the process at the other end gets duplicates."""
    with socket.socket(fileno=os.dup(connection.fileno())) as way:
        for descriptor in descriptors:
            socket.send_fds(way, [b"p"], [descriptor])


def receive_pipes(connection: Connection, count: int) -> list[int]:
    """Receive `count` file descriptors from `send_pipes` over the connection; return them."""
    descriptors: list[int] = []
    with socket.socket(fileno=os.dup(connection.fileno())) as way:
        while len(descriptors) < count:
            word, received, _, _ = socket.recv_fds(way, 1, 1)
            if not word:
                raise EOFError
            descriptors += received
    return descriptors


def _typed_in(function: Callable[..., Any]) -> bool:
    """Return whether a function was defined in a notebook, at a prompt or by `python -c`.

    No file has it, so that ranks cannot look it up.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    return (
        getattr(function, "__module__", None) == "__main__"
        and code is not None
        and not os.path.exists(code.co_filename)
    )


def _by_name(fn: Callable[..., Any], *arguments: Any) -> bytes:
    """Pickle a function, by its name, and its arguments; raise `ValueError` for a lambda or a
    closure.
    """
    try:
        pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError) as error:
        raise ValueError(
            f"ranks look functions up by name ({error}): define it at the top of a module, and "
            "pass what it closes over as arguments"
        ) from None
    return pickle.dumps((fn, *arguments))


# What a rank needs of pytest's rewriting; a release without it shows assertions as Python does.
_OF_PYTEST = ("AssertionRewritingHook", "_read_pyc", "get_cache_dir", "PYC_TAIL", "rewrite_asserts")


def _rewritten_by_pytest() -> dict[str, str]:
    """Return, by module name, the file of each module whose assertions pytest has rewritten in this
    process.

    Installed ones are left out: pytest rewrites its plugins, too.
    """
    rewrite = sys.modules.get("_pytest.assertion.rewrite")
    if rewrite is None or not all(hasattr(rewrite, name) for name in _OF_PYTEST):
        return {}
    installed = sysconfig.get_path("purelib") + os.sep
    files = {}
    hooks = [
        finder for finder in sys.meta_path if isinstance(finder, rewrite.AssertionRewritingHook)
    ]
    for name in {name for hook in hooks for name in getattr(hook, "_rewritten_names", ())}:
        module = sys.modules.get(name)
        file = str(getattr(module, "__file__", None) or installed)
        if not file.startswith(installed) and not hasattr(module, "__path__"):
            files[name] = file
    return files


class RewritingFinder(importlib.abc.MetaPathFinder):
    """An import finder for ranks: imports a test's modules with their assertions rewritten, as
    pytest does.
    """

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if (file := self._files.get(name)) is None:
            return None
        return importlib.util.spec_from_file_location(name, file, loader=_Rewriting(name, file))


class _Rewriting(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        from _pytest.assertion import rewrite

        file = Path(self.path)
        # The caller's pytest has left it there, unless it may write no byte code.
        code = rewrite._read_pyc(file, rewrite.get_cache_dir(file) / (file.stem + rewrite.PYC_TAIL))
        if code is None:
            source = file.read_bytes()
            tree = ast.parse(source, filename=self.path)
            rewrite.rewrite_asserts(tree, source, self.path)
            code = compile(tree, self.path, "exec", dont_inherit=True)
        return code


_importing: list[str] = []
"""The module that this rank is importing for a call; empty otherwise."""


def resolve(call: Call) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Unpickle a call's function, args and kwargs on a rank, and return them.

    The function's module is imported, if needed from a file.
    """
    if call.rewritten:
        sys.meta_path.insert(0, RewritingFinder(call.rewritten))
    _importing.append(call.file or call.module)
    try:
        if not call.by_value:
            if call.main_file is not None and b"__main__" in call.arguments:
                _load_main(call.main_file)
            if call.module != "__main__" and call.file not in (None, _known_file(call.module)):
                _load_file(call.module, call.file)
        function_and_arguments: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
        function_and_arguments = pickle.loads(call.arguments)
    finally:
        _importing.clear()
    return function_and_arguments


def _load_main(file: str) -> None:
    """Load the caller's main module, without running the code under `if __name__ == "__main__"`."""
    module = sys.modules.get(MAIN_IN_RANK)
    if module is None or getattr(module, "__file__", None) != file:
        module = sys.modules["__main__"] = _load_file(MAIN_IN_RANK, file)
        # A process that this rank spawns cannot find the module by this name, but by its file.
        module.__spec__ = None


class StoragePickler(pickle.Pickler):
    """Pickles tensor storages so that another process can load them on the CPU without importing
    Megatron.
    """

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, (torch.TypedStorage, torch.UntypedStorage)):
            _, arguments = obj.__reduce__()
            return _load_storage, arguments
        # cloudpickle's own method, if cloudpickle is a base.
        return getattr(super(), "reducer_override", lambda _: NotImplemented)(obj)


def _load_storage(data: bytes) -> Any:
    import torch

    # The caller may have no device, and would start the driver for one that it has.
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def dump_result(result: Any, *, by_value: bool) -> bytes:
    """Pickle a rank's result such that the caller can load it without importing Megatron, with its
    tensors on the CPU. With `by_value`, the pickle includes functions and classes that were defined
    at a prompt or in a notebook.
    """
    kind: type[pickle.Pickler] = StoragePickler
    if by_value:
        import cloudpickle

        kind = type("ByValue", (StoragePickler, cloudpickle.Pickler), {})
    out = io.BytesIO()
    kind(out).dump(result)
    return out.getvalue()


def _known_file(name: str) -> str | None:
    """Return the file that importing `name` would load; None if it cannot be imported."""
    if (module := sys.modules.get(name)) is not None:
        origin = getattr(module, "__file__", None)
    else:
        parent = name.rpartition(".")[0]
        if parent and _known_file(parent) is None:
            return None
        spec = importlib.util.find_spec(name)
        origin = spec.origin if spec is not None else None
    return origin and os.path.abspath(origin)


def _load_file(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} (for module {name}) is not a Python source file")
    module = importlib.util.module_from_spec(spec)
    # Before execution and under its own name: pickling looks classes up there.
    sys.modules[name] = module
    sys.path.insert(0, str(Path(file).parent))
    spec.loader.exec_module(module)
    return module
