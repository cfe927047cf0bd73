"""Adds gradients of microbatches up exactly, so that no bit depends on how many replicas there are.

Additions in floating point round, so that their order counts: two replicas with two microbatches
each add (a + b) + (c + d), and one with four ((a + b) + c) + d. Integers are added exactly. Each
microbatch's gradient is rounded to a multiple of 2^-40 once, and the multiples are added, on a rank
and between ranks.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

_QUANTA = 2.0**40
#: The largest gradient of one microbatch, in quanta: 2^11 of them fit into 63 bits.
_LIMIT = 2.0**52


class ExactSums:
    """Adds up microbatches' gradients as integers, which do not round.
    It takes each microbatch's gradients from `main_grad`, and writes the sums to `main_grad` at the
    end of the step.

    It holds 8 bytes for each trained parameter of this rank. It does not take gradients that come
    after the backward, such as those of deferred embeddings.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self.active = False
        """True while a step is open: then gradients are taken."""
        self._sums: dict[Tensor, Tensor] = {}
        self._groups: list[tuple[Any, Tensor, list[Tensor]]] = []
        self._nodes: list[Any] = []
        parameters = [param for chunk in chunks for param in chunk.param_to_bucket_group]
        experts = [param for param in parameters if not getattr(param, "allreduce", True)]
        dense = [param for param in parameters if getattr(param, "allreduce", True)]
        if dense:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            self._hold(dense, group)
        if experts:
            self._hold(experts, parallel_state.get_expert_data_parallel_group())
        # The largest gradient of a microbatch, for the message; NaN if any gradient was NaN.
        self._largest = torch.zeros((), dtype=torch.float64, device=parameters[0].device)

    def _hold(self, parameters: list[Tensor], group: Any) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        flat = torch.zeros(sum(sizes), dtype=torch.int64, device=parameters[0].device)
        self._groups.append((group, flat, parameters))
        for parameter, sums in zip(parameters, torch.split(flat, sizes), strict=True):
            self._sums[parameter] = sums.view(parameter.shape)
            # DDP's own hook is there already, and adds to main_grad before.
            node: Any = parameter.expand_as(parameter).grad_fn
            node = node.next_functions[0][0]
            node.register_hook(functools.partial(_take, weakref.ref(self), parameter))
            self._nodes.append(node)  # keeps the node and its hooks alive

    def take(self, parameter: Any) -> None:
        """Add a parameter's `main_grad` to its exact sum, and zero it. A hook calls this after each
        microbatch's backward.
        """
        if not self.active:
            return
        gradient = parameter.main_grad
        quanta = gradient.double().mul_(_QUANTA).round_()
        torch.maximum(self._largest, quanta.abs().max(), out=self._largest)
        self._sums[parameter].add_(quanta.to(torch.int64))
        gradient.zero_()

    def open(self) -> None:
        """Zero the sums, because a step begins; from now on gradients are added to the sums."""
        self._largest.zero_()
        for _, flat, _ in self._groups:
            flat.zero_()
        self.active = True

    def close(self) -> None:
        """End the step: gradients are no longer moved from `main_grad` into the exact sums. The
        sums are not written back; `put` does that.
        """
        self.active = False

    def check(self) -> None:
        """Raise `RuntimeError` if a microbatch's gradient was too large to add exactly; NaN and
        infinity pass.

        Raises:
            RuntimeError: names the largest element and the limit.
        """
        largest = float(self._largest) / _QUANTA
        if _LIMIT / _QUANTA < largest < float("inf"):
            raise RuntimeError(
                f"a microbatch has a gradient of {largest:g}, and order_stable=True adds up to "
                f"{_LIMIT / _QUANTA:g} exactly: give the loss a smaller scale, with a divisor that "
                "is smaller by as much, or leave order_stable out"
            )

    def put(self) -> None:
        """Sum the exact gradients over the data-parallel ranks, and write them into `main_grad`.
        DDP's later reduction does not change them.

        All data-parallel ranks take part, and for experts those that share them. The first of
        these ranks gets the sum and the others zeros, so that DDP's reduction changes nothing.
        """
        self.active = False
        finite = bool(torch.isfinite(self._largest))
        for group, flat, parameters in self._groups:
            dist.all_reduce(flat, group=group)
            first = dist.get_rank(group) == 0
            for parameter in parameters:
                gradient: Any = parameter.main_grad  # type: ignore[attr-defined]
                if not finite:
                    gradient.fill_(float("nan"))
                elif first:
                    gradient.copy_(self._sums[parameter].double().div_(_QUANTA))
                else:
                    gradient.zero_()


def _take(sums: Callable[[], ExactSums | None], parameter: Any, *_: Any) -> None:
    # DDP keeps the hook for as long as the model lives, and not the step that has made it.
    exact_sums = sums()
    if exact_sums is not None:
        exact_sums.take(parameter)
