"""Runs forward and backward of microbatches on FSDP2, where ranks meet in every layer.

A rank that fails outside of the layers goes on through them with zeros, so that no other rank waits
for it; all ranks learn of the failure when the microbatches are through.

It relies on parts of torch.distributed.fsdp._fully_shard that have no public name: the parameter
groups of a model, the flags on them, and the callback that ends each backward. `fsdp_internals`
lists all of them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

from megatron_idempotent.window.agreement import (
    WindowAborted,
    compare,
    control_group,
    describe,
    exchange,
    poison,
)

from .fsdp_internals import accumulate, end_backward, groups_of, mark_sharded, reset
from .lifecycle import Forward
from .loss import Reported, StepLoss, called, has_graph, reported
from .microbatches import Batch, Piece, Tables, ghost, outside, spec


class Shards:
    """Works on a fully sharded model's parameter groups, each gathered and reduced as one."""

    def __init__(self, model: FSDPModule) -> None:
        assert isinstance(model, nn.Module)
        self.model = model
        self._modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        # fully_shard([a, b]) gives both modules one state.
        states = {id(s): s for s in (module._get_fsdp_state() for module in self._modules)}
        self._groups = [group for s in states.values() for group in groups_of(s)]
        self._root = model._get_fsdp_state()
        widest = max(self._groups, key=lambda group: int(group.mesh_info.mesh.size()))
        # Each rank on a line of its own through the other dimensions, such as tensor parallelism.
        self._line = widest.mesh_info.mesh.mesh.flatten().tolist()

    @property
    def is_part(self) -> bool:
        """True if another sharded model has called this one, and keeps its iteration's state."""
        return self._root._is_root is False

    @property
    def replica(self) -> int:
        """The data-parallel rank: this rank's place in the mesh that fully_shard was given."""
        return int(self._line.index(dist.get_rank()))

    @property
    def replicas(self) -> int:
        """The number of data-parallel ranks."""
        return len(self._line)

    @property
    def is_reporting_rank(self) -> bool:
        """True on rank 0 and the ranks of its line in the mesh, which has each replica once."""
        return 0 in self._line

    @property
    def device(self) -> Any:
        """The device of unsharded parameters."""
        return self._groups[0].device

    def process_groups(self) -> list[Any]:
        """Returns the groups that gather parameters, reduce gradients and sum their norms.

        DTensor caches by mesh, and meshes of the same ranks are equal: it sums norms in the group
        of the mesh that came first.
        """
        found = []
        for group in self._groups:
            meshes = [group.mesh_info.mesh, *(p._sharding_spec.mesh for p in group.fsdp_params)]
            found += [each for mesh in dict.fromkeys(meshes) for each in mesh.get_all_groups()]
        ranks = {tuple(dist.get_process_group_ranks(each)) for each in found}
        for each in list(distributed_c10d._world.pg_map):
            of_mesh = each is dist.group.WORLD or each.group_desc.startswith("mesh_")
            if of_mesh and tuple(dist.get_process_group_ranks(each)) in ranks:
                found.append(each)
        return list(dict.fromkeys(found))

    def parameters(self) -> list[nn.Parameter]:
        """Reshards, and returns the parameters in the model's order, in which norms add up."""
        self.reshard()
        return list(self.model.parameters())

    def trained(self) -> list[torch.Tensor]:
        """Returns this rank's shards of the parameters that need gradients; reshards nothing."""
        sharded = (param.sharded_param for group in self._groups for param in group.fsdp_params)
        with torch.no_grad():  # else each is a call of autograd's, which takes longer than the look
            return [each.to_local() for each in sharded if each.requires_grad]

    def place(self) -> str:
        """Describes this rank's progress in the model's collectives, to be compared with others."""
        order = len(getattr(self._root._comm_ctx, "post_forward_order", ()))
        groups = (
            f"{group._training_state.name} {group._sharded_state.name} "
            f"{group._all_gather_result is not None} {len(group._post_forward_indices)}"
            for group in self._groups
        )
        return f"{order}; {'; '.join(groups)}"

    def reduce(self) -> None:
        """Reduce what backwards without synchronisation have accumulated. All ranks take part.

        FSDP2 calls the same function at the end of each backward, for groups whose own hook did
        not fire there: it makes the same copy-in and collective per group, so the same bits.
        """
        self.model.set_requires_gradient_sync(True)
        end_backward(self._root)

    def multiply(self, factor: float) -> None:
        """Turn the gradients from FSDP2's means over ranks into sums over ranks x factor."""
        for group in self._groups:
            divided_by = group.gradient_divide_factor or group.mesh_info.mesh.size()
            for param in group.fsdp_params:
                grad = param.sharded_param.grad
                if grad is not None:
                    assert isinstance(grad, DTensor)
                    grad.to_local().mul_(divided_by * factor)

    def reshard(self) -> None:
        """Free unsharded copies of parameters, so that no forward computes with old ones."""
        for module in self._modules:
            module.reshard()

    def settle(self) -> None:
        """Put back what forwards and backwards leave in FSDP2, exceptions in them included."""
        if self._root._is_root:  # before the first forward there is nothing, nor its streams
            reset(self.model)
        for group in self._groups:
            # Whatever the group has noted: an exception may have come between its parameters.
            for param in group.fsdp_params:
                param.to_sharded()
            mark_sharded(group)

    def drop(self) -> None:
        """Settle, and drop all gradients: a reset leaves those that are accumulated."""
        self.settle()
        for group in self._groups:
            for param in group.fsdp_params:
                accumulate(param, None)
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None
                param.sharded_param.grad = None


