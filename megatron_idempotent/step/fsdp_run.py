"""Runs forward and backward of microbatches on FSDP2, where ranks meet in every layer.

A rank that fails outside of the layers goes on through them with zeros, so that no other rank waits
for it; all ranks learn of the failure when the microbatches are through.

It relies on parts of torch.distributed.fsdp._fully_shard that have no public name, and that differ
between releases: the parameter groups of a model, the flags on them, and the callback that ends
each backward. `check_internals` names them. No code here asks for torch's version. It looks at what
this torch has, so that nightlies and vendors' builds work too.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Work
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

from .backend import Forward
from .dummies import dummy, template
from .loss import OWN_BACKWARD, LossResult, StepLoss, call_user, evaluate
from .microbatches import Batch, EmbeddingSizes, Microbatch, name_the_token
from .snapshot import Restore, Writes, keep_attributes


class Shards:
    """Gives access to an FSDP2 model's parameter groups: parameters, gradients and state."""

    def __init__(self, model: FSDPModule) -> None:
        assert isinstance(model, nn.Module)
        self.model = model
        self._modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        # fully_shard([a, b]) gives both modules one state.
        states = {id(s): s for s in (module._get_fsdp_state() for module in self._modules)}
        self._groups = [group for s in states.values() for group in groups_of(s)]
        if not self._groups:
            raise ValueError(
                f"FSDPTrainStep() got a {type(model).__name__} of which fully_shard has sharded no "
                "parameter: leave some out of ignored_params"
            )
        self._root = model._get_fsdp_state()
        widest = max(self._groups, key=lambda group: int(group.mesh_info.mesh.size()))
        # Each rank on a line of its own through the other dimensions, such as tensor parallelism.
        line = widest.mesh_info.mesh.mesh.flatten().tolist()
        self.replica: int = line.index(dist.get_rank())
        """The data-parallel rank: this rank's index in the mesh that fully_shard was given."""
        self.replicas = len(line)
        """The number of data-parallel ranks."""
        self.is_reporting_rank = 0 in line
        """True on rank 0 and the ranks of its line in the mesh, which has each replica once."""
        self.device = self._groups[0].device
        """The device of unsharded parameters."""

    @property
    def is_part(self) -> bool:
        """True if this model has run as a submodule of a larger sharded model. FSDP2 then keeps the
        state of forwards and backwards in the larger model.
        """
        return self._root._is_root is False

    def process_groups(self) -> list[Any]:
        """Return the process groups in which FSDP2 gathers parameters, reduces gradients and sums
        the gradients' norms.

        DTensor caches by mesh, and meshes of the same ranks are equal: it sums norms in the group
        of the mesh that came first.
        """
        groups = []
        for params in self._groups:
            meshes = [params.mesh_info.mesh, *(p._sharding_spec.mesh for p in params.fsdp_params)]
            groups += [group for mesh in dict.fromkeys(meshes) for group in mesh.get_all_groups()]
        ranks = {tuple(dist.get_process_group_ranks(group)) for group in groups}
        for group in list(distributed_c10d._world.pg_map):
            is_mesh_group = group is dist.group.WORLD or group.group_desc.startswith("mesh_")
            if is_mesh_group and tuple(dist.get_process_group_ranks(group)) in ranks:
                groups.append(group)
        return list(dict.fromkeys(groups))

    def parameters(self) -> list[nn.Parameter]:
        """Reshard the model, and return all of its parameters, in the model's order."""
        self.reshard()
        return list(self.model.parameters())

    def trained(self) -> list[torch.Tensor]:
        """Return this rank's shards of the parameters that need gradients; reshard nothing."""
        sharded = (param.sharded_param for group in self._groups for param in group.fsdp_params)
        with torch.no_grad():  # else each to_local() goes through autograd, which is slower
            return [param.to_local() for param in sharded if param.requires_grad]

    def writes(self) -> Writes:
        """Return torch's version counters of this rank's gradients and parameters; see
        `Backend.writes`.
        """
        params = [param for group in self._groups for param in group.fsdp_params]
        gradients = (
            gradient
            for param in params
            for gradient in (
                param.unsharded_accumulated_grad,
                getattr(getattr(param, "_unsharded_param", None), "grad", None),
                param.sharded_param.grad,
            )
        )
        return Writes(
            tuple(-1 if gradient is None else _version(gradient) for gradient in gradients),
            tuple(_version(p.sharded_param) for p in params if p.sharded_param.requires_grad),
        )

    def keep_flags(self) -> list[Restore]:
        """Copy FSDP2's flags (whether each group reduces gradients, whether the next backward is
        the last), and return functions that put the flags back.
        """
        return [
            keep_attributes(self._root._state_ctx, ["is_last_backward"]),
            *(keep_attributes(g, ["reduce_grads", "all_reduce_grads"]) for g in self._groups),
        ]

    def progress(self) -> str:
        """Return a text that tells how far this rank is in the model's collectives. Ranks have
        stopped at the same place if their texts are equal.
        """
        order = len(getattr(self._root._comm_ctx, "post_forward_order", ()))
        groups = (
            f"{group._training_state.name} {group._sharded_state.name} "
            f"{group._all_gather_result is not None} {len(group._post_forward_indices)}"
            for group in self._groups
        )
        return f"{order}; {'; '.join(groups)}"

    def reduce(self) -> None:
        """Reduce over the ranks the gradients that backwards have accumulated without reducing
        them. All ranks take part.

        FSDP2 calls the same function at the end of each backward, for groups whose own hook did
        not fire there: it makes the same copy-in and collective per group, so the same bits.
        """
        self.model.set_requires_gradient_sync(True)
        shared = self._root._state_ctx
        # From torch 2.15 on: whether a caller reduces later, as the beginning of a backward says.
        if hasattr(shared, "manual_backward_finalization_active"):
            shared.manual_backward_finalization_active = False
        self._root._root_post_backward_final_callback()

    def multiply(self, factor: float) -> None:
        """Multiply the sharded gradients in place by `factor` and by the divisor that FSDP2 used.
        The second factor turns means over ranks into sums.
        """
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
        """Reset FSDP2's internal state to that between two steps, with sharded parameters.
        It works also after an exception in a backward.
        """
        if self._root._is_root:  # before the first forward FSDP2 has no state, and no streams
            reset(self.model)
        for group in self._groups:
            # Whatever state the group has recorded: an exception may have come between its
            # parameters.
            for param in group.fsdp_params:
                param.to_sharded()
            group._sharded_state = type(group._sharded_state).SHARDED

    def drop(self) -> None:
        """Reset FSDP2's state to that between two steps, as `settle` does, and set all gradients of
        the model to None, accumulated ones too.
        """
        self.settle()
        for group in self._groups:
            for param in group.fsdp_params:
                accumulate(param, None)
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None
                param.sharded_param.grad = None


