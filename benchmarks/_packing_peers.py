"""Loads the sequence packers of other frameworks from their source files.

They are called as in the frameworks' trainers. The result lists a framework without a checkout as
missing.
"""

from __future__ import annotations

import ast
import copy
import heapq
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

#: Maps the sequences' lengths, the token budget of a microbatch and the number of ranks to the
#: microbatches of each rank, as lists of sequence indices in the order of execution.
Packer = Callable[[Sequence[int], int, int], list[list[list[int]]]]


def peers() -> dict[str, Packer | str]:
    """Return by name the sequence packers of NeMo-RL and verl; instead of a packer that is missing,
    the reason.
    """
    found: dict[str, Packer | str] = {}
    nemo, verl = os.environ.get("NEMO_RL_SOURCE"), os.environ.get("VERL_SOURCE")
    for name in ("modified_first_fit_decreasing", "first_fit_decreasing", "concatenative"):
        label = f"NeMo-RL, {name.replace('_', ' ')}"
        found[label] = _nemo(nemo, name) if nemo else "NEMO_RL_SOURCE names no checkout"
    found["verl"] = _verl(verl) if verl else "VERL_SOURCE names no checkout"
    return found


def _nemo(source: str, name: str) -> Packer:
    """Return a packer of NeMo-RL, which packs the entire batch and distributes the packs to ranks
    round-robin, as `shard_by_batch_size` does.
    """
    path = Path(source, "nemo_rl", "data", "packing", "algorithms.py")
    spec = importlib.util.spec_from_file_location("_peer_nemo_packing", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)

    def pack(lengths: Sequence[int], budget: int, ranks: int) -> list[list[list[int]]]:
        packer = module.get_packer(name, bin_capacity=budget, bin_count_multiple=ranks)
        bins = packer.pack(list(lengths))
        return [bins[rank::ranks] for rank in range(ranks)]

    return pack


def _verl(source: str) -> Packer:
    """Return verl's packer, which balances the work between ranks, and then between the
    microbatches of each rank.

    These are the steps of verl's `_balance_batch` and `rearrange_micro_batches`. Only three
    functions of verl's file are executed, because the file imports a trainer's dependencies.
    """
    path = Path(source, "verl", "utils", "seqlen_balancing.py")
    wanted = ("calculate_workload", "karmarkar_karp", "get_seqlen_balanced_partitions")
    tree = ast.parse(path.read_text("utf-8"))
    tree.body = [
        each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name in wanted
    ]
    import torch

    space: dict[str, Any] = {"copy": copy, "heapq": heapq, "torch": torch}
    space["chain"] = itertools.chain
    exec(compile(tree, str(path), "exec"), space)
    work_of, partition = space["calculate_workload"], space["get_seqlen_balanced_partitions"]

    def pack(lengths: Sequence[int], budget: int, ranks: int) -> list[list[list[int]]]:
        work = work_of(torch.tensor(lengths)).tolist()
        shares = partition(work, k_partitions=ranks, equal_size=True)
        number = max(-(-sum(lengths[i] for i in share) // budget) for share in shares)
        found = []
        for share in shares:
            parts = partition([work[i] for i in share], k_partitions=number, equal_size=False)
            parts.sort(key=lambda part, its=share: (sum(work[its[i]] for i in part), part[0]))
            parts.reverse()
            parts = parts[::2][::-1] + parts[1::2]
            found.append([[share[i] for i in part] for part in parts])
        return found

    return pack
