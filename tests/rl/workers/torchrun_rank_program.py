"""A program that torchrun runs in the tests: `… SPEC_FACTORY ARGUMENT_JSON DIRECTORY
[COMMAND…]`."""

import json
import sys
from pathlib import Path

from megatron_idempotent.rl.workers import WorkerSpec
from megatron_idempotent.rl.workers.torchrun import run_rank, under_torchrun

if __name__ == "__main__":
    assert under_torchrun()
    factory, argument, directory, *command = sys.argv[1:]
    spec = WorkerSpec(factory=factory, argument=json.loads(argument))
    sys.exit(run_rank(spec, Path(directory), command, start_timeout_s=60.0))
