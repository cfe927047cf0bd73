"""A controller that rank 0 starts, once for each line of its file `said`.

`… DIRECTORY`: the first is killed while it has ranks; the second loses a rank, goes on with fresh
ones, says goodbye and exits with 3; the third has nothing left to do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TextIO

from megatron_idempotent.rl.workers import RanksLost
from megatron_idempotent.rl.workers.torchrun import TorchrunRanks, under_torchrun


async def train(directory: Path, said: TextIO) -> int:
    ranks = TorchrunRanks(2, directory, start_timeout_s=60.0)
    await ranks.start()
    print("sum", await ranks.call("add_up", 1.0), file=said)
    if not (directory / "again").exists():
        (directory / "again").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        await ranks.call("die_in_collective", [1])
    except RanksLost as lost:
        print(lost, file=said)
    await ranks.start()
    print("sum", await ranks.call("add_up", 2.0), file=said)
    await ranks.close()
    (directory / "done").touch()
    return 3


def main() -> int:
    assert not under_torchrun()
    directory = Path(sys.argv[1])
    with (directory / "said").open("a", buffering=1) as said:
        print("controller", os.getpid(), file=said)
        return 0 if (directory / "done").exists() else asyncio.run(train(directory, said))


if __name__ == "__main__":
    sys.exit(main())