def token_table_of(model: nn.Module) -> Tables:
    """Returns the size of the vocabulary: that of the input embeddings of models that name them."""
    found: list[Any] = list(model.modules())
    if callable(named := getattr(model, "get_input_embeddings", None)):
        with contextlib.suppress(NotImplementedError):  # of a model that names none after all
            found = [named()]
    sizes = [each.num_embeddings for each in found if isinstance(each, nn.Embedding)]
    # Without a name, no token can be looked up that is outside of the largest table.
    return Tables(max(sizes, default=None), None)


class GradientSnapshot:
    """Keeps gradients, by reference: a reset of FSDP2 may drop them, from torch 2.15 on all."""

    def __init__(self, shards: Shards) -> None:
        params = [param for group in shards._groups for param in group.fsdp_params]
        self._accumulated = [(param, param.unsharded_accumulated_grad) for param in params]
        held = ((param.sharded_param, getattr(param, "_unsharded_param", None)) for param in params)
        self._held = [(each, each.grad) for pair in held for each in pair if each is not None]

    def restore(self) -> None:
        """Put the gradients back; those that have come since are dropped."""
        for param, accumulated in self._accumulated:
            accumulate(param, accumulated)
        for parameter, grad in self._held:
            parameter.grad = grad


class SyncSnapshot:
    """Keeps whether each group's gradients are reduced, and whether a backward is the last."""

    def __init__(self, shards: Shards) -> None:
        self._groups = [(g, g.reduce_grads, g.all_reduce_grads) for g in shards._groups]
        self._context = shards._root._state_ctx
        self._last = self._context.is_last_backward

    def restore(self) -> None:
        """Put it back; may be called again."""
        for group, reduce, all_reduce in self._groups:
            group.reduce_grads, group.all_reduce_grads = reduce, all_reduce
        self._context.is_last_backward = self._last


