"""A controller of one rank that hangs in a call, until it is ended as its argument says.

It prints the process ids of the rank's launcher, of the rank, and its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from megatron_idempotent.proof.cpu import RankPool
from megatron_idempotent.rl.workers import EmbeddedRanks, WorkerSpec


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


#: In the rank; here it would import torch.
FACTORY = "contract_worker:make"


async def main(how: str) -> None:
    ranks = EmbeddedRanks(WorkerSpec(factory=FACTORY), 1, pool=RankPool(1, preload=("torch",)))
    await ranks.start()
    ((*_, pid, _),) = await ranks.call("describe")
    hanging = asyncio.ensure_future(ranks.call("hang"))
    await asyncio.sleep(0)
    print(json.dumps([parent(pid), pid, os.getpid()]), flush=True)
    if how == "no close":
        return
    try:
        await hanging
    finally:
        await ranks.close()


if __name__ == "__main__":
    # A shell starts what it runs in the background with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio.run(main(sys.argv[1]))
