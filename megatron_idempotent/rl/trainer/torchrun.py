"""Runs a process that torchrun has started as a rank of a synchronous run.

    torchrun --nproc-per-node 8 --max-restarts 3 -m megatron_idempotent train --resume --out runs/a

There is no controller and no launcher; rank 0 also does the work of the command. Importing the
module does not import torch.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import json
import os
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

from megatron_idempotent.proof.cpu import NoDeviceError, RankError

from . import ConfigError

if TYPE_CHECKING:
    from .config import Config
    from .output import Job

#: Seconds by which the timeout of collectives exceeds that of the run, so that the run's timeout is
#: reached, and reported, first.
_MARGIN_S = 60.0


def rank() -> int | None:
    """Return this process's rank under torchrun; None without torchrun."""
    started = "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ
    return int(os.environ["RANK"]) if started else None


def size() -> int | None:
    """Return the number of ranks that torchrun has started; None without torchrun."""
    return None if rank() is None else int(os.environ["WORLD_SIZE"])


def check(config: Config) -> None:
    """Raise `ConfigError` if the run is asynchronous, or if torchrun has started another number of
    ranks than `run.ranks`.

    Raises:
        ConfigError: the run is asynchronous, or has another number of ranks.
    """
    if config.run.mode == "async":
        raise ConfigError(
            "run.mode is 'async', and torchrun has started this process; an asynchronous run "
            "starts its ranks itself: leave torchrun out, and use --cluster ray for several "
            "machines"
        )
    if config.run.ranks != size():
        raise ConfigError(
            f"run.ranks is {config.run.ranks}, and torchrun has started {size()} (WORLD_SIZE); "
            "start as many, or leave run.ranks out of a new run"
        )


def join(config: Config, job: Job | None = None) -> Job:
    """Set this process up as a rank that torchrun started: join the default process group, and
    return the job of rank 0, which is broadcast.

    The process is set up like a rank of `cpu.RankPool`. It ends together with its torchrun, and
    with exit code 1 after `run.timeout_s`.
    """
    limit_s = config.run.timeout_s
    terminal = os.dup(2)  # descriptor 2 is redirected to a file later

    def end() -> None:
        faulthandler.dump_traceback(terminal)
        text = f"run.timeout_s is {limit_s:g} s; raise it with --set run.timeout_s=…\n"
        os.write(terminal, text.encode())
        os._exit(1)

    late = threading.Timer(limit_s, end)
    late.daemon = True
    late.start()
    from megatron_idempotent.proof.cpu import gpu, launcher

    launcher.die_with_the_parent()
    try:
        launcher.begin(config.run.device)
    except NoDeviceError as error:
        raise ConfigError(str(error)) from error
    machine = int(os.environ["LOCAL_WORLD_SIZE"])
    launcher.take_device(
        config.run.device, int(os.environ["LOCAL_RANK"]), machine, one_machine=machine == size()
    )
    import torch.distributed as dist

    cuda = config.run.device == "cuda"
    group_options = gpu.group_options(machine) if cuda else {"backend": "gloo"}
    timeout = datetime.timedelta(seconds=limit_s + _MARGIN_S)
    dist.init_process_group(**_store_of_this_start(timeout), timeout=timeout, **group_options)
    jobs = [job]
    # Pickled objects are safe: all ranks are processes of one program.
    dist.broadcast_object_list(jobs, src=0)
    job_of_rank_0 = jobs[0]
    assert job_of_rank_0 is not None
    return job_of_rank_0


def _store_of_this_start(timeout: datetime.timedelta) -> dict[str, Any]:
    """Return `store`, `rank` and `world_size` for `init_process_group`. The store is torchrun's,
    with a key prefix that is new whenever the ranks are started or restarted.

    torchrun's store survives a restart, with addresses of dead ranks. Its restart counter is no
    prefix, because it is per machine, and may differ between machines.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    prefixed: Any = vars(dist)["PrefixStore"]  # public, but missing from torch's type stubs
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    start = me = secrets.token_hex(8)
    if rank == 0:
        store.set("start", start)
        members = [store.get(f"{start}/{member}").decode() for member in range(1, size)]
        store.set(f"{start}/members", json.dumps(members))
    else:
        members = []
    while rank and me not in members:  # members of an earlier start do not include this rank
        time.sleep(0.02)
        start = store.get("start").decode()
        store.set(f"{start}/{rank}", me)
        if store.check([f"{start}/members"]):
            members = json.loads(store.get(f"{start}/members"))
    return {"store": prefixed(start, store), "rank": rank, "world_size": size}


def train(job: Job) -> None:
    """Train as this rank of a torchrun job until the job is complete, and leave the process group.

    Raises:
        RankError: training raised an error.
    """
    import torch.distributed as dist

    from megatron_idempotent.proof.cpu import launcher, placement

    from .loop import work

    checked = job.config.run.device == "checked"
    try:
        with placement.checking() if checked else contextlib.nullcontext():
            work(job)
    except Exception as error:
        raise RankError([launcher.describe(dist.get_rank(), error)], {}) from error
    dist.destroy_process_group()