def _version(tensor: Any) -> int:
    # A DTensor and this rank's part of it each count the writes into themselves alone.
    part = getattr(tensor, "_local_tensor", None)
    return int(tensor._version) + (0 if part is None else int(part._version))


@contextmanager
def refusing_backward(output: Any) -> Iterator[None]:
    """Make any backward through `output` in this block raise `ValueError`. It raises before the
    backward enters the model, where ranks would wait for each other.

    `torch.autograd.grad` with regard to the output passes.
    """

    def refuse(nodes: list[Any], _: torch.Tensor) -> None:
        if any(map(torch._C._will_engine_execute_node, nodes)):
            raise ValueError(OWN_BACKWARD)

    with contextlib.ExitStack() as stack:
        for leaf in _pytree.tree_leaves(output):
            if not isinstance(leaf, torch.Tensor) or leaf.grad_fn is None:
                continue
            nodes = [node for node, _ in leaf.grad_fn.next_functions if node is not None]
            handle: Any = leaf.register_hook(functools.partial(refuse, nodes))  # type: ignore[no-untyped-call]
            stack.callback(handle.remove)
            # Ahead of FSDP2's, which gathers parameters.
            hooks: Any = leaf._backward_hooks
            for key in [key for key in hooks if key != handle.id]:
                hooks[key] = hooks.pop(key)
        yield