class SchedulerSnapshot:
    """Keeps the state of a learning-rate schedule, and of the schedules that it is made of."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._state = copy.deepcopy(scheduler.state_dict())

    def restore(self) -> None:
        """Put it back; may be called again."""
        self._scheduler.load_state_dict(copy.deepcopy(self._state))


class ScalerSnapshot:
    """Keeps the state of a `torch.amp.GradScaler` that has not looked at gradients yet."""

    def __init__(self, scaler: Any, device: Any) -> None:
        self._scaler = scaler
        self._state = scaler.state_dict()
        self._device = device

    def restore(self) -> None:
        """Put it back; may be called again."""
        if self._state:  # it has none where it is not enabled
            # Only update() forgets what gradients were looked at, and only after a first scale().
            self._scaler.scale(torch.zeros((), device=self._device))
            self._scaler.update(self._state["scale"])
            self._scaler.load_state_dict(self._state)


# Where the graphs of some tensors end, and gradients of zero for them.
Zeros = list[tuple[GradientEdge, torch.Tensor]]

_THROUGH = "through"


class Watch:
    """Tracks the model's forward, and refuses one that records gradients outside of the step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []
        self._running = False
        self._entered = self._left = 0
        # Not the output itself, which may be large, and done with before the loss is computed.
        self.zeros: Zeros = []

    def is_taken(self) -> bool:
        """Returns whether another open step watches the model."""
        hooks = self._model._forward_pre_hooks.values()
        return any(isinstance(getattr(hook, "__self__", None), Watch) for hook in hooks)

    def install(self) -> None:
        self._handles = [
            # Ahead of FSDP2's, which would leave traces of a forward that is refused.
            self._model.register_forward_pre_hook(self._enter, prepend=True),
            self._model.register_forward_hook(self._leave),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.stop()

    def start(self) -> None:
        self._running = True
        self._entered = self._left = 0

    def stop(self) -> None:
        self._running, self.zeros = False, []

    @property
    def began(self) -> bool:
        """True once the forward has entered the model."""
        return self._entered > 0

    @property
    def inside(self) -> bool:
        """True while the forward is inside of the model."""
        return self._entered != self._left

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self._running and torch.is_grad_enabled():
            raise RuntimeError(
                "an FSDPTrainStep is open for this model, and a forward was called that records "
                "gradients: its backward would add to the step's. Use step.microbatch(), or "
                "step.reading(), or finish() or abort() the step first"
            )
        self._entered += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._left += 1
        if self._running:
            self.zeros = zeros_for(output)


class FSDPCall:
    """Runs this rank's microbatches between two agreements of all ranks."""

    def __init__(self, shards: Shards, watch: Watch, forward: Forward, scaler: Any) -> None:
        self._shards = shards
        self._watch = watch
        self._forward = forward
        self._scaler = scaler
        self._error: Exception | None = None
        self._told: str | None = None
        self._place = _THROUGH
        self._number = 0

    @property
    def stopped(self) -> bool:
        """True if this rank has left the model in the middle and can run nothing more."""
        return self._place is not _THROUGH

    def run(self, piece: Piece, loss: StepLoss | None) -> Reported | None:
        """Run one forward and backward, and return what the loss reported.

        Without a loss, or after a failure, zeros go backwards, and None is returned.
        """
        self._number += 1
        self._watch.start()
        try:
            backward, found = self._forward_and_loss(piece, loss)
            if not self.stopped:
                backward()
            return found
        except Exception as error:  # noqa: BLE001  told to all ranks, and raised on all
            self._stop(error, "backward")
            return None
        finally:
            self._watch.stop()

    def settle(self, deadline_s: float) -> None:
        """Raise on all ranks where any rank failed. A collective.

        Raises:
            WindowAborted: all ranks are through, or have stopped at the same place.
            SessionPoisoned: some rank has stopped where others may wait for it.
        """
        failures = exchange(self._told, deadline_s)
        if not failures:
            return
        places = compare(self._place, control_group(deadline_s))
        if self._error is not None:
            # The caller may hold the error for long; its frames hold activations.
            traceback.clear_frames(self._error.__traceback__)
        if len(set(places)) != 1:
            told = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
            raise poison(
                f"{told}; not all ranks have stopped at the same place, and others may wait there "
                "in a collective of FSDP2's"
            ) from self._error
        raise WindowAborted(
            failures, "No rank waits for another; abort() the step."
        ) from self._error

    def _forward_and_loss(
        self, piece: Piece, loss: StepLoss | None
    ) -> tuple[Callable[[], None], Reported | None]:
        """Run the forward and the loss; return the backward to run, and what the loss reported."""
        microbatch = piece.batch
        try:
            output = self._forward(self._shards.model, microbatch)
        except Exception as error:  # noqa: BLE001  told to all ranks, and raised on all
            if isinstance(error, IndexError):  # an embedding's says neither the token nor where
                told = outside(token_table_of(self._shards.model), microbatch, read=True)
                if told is not None:
                    named = ValueError(f"the microbatch {told}")
                    named.__cause__ = error
                    error = named.with_traceback(error.__traceback__)
            return functools.partial(_send, self._zeros_after(error, microbatch)), None
        if loss is None or self._error is not None:
            return functools.partial(_send, zeros_for(output)), None
        try:
            total, metrics = called(loss, output, microbatch)
            found = reported(loss, total, metrics, piece)
            if not isinstance(total, torch.Tensor) or not has_graph(total):
                return functools.partial(_send, zeros_for(output)), found
            total = total.reshape(())
            scaled = total if self._scaler is None else self._scaler.scale(total)
            return scaled.backward, found
        except Exception as error:  # noqa: BLE001  told to all ranks, and raised on all
            self._carry(error, "loss")
            return functools.partial(_send, zeros_for(output)), None

    def _zeros_after(self, error: Exception, microbatch: Batch) -> Zeros:
        """Return zeros that can go backwards through the model after `forward` has failed."""
        if self._watch.inside:
            self._stop(error, "forward of the model")
            return []
        self._carry(error, "forward")
        if not self._watch.began:
            # What was to go into the model could not be made of the batch; of zeros it may be.
            try:
                zeros = ghost(spec(microbatch), self._shards.device)
                return zeros_for(self._forward(self._shards.model, zeros))
            except Exception as again:  # noqa: BLE001  told to all ranks, and raised on all
                self._stop(again, "forward")
        return self._watch.zeros

    def _carry(self, error: Exception, where: str) -> None:
        if self._error is None:
            self._error, self._told = error, f"{where}: {describe(error)}"

    def _stop(self, error: Exception, where: str) -> None:
        self._carry(error, where)
        frames = traceback.extract_tb(error.__traceback__)
        lines = ", ".join(f"{frame.filename}:{frame.lineno}" for frame in frames)
        self._place = f"microbatch {self._number}; {self._shards.place()}; {lines}"


def zeros_for(output: Any) -> Zeros:
    """Returns the edges of the output's graph, each with zeros that can go backwards from it."""
    return [
        (get_gradient_edge(leaf), leaf.detach().new_zeros(()).expand(leaf.shape))
        for leaf in _pytree.tree_leaves(output)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]


def _send(zeros: Zeros) -> None:
    edges, gradients = zip(*zeros, strict=True)
    torch.autograd.backward(edges, gradients)
