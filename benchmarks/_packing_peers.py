"""Packers of other frameworks, out of their own files, called as their trainers do.

A peer whose checkout is not named is listed as such. Legend: n sequences, R ranks.
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

#: Lengths, budget and ranks to each rank's microbatches, in the order in which they are run.
Packer = Callable[[Sequence[int], int, int], list[list[list[int]]]]


def peers() -> dict[str, Packer | str]:
    """Packers by name, or why one is not here."""
    found: dict[str, Packer | str] = {}
    nemo, verl = os.environ.get("NEMO_RL_SOURCE"), os.environ.get("VERL_SOURCE")
    for name in ("modified_first_fit_decreasing", "first_fit_decreasing", "concatenative"):
        label = f"NeMo-RL, {name.replace('_', ' ')}"
        found[label] = _nemo(nemo, name) if nemo else "NEMO_RL_SOURCE names no checkout"
    found["verl"] = _verl(verl) if verl else "VERL_SOURCE names no checkout"
    return found


def _nemo(source: str, name: str) -> Packer:
    """Packs of the whole batch, dealt out to ranks in turn (`shard_by_batch_size`)."""
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
    """Sequences are dealt out to ranks by their work, and then into microbatches by it.

    As `_balance_batch` and `rearrange_micro_batches` do. The file imports what only a trainer
    needs, so its functions are taken out of it.
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