def vocabulary_of(model: nn.Module) -> EmbeddingSizes:
    """Return the size of the vocabulary: that of the model's input embeddings, or of its largest
    `nn.Embedding` if the model does not name its input embeddings.
    """
    modules: list[Any] = list(model.modules())
    if callable(get_embeddings := getattr(model, "get_input_embeddings", None)):
        with contextlib.suppress(NotImplementedError):  # of a model that names none after all
            modules = [get_embeddings()]
    sizes = [table.num_embeddings for table in modules if isinstance(table, nn.Embedding)]
    # In a model that names none, no token can be looked up beyond the largest embedding.
    return EmbeddingSizes(max(sizes, default=None), None)


def keep_gradients(shards: Shards) -> Restore:
    """Keep references to the model's gradients, accumulated ones too, and return a function that
    puts them back.

    A reset of FSDP2 may drop gradients, from torch 2.15 on all of them. Gradients that were added
    since the call are dropped when these are put back.
    """
    params = [param for group in shards._groups for param in group.fsdp_params]
    accumulated = [(param, param.unsharded_accumulated_grad) for param in params]
    pairs = ((param.sharded_param, getattr(param, "_unsharded_param", None)) for param in params)
    gradients = [(owner, owner.grad) for pair in pairs for owner in pair if owner is not None]

    def restore() -> None:
        for param, grad in accumulated:
            accumulate(param, grad)
        for parameter, grad in gradients:
            parameter.grad = grad

    return restore


def keep_scheduler(scheduler: Any) -> Restore:
    """Copy the state of a learning-rate scheduler, with that of schedulers inside of it, and return
    a function that puts it back.
    """
    state = copy.deepcopy(scheduler.state_dict())
    return lambda: scheduler.load_state_dict(copy.deepcopy(state))


def keep_scaler(scaler: Any, device: Any) -> Restore:
    """Copy the state of a `torch.amp.GradScaler`, and return a function that puts it back, also
    after an `unscale_`.
    """
    state = scaler.state_dict()

    def restore() -> None:
        if state:  # it has none where it is not enabled
            # Only update() forgets what gradients were looked at, and only after a first scale().
            scaler.scale(torch.zeros((), device=device))
            scaler.update(state["scale"])
            scaler.load_state_dict(state)

    return restore


# Where the graphs of some tensors end, and gradients of zero for them.
Zeros = list[tuple[GradientEdge, torch.Tensor]]

_THROUGH = "through"


