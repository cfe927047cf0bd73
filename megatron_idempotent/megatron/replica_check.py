"""Compares, before a step, gradients and parameters that ranks replicate; a debug mode.

`MEGATRON_IDEMPOTENT_CHECK=1` switches it on; see the case file `replicas-differ-unnoticed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_idempotent.megatron.ddp import GATHERED, REDUCTIONS, bucket_groups, name_of

_BLOCK = 1 << 20
_PRIME = 1_000_003


class ReplicaMismatchError(RuntimeError):
    """Is raised before a step if gradients or parameters differ between ranks that share them."""


class _Numbers(NamedTuple):
    """Holds three integers about a bucket group, which ranks send each other to find out if they
    differ. To compare only parameters, one field has a checksum and the others are 0.
    """

    reductions: int
    """The number of reductions that finished since `zero_grad_buffer`."""
    gradients: int
    """The checksum of the gradients; 0 if all are zero."""
    parameters: int
    """The checksum of the parameters; 0 while they wait for a gather, so are not comparable."""


def check_replicas(model_chunks: Sequence[Any]) -> None:
    """Raise if gradients or parameters differ between ranks that should have equal ones.
    Data-parallel ranks are compared and, for replicated parameters, tensor-parallel ranks. It also
    raises if a bucket group was not reduced equally often on all ranks.

    Each bucket group must have been reduced equally often, at least once if it has gradients.
    Parameters must have the same bits, and with an all-reduce gradients too. (After a
    reduce-scatter each rank holds a different shard of them.) Parameters that are not marked
    `tensor_model_parallel`, such as those of norms and routers, must have the same bits on all
    tensor-parallel ranks as well. All ranks of each chunk's groups take part, with one small
    all-gather per group, and one more if something differs.

    Raises:
        ReplicaMismatchError: on all ranks of the group; names the first parameter that differs,
            its bucket group, and the ranks.
    """
    for process_group, entries in _by_process_group(model_chunks).items():
        if torch.distributed.get_world_size(process_group) == 1:
            continue
        rows = [_Numbers(*map(int, _row(chunk, group))) for chunk, _, group in entries]
        gathered = _all_gather(rows, process_group)
        # `gathered` has a list per rank; `ranks` has all ranks' numbers of one bucket group.
        for (chunk, index, group), ranks in zip(entries, zip(*gathered, strict=True), strict=True):
            problem = _problem(group, ranks)
            if problem is not None:
                location = f"bucket group {index} of chunk {model_chunks.index(chunk)}"
                _raise(chunk, group, location, problem, ranks, process_group)
    for process_group, params in _replicated(model_chunks).items():
        _compare_replicated(params, process_group)


def _replicated(model_chunks: Sequence[Any]) -> dict[Any, list[tuple[Any, Tensor]]]:
    """Return the trained parameters of which all tensor-parallel ranks have a copy.
    The result maps each process group to (chunk, parameter) pairs.
    """
    from megatron.core import parallel_state

    dense = parallel_state.get_tensor_model_parallel_group()
    experts = parallel_state.get_expert_tensor_parallel_group()
    replicated: dict[Any, list[tuple[Any, Tensor]]] = {}
    for chunk in model_chunks:
        groups = [group for group in bucket_groups(chunk) if _comparable(chunk, group)]
        for param in chain.from_iterable(b.params_list for group in groups for b in group.buckets):
            if not getattr(param, "tensor_model_parallel", False):
                process_group = dense if getattr(param, "allreduce", True) else experts
                replicated.setdefault(process_group, []).append((chunk, param))
    return replicated


def _compare_replicated(params: Sequence[tuple[Any, Tensor]], process_group: Any) -> None:
    if torch.distributed.get_world_size(process_group) == 1:
        return
    sums = [checksum(param.data) for _, param in params]
    gathered = _all_gather([_Numbers(0, 0, int(_combine(sums)))], process_group)
    if all(rows == gathered[0] for rows in gathered):
        return
    mismatch = _first_mismatch([param.data for _, param in params], process_group)
    if mismatch is not None:
        index, ranks = mismatch
        raise ReplicaMismatchError(
            f"parameters differ between tensor-parallel ranks before the optimizer step: "
            f"{name_of(*params[index])} is the first; {ranks}. It is not marked "
            "tensor_model_parallel, so all of them should have the same copy: sum its gradient "
            "over them (param.sequence_parallel = True does, with sequence parallelism); if it is "
            "a shard, mark it, or norms leave it out"
        )


def _first_mismatch(tensors: Sequence[Tensor], process_group: Any) -> tuple[int, str] | None:
    """Return the index of the first tensor whose checksum is not equal on all ranks, and a text
    that names the ranks which differ from the group's first. Return None if all tensors are equal.

    All ranks of the group take part.
    """
    numbers = torch.distributed.get_process_group_ranks(process_group)
    sums = [_Numbers(0, int(checksum(tensor)), 0) for tensor in tensors]
    gathered = _all_gather(sums, process_group)
    for index, rows in enumerate(zip(*gathered, strict=True)):
        differing = [rank for rank, row in zip(numbers, rows, strict=True) if row != rows[0]]
        if differing:
            return index, f"ranks {differing} differ from rank {numbers[0]}"
    return None


def _problem(group: Any, ranks: Sequence[_Numbers]) -> str | None:
    if any(row.reductions == 0 for row in ranks) and any(row.gradients for row in ranks):
        return "reductions"
    for field in ("reductions", "parameters", "gradients"):
        if field == "gradients" and group.ddp_config.use_distributed_optimizer:
            continue
        if len({getattr(row, field) for row in ranks}) > 1:
            return field
    return None


def _raise(
    chunk: Any, group: Any, location: str, field: str, ranks: Sequence[_Numbers], process_group: Any
) -> None:
    if field == "reductions":
        numbers = torch.distributed.get_process_group_ranks(process_group)
        counts = {rank: row.reductions for rank, row in zip(numbers, ranks, strict=True)}
        first = name_of(chunk, group.buckets[0].params_list[0])
        raise ReplicaMismatchError(
            f"{location} (with {first}) was not reduced on every rank of its data-parallel group: "
            f"reductions since zero_grad_buffer() by rank {counts}. Set "
            "config.finalize_model_grads_func (megatron_idempotent.wire_train_config does), and "
            "let every rank run the same windows"
        )
    params = [param for bucket in group.buckets for param in bucket.params_list]
    values = [p.main_grad if field == "gradients" else p.data for p in params]
    mismatch = _first_mismatch(values, process_group)
    if mismatch is not None:
        index, differing = mismatch
        raise ReplicaMismatchError(
            f"{field} differ between data-parallel ranks before the optimizer step: "
            f"{name_of(chunk, params[index])} in {location} is the first; {differing}"
        )
    raise ReplicaMismatchError(
        f"{field} of {location} differ between ranks in padding only: {ranks}"
    )


def _row(chunk: Any, group: Any) -> tuple[Any, ...]:
    gradients = _combine([checksum(bucket.grad_data) for bucket in group.buckets])
    parameters: Any = 0
    if _comparable(chunk, group):
        parameters = _combine(
            [checksum(param.data) for bucket in group.buckets for param in bucket.params_list]
        )
    reductions = getattr(group, REDUCTIONS, 0) - (group.grad_reduce_handle is not None)
    return reductions, gradients, parameters


def _comparable(chunk: Any, group: Any) -> bool:
    # With overlap a rank gets other ranks' shards by the gather for its next forward.
    if not chunk.ddp_config.overlap_param_gather or not chunk.remove_forward_pre_hook_handles:
        return True
    return getattr(group, GATHERED, False) and group.param_gather_handle is None


def _by_process_group(model_chunks: Sequence[Any]) -> dict[Any, list[tuple[Any, int, Any]]]:
    entries: dict[Any, list[tuple[Any, int, Any]]] = {}
    for chunk in model_chunks:
        for index, group in enumerate(bucket_groups(chunk)):
            process_group = (
                group.intra_distributed_optimizer_instance_group
                if group.ddp_config.use_distributed_optimizer
                else group.data_parallel_group
            )
            entries.setdefault(process_group, []).append((chunk, index, group))
    return entries


def _all_gather(rows: Sequence[_Numbers], process_group: Any) -> list[list[_Numbers]]:
    local_rows = torch.tensor(rows, dtype=torch.int64, device=torch.cuda.current_device())
    ranks = [
        torch.empty_like(local_rows) for _ in range(torch.distributed.get_world_size(process_group))
    ]
    # All ranks of the group must enter: the gather hangs otherwise.
    torch.distributed.all_gather(ranks, local_rows, group=process_group)
    return [[_Numbers(*row) for row in rank.tolist()] for rank in ranks]


def checksum(values: Tensor) -> Tensor:
    """Return a 64-bit sum over the bits of `values`, weighted by position; 0 if all bits are 0.

    It sums integers, so that it depends on the bits alone and not on the order of summation.
    """
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = values.detach().contiguous().view(-1).view(kinds[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    # In blocks, because the 64-bit copy is up to eight times as large.
    for block in torch.split(bits, _BLOCK):
        weighted = block.to(torch.int64) * _weights(str(values.device))[: block.numel()]
        total = total * _PRIME + weighted.sum()
    return total


def _combine(sums: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(sums[0])
    for value in sums:
        total = total * _PRIME + value
    return total


@cache
def _weights(device: str) -> Tensor:
    # Odd, so that no weight loses a bit modulo 2**64.
    return 2 * torch.arange(_BLOCK, dtype=torch.int64, device=device) + 1
