"""Runs the command `train` on a rank of the session's launcher, which has imported all."""

from __future__ import annotations

import contextlib
import os

import kill_points

from megatron_idempotent.proof.cpu import pool as pools

LAUNCHER = pools._Launcher


def train(argv, out):
    """Run the command as if it was started by itself; return its exit code, and what it said."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name)
    os.environ["RECOVERY_COMMAND"] = str(os.getpid())
    kill_points.watch()

    from megatron_idempotent.rl.trainer import async_run
    from megatron_idempotent.rl.trainer import main as command

    pools._Launcher = ForkedLauncher
    pool = pools.RankPool(2)
    pool._launcher = ForkedLauncher()
    run_controller = async_run.run_controller
    async_run.run_controller = lambda job, prompts: run_controller(job, prompts, pool=pool)
    command.start_ranks = lambda job: pool.run(
        job.config.run.ranks, command.run_rank, job, timeout_s=job.config.run.timeout_s
    )
    with open(out, "a") as said, contextlib.redirect_stderr(said):
        try:
            return command.main(argv)
        finally:
            pool.close()


def ForkedLauncher(*_):
    """Make a launcher that is forked, and so need not import anything."""
    from multiprocessing import Pipe

    from megatron_idempotent.proof.cpu import launcher

    made = object.__new__(LAUNCHER)
    made._connection, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        made._connection.close()
        os.setsid()
        launcher.main(theirs.fileno(), ())
    theirs.close()

    class Process:
        returncode = None

        def wait(self, timeout=None):
            if self.returncode is None:
                _, status = os.waitpid(pid, 0)
                self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    made._process = Process()
    made._ready = False
    made.close = lambda: pools._end(made._connection, made._process)
    return made
