"""Ranks and engines on two nodes of a cluster, both of this machine, in a process of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from starts import started


def test_ranks_of_two_nodes_meet_and_send_weights_to_engines_of_both():
    program = Path(__file__).with_name("two_nodes.py")
    done = started(sys.executable, "-W", "ignore", program, timeout_s=400)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(set(said["rank nodes"])) == 2
    assert said["local ranks"] == ["0", "0"]
    assert len(set(said["engine nodes"])) == 2
    assert said["committed"] == ["engine-0", "engine-1"]
    assert said["tensors here"] == ["meta"]
