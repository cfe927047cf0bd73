"""Runs the command `train` on a rank of the session's launcher, which has imported all."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback

import kill_points

from megatron_idempotent.proof.cpu import pool as pools

LAUNCHER = pools._Launcher


def train(argv, out):
    """Run the command as if it was started by itself; return its exit code, and what it said."""
    _as_if_started()
    from megatron_idempotent.rl.trainer import async_run, loop
    from megatron_idempotent.rl.trainer import main as command

    pools._Launcher = ForkedLauncher
    pool = pools.RankPool(2)
    pool._launcher = ForkedLauncher()
    run_controller = async_run.run_controller
    async_run.run_controller = lambda job, prompts: run_controller(job, prompts, pool=pool)
    command.start_ranks = lambda job: pool.run(
        job.config.run.ranks, loop.work, job, timeout_s=job.config.run.timeout_s
    )
    with open(out, "a") as said, contextlib.redirect_stderr(said):
        try:
            return command.main(argv)
        finally:
            pool.close()


def train_under_torchrun(argv, out, restarts=40, folder=None):
    """Run torchrun with the command, in a folder; its ranks are forked. Return its exit code."""
    _as_if_started()
    if folder is not None:
        os.chdir(folder)
        sys.path.insert(0, folder)  # as `python -m` does
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = ForkedProgram
    options = [
        *("--nproc-per-node=2", "--standalone"),
        *(f"--max-restarts={restarts}", "--monitor-interval=0.1"),
    ]
    with open(out, "a", buffering=1) as said, contextlib.redirect_stderr(said):
        os.dup2(said.fileno(), 2)
        try:
            run.main([*options, "-m", "megatron_idempotent", "train", *argv])
        except ChildFailedError:
            return 1
        return 0


def _as_if_started():
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name)
    if kill_points.PLAN in os.environ:
        kill_points.watch()


class Forked:
    """Runs a function in a process that is forked, as `subprocess.Popen` does a program."""

    def __init__(self, function):
        self.returncode, self.pid = None, os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setpgrp()
                code = function() or 0
            except SystemExit as end:
                code = end.code
            except BaseException:  # noqa: BLE001 (told as a program does)
                traceback.print_exc()
            finally:
                os._exit(code)
        while os.getpgid(self.pid) != self.pid:
            time.sleep(0.001)

    def wait(self, timeout=None):
        until = time.monotonic() + (timeout or float("inf"))
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("forked", timeout)
            time.sleep(0.01)
        return self.returncode

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class ForkedProgram(Forked):
    """Is `python -m …` of this package, without its imports."""

    def __init__(self, args, env=None, **_):
        def program():
            from megatron_idempotent.rl.trainer import main as command

            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
            module, *argv = args[args.index("-m") + 1 :]
            assert (module, argv.pop(0)) == ("megatron_idempotent", "train")
            return command.main(argv)

        args = list(args)
        super().__init__(program)


def ForkedLauncher(*_):
    """Make a launcher that is forked, and so need not import anything."""
    import uuid
    from multiprocessing import Pipe

    from megatron_idempotent.proof.cpu import launcher

    made = object.__new__(LAUNCHER)
    made._connection, theirs = Pipe()
    made._mark = uuid.uuid4().hex

    def serve():
        made._connection.close()
        os.environ[pools.MARK] = made._mark
        launcher.main(theirs.fileno(), ())

    made._process = Forked(serve)
    theirs.close()
    made._connection.send((sys.path, {}))
    made._ready = False
    made.close = lambda: pools._end(made._connection, made._process, made._mark)
    return made
