"""Makes a process that torchrun has started a rank of a synchronous run.

    torchrun --nproc-per-node 8 --max-restarts 3 -m megatron_idempotent train --resume --out runs/a

There is no controller and no launcher: rank 0 does what the command does beside its ranks.
Importing the module does not import torch.
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

#: Seconds that collectives wait longer than the run may take: ranks that hang are told as such.
_MARGIN_S = 60.0


def rank() -> int | None:
    """Return the rank that torchrun has given this process; None if it did not start it."""
    started = "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ
    return int(os.environ["RANK"]) if started else None


def size() -> int | None:
    """Return the number of ranks that torchrun has started; None without torchrun."""
    return None if rank() is None else int(os.environ["WORLD_SIZE"])


def check(config: Config) -> None:
    """Check that ranks of torchrun can run this. Errors: `ConfigError`."""
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
    """Join the other ranks in the default process group; return the job, which rank 0 gives.

    The process then is as one that `cpu.RankPool` has forked. It ends with the torchrun that
    started it, and with exit code 1 after `run.timeout_s`.
    """
    limit_s, terminal = config.run.timeout_s, os.dup(2)  # which goes to a file later

    def end() -> None:
        faulthandler.dump_traceback(terminal)
        told = f"run.timeout_s is {limit_s:g} s; raise it with --set run.timeout_s=…\n"
        os.write(terminal, told.encode())
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
        config.run.device,
        int(os.environ["LOCAL_RANK"]),
        machine,
        one_machine=machine == size(),
    )
    import torch.distributed as dist

    cuda = config.run.device == "cuda"
    how = gpu.group_options(machine) if cuda else {"backend": "gloo"}
    timeout = datetime.timedelta(seconds=limit_s + _MARGIN_S)
    dist.init_process_group(**_store_of_this_start(timeout), timeout=timeout, **how)
    told = [job]
    # An object of our own; the ranks are processes of one program.
    dist.broadcast_object_list(told, src=0)
    given = told[0]
    assert given is not None
    return given


def _store_of_this_start(timeout: datetime.timedelta) -> dict[str, Any]:
    """Return torchrun's store, with keys of this start's alone, and this rank's place in the group.

    torchrun's outlives a restart, with the addresses of ranks that are gone. How often ranks were
    started says each machine's torchrun for itself, and not all say the same.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    prefixed: Any = vars(dist)["PrefixStore"]  # public, and not in torch's type information
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    start = me = secrets.token_hex(8)
    if rank == 0:
        store.set("start", start)
        members = [store.get(f"{start}/{other}").decode() for other in range(1, size)]
        store.set(f"{start}/members", json.dumps(members))
    else:
        members = []
    while rank and me not in members:  # what an earlier rank 0 has said is of others
        time.sleep(0.02)
        start = store.get("start").decode()
        store.set(f"{start}/{rank}", me)
        if store.check([f"{start}/members"]):
            members = json.loads(store.get(f"{start}/members"))
    return {"store": prefixed(start, store), "rank": rank, "world_size": size}


def train(job: Job) -> None:
    """Train as this rank. Errors: `cpu.RankError` for whatever it raises."""
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
