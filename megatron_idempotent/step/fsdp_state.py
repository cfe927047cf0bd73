"""Reads, reduces and drops the state that `fully_shard` keeps while a step is open.

Stands on parts of torch.distributed.fsdp._fully_shard that have no public name: the parameter
groups of a model, the flags on them, and the callback that ends each backward. `fsdp_internals`
lists all of them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .fsdp_internals import groups_of, mark_sharded, reset


class Shards:
    """A fully sharded model, as its parameter groups: each is gathered and reduced as one."""

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
        """Data-parallel rank: the place in the mesh that fully_shard was given."""
        return int(self._line.index(dist.get_rank()))

    @property
    def replicas(self) -> int:
        """Data-parallel ranks."""
        return len(self._line)

    @property
    def speaks(self) -> bool:
        """True on the one line of ranks that counts for all; each line has every replica."""
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
        """The sharded parameters in the model's order, in which norms are added up; reshards."""
        self.reshard()
        return list(self.model.parameters())

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

        What FSDP2 calls at the end of each backward, for groups whose own hook did not fire there:
        the same copy-in and the same collective per group, so the same bits.
        """
        self.model.set_requires_gradient_sync(True)
        self._root._root_post_backward_final_callback()

    def multiply(self, factor: float) -> None:
        """Turn the gradients, of which FSDP2 has made means over ranks, into sums x factor."""
        for group in self._groups:
            divided_by = group.gradient_divide_factor or group.mesh_info.mesh.size()
            for param in group.fsdp_params:
                grad = param.sharded_param.grad
                if grad is not None:
                    assert isinstance(grad, DTensor)
                    grad.to_local().mul_(divided_by * factor)

    def reshard(self) -> None:
        """Have the modules hold sharded parameters, so that no forward computes with old ones."""
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
        """`settle`, and no gradients: a reset leaves those that are accumulated."""
        self.settle()
        for group in self._groups:
            for param in group.fsdp_params:
                param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None
                param.sharded_param.grad = None


class AccumulatedSnapshot:
    """Unsharded gradients, by reference: a reset of FSDP2 is documented to drop them."""

    def __init__(self, shards: Shards) -> None:
        self._held = [
            (param, param.unsharded_accumulated_grad, unsharded, unsharded.grad)
            for group in shards._groups
            for param in group.fsdp_params
            if (unsharded := getattr(param, "_unsharded_param", None)) is not None
        ]

    def restore(self) -> None:
        """Put them back; what has come since is dropped."""
        for param, accumulated, unsharded, grad in self._held:
            param.unsharded_accumulated_grad = accumulated
            unsharded.grad = grad


class SyncSnapshot:
    """Keeps per parameter group whether a backward reduces and ends the iteration."""

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
    """The scale of a `torch.amp.GradScaler`, which has not looked at gradients yet."""

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