class Watch:
    """Hooks the model while a step is open.
    It tracks whether a forward runs, and raises for a forward that records gradients but is not one
    of the step's own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []
        self._running = False
        self._entered = self._left = 0
        # Not the output itself: it may be large, and may be freed before the loss is computed.
        self.zeros: Zeros = []

    def is_taken(self) -> bool:
        """Return True if another open step has hooks on this model."""
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
        """True once the current call's forward has entered the model."""
        return self._entered > 0

    @property
    def inside(self) -> bool:
        """True while a forward is running inside of the model."""
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
    """Runs this rank's microbatches.
    After a failure it sends zeros through the model instead of data, so that no other rank waits,
    and `agree` tells all ranks of the failure.
    """

    def __init__(self, shards: Shards, watch: Watch, forward: Forward, scaler: Any) -> None:
        self._shards = shards
        self._watch = watch
        self._forward = forward
        self._scaler = scaler
        self._error: Exception | None = None
        self._failure: str | None = None
        self._progress = _THROUGH
        self._number = 0

    @property
    def stopped(self) -> bool:
        """True once this rank has failed where it could not even send zeros on through the model,
        such as inside of the model. It then runs no more microbatches.
        """
        return self._progress is not _THROUGH

    def run(self, microbatch: Microbatch, loss: StepLoss | None) -> LossResult | None:
        """Run forward and backward of one microbatch, and return what the loss returned.

        Without a loss, or after a failure, zeros go backwards, and None is returned.
        """
        self._number += 1
        self._watch.start()
        try:
            backward, result = self._forward_and_loss(microbatch, loss)
            if not self.stopped:
                backward()
            return result
        except Exception as error:  # noqa: BLE001  told to all ranks, and raised on all
            self._stop(error, "backward")
            return None
        finally:
            self._watch.stop()

    def agree(self, deadline_s: float) -> None:
        """Raise on all ranks if any rank failed. A collective.

        Raises:
            WindowAborted: all ranks have run their microbatches, or have stopped at the same place.
            SessionPoisoned: some rank has stopped where others may wait for it.
        """
        failures = exchange(self._failure, deadline_s)
        if not failures:
            return
        progress = compare(self._progress, control_group(deadline_s))
        if self._error is not None:
            # The caller may hold the error for long; its frames hold activations.
            traceback.clear_frames(self._error.__traceback__)
        if len(set(progress)) != 1:
            by_rank = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
            raise poison(
                f"{by_rank}; not all ranks have stopped at the same place, and others may wait "
                "there in a collective of FSDP2's"
            ) from self._error
        raise WindowAborted(
            failures, "No rank waits for another; abort() the step."
        ) from self._error

    def _forward_and_loss(
        self, microbatch: Microbatch, loss: StepLoss | None
    ) -> tuple[Callable[[], None], LossResult | None]:
        """Run the forward and the loss; return the backward to run, and what the loss returned."""
        inputs = microbatch.inputs
        try:
            output = call_user("forward", self._forward, self._shards.model, inputs)
        except Exception as error:  # noqa: BLE001  told to all ranks, and raised on all
            error = name_the_token(error, vocabulary_of(self._shards.model), inputs)
            return functools.partial(_send, self._zeros_after(error, inputs)), None
        if loss is None or self._error is not None:
            return functools.partial(_send, zeros_for(output)), None
        try:
            with refusing_backward(output):
                total, result = evaluate(loss, output, microbatch)
            if total is None:
                return functools.partial(_send, zeros_for(output)), result
            scaled = total if self._scaler is None else self._scaler.scale(total)
            return scaled.backward, result
        except Exception as error:  # noqa: BLE001  told to all ranks, and raised on all
            self._note_failure(error, "loss")
            return functools.partial(_send, zeros_for(output)), None

    def _zeros_after(self, error: Exception, inputs: Batch) -> Zeros:
        """Return (graph edge, zero gradient) pairs from which a backward can start after `forward`
        has raised `error`. The list is empty if `forward` failed inside of the model.
        """
        if self._watch.inside:
            self._stop(error, "forward of the model")
            return []
        self._note_failure(error, "forward")
        if not self._watch.began:
            # `forward` failed before it called the model; with zeros it may come that far.
            try:
                zeros = dummy(template(inputs), self._shards.device)
                return zeros_for(self._forward(self._shards.model, zeros))
            except Exception as second_error:  # noqa: BLE001  told to all ranks, raised on all
                self._stop(second_error, "forward")
        return self._watch.zeros

    def _note_failure(self, error: Exception, phase: str) -> None:
        if self._error is None:
            self._error, self._failure = error, f"{phase}: {describe(error)}"

    def _stop(self, error: Exception, phase: str) -> None:
        self._note_failure(error, phase)
        frames = traceback.extract_tb(error.__traceback__)
        lines = ", ".join(f"{frame.filename}:{frame.lineno}" for frame in frames)
        self._progress = f"microbatch {self._number}; {self._shards.progress()}; {lines}"


def zeros_for(output: Any) -> Zeros:
    """Return (graph edge, zero gradient) pairs: one for each output tensor that needs a gradient.
    A backward can start from them.
    """
    return [
        (get_gradient_edge(leaf), leaf.detach().new_zeros(()).expand(leaf.shape))
        for leaf in _pytree.tree_leaves(output)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]


def _send(zeros: Zeros) -> None:
    edges, gradients = zip(*zeros, strict=True)
    torch.autograd.backward(edges, gradients)


def check_internals(model: Any) -> None:
    """Raise `RuntimeError` if this torch lacks parts of FSDP2 that a step uses; the message names
    them.

    `reset` uses more, up to torch 2.12 alone, which has no reset of its own and will not change.
    """
    lacking: list[str] = []

    def require(owner: Any, *names: str) -> list[Any]:
        """Return the attributes `names` of an object; add missing names to the list `lacking`."""
        if owner is not None:  # else it is named already, or the model has none
            lacking.extend(f"{type(owner).__name__}.{n}" for n in names if not hasattr(owner, n))
        return [getattr(owner, name, None) for name in names]

    states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
    shared, *_ = require(
        states[0], "_state_ctx", "_comm_ctx", "_is_root", "_root_post_backward_final_callback"
    )
    require(shared, "is_last_backward")
    if not hasattr(states[0], "_fsdp_param_groups"):
        require(states[0], "_fsdp_param_group")
    group = next((group for state in states for group in groups_of(state)), None)
    params, mesh_info, *_ = require(
        group,
        *("fsdp_params", "mesh_info", "device", "gradient_divide_factor", "reduce_grads"),
        *("all_reduce_grads", "_sharded_state", "_training_state", "_all_gather_result"),
        "_post_forward_indices",
    )
    require(mesh_info, "mesh")
    param = params[0] if params else None
    require(param, "to_sharded", "sharded_param", "unsharded_accumulated_grad", "_sharding_spec")
    # The first gather sets this attribute; before that only the class's annotations show it. Under
    # another name its gradients would stay, and no error would say so.
    if param is not None and "_unsharded_param" not in type(param).__annotations__:
        lacking.append(f"{type(param).__name__}._unsharded_param")
    if lacking:
        raise RuntimeError(
            f"FSDPTrainStep() relies on parts of FSDP2 that torch {torch.__version__} does not "
            f"have: {', '.join(lacking)}. Use a torch from 2.8 to 2.15, on which it is tested, or "
            "a megatron-idempotent that knows this one"
        )


def groups_of(state: Any) -> list[Any]:
    """Return the FSDP2 parameter groups of a module's state; at most one before torch 2.12."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [group]


def accumulate(param: Any, grad: Any) -> None:
    """Set an FSDPParam's accumulated gradient.
    Do nothing if that attribute is a property, as in torch 2.15 and later.
    """
    if not isinstance(getattr(type(param), "unsharded_accumulated_grad", None), property):
        param.unsharded_accumulated_grad = grad


def reset(model: Any) -> None:
    """Clear the state that FSDP2 has kept of a forward or backward that did not end.

    The model is a root that has run before. From 2.13 on torch does it itself. Gradients may be
    dropped or left.
    """
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
        return
    root = model._get_fsdp_state()
    shared, communication = root._state_ctx, root._comm_ctx
    groups = [group for state in shared.all_states for group in groups_of(state)]
    # The memory of dropped tensors is used again, so the device has to have finished with them.
    stream = root._device_handle.current_stream()
    for event in _in_flight(communication, groups):
        if event is not None:
            stream.wait_event(event)
    communication.all_gather_state = None
    if hasattr(communication, "reduce_scatter_states"):
        communication.reduce_scatter_states.clear()
    else:
        communication.reduce_scatter_state = None
    communication.post_forward_order.clear()
    idle = type(root._training_state).IDLE
    for group in groups:
        # The event of a reshard stays, because the next gather waits for it.
        group._all_gather_result = group._all_reduce_state = group._post_reduce_event = None
        group._partial_reduce_output = None
        group._post_forward_indices.clear()
        group._training_state = idle
        group._to_sharded()
    for state in shared.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = idle
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False


def _in_flight(communication: Any, groups: list[Any]) -> Iterator[Any]:
    """Yield device events.
    Once all of them have occurred, the device no longer uses the tensors that FSDP2 holds for
    collectives.
    """
    states = [communication.all_gather_state, *(group._all_reduce_state for group in groups)]
    one_state = getattr(communication, "reduce_scatter_state", None)
    states += getattr(communication, "reduce_scatter_states", [one_state])
    for group in groups:
        if (gathered := group._all_gather_result) is not None:
            if isinstance(gathered.all_gather_work, Work):
                gathered.all_gather_work.wait()
            yield gathered.all_gather_event
        yield group._post_reduce_event
    yield from (state.event for state in states if state is not None)
