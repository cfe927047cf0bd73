"""Runs Megatron's schedule for some microbatches of a step, with the step's own functions.

Wrappers over the same modules mostly have one config, whose functions are those of the DDP that was
wired last. With them a step would hold back the reductions of the other one and not its own, or
scale its loss for the other's optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from torch import Tensor

from megatron_idempotent.megatron import moe
from megatron_idempotent.megatron.optimizers import LossScale, parts
from megatron_idempotent.megatron.process_groups import live_groups
from megatron_idempotent.window.accumulation import (
    configs_of,
    dividing_by,
    multiplies_by_ranks,
    set_for,
    suppress_grad_sync,
)
from megatron_idempotent.window.agreement import (
    WindowAborted,
    collective_timeout,
    exchange,
    lockstep_group,
    shared_group,
)
from megatron_idempotent.window.guard import GuardedCall, no_gradient
from megatron_idempotent.window.guard_layers import across_replicas
from megatron_idempotent.window.missed_collectives import (
    MissedCollectives,
    gather_params,
    gathers_by_hooks,
)

from .gpt import tables_of
from .loss import StepLoss, auxiliary_weight, needs_weight
from .megatron_snapshot import MegatronSnapshot
from .messages import LocalFailure
from .pieces import Piece, outside
from .records import Batch
from .results import Reported, called, has_graph, reported


def forget_inference(modules: list[Any]) -> None:
    """Drop what generation has left in the modules that are about to train."""
    for module in modules:
        for name in ("inference_params", "_inference_key_value_memory"):
            if _has(module, name) and getattr(module, name) is not None:
                setattr(module, name, None)
        if _has(module, "reset_inference_cache"):
            module.reset_inference_cache()


def _has(module: Any, name: str) -> bool:
    # Not hasattr(): what a module lacks it looks for in its parameters, and formats an error.
    return name in vars(module) or hasattr(type(module), name)


Forward = Callable[[Any, Batch], Any]

# Functions by which a config weighs auxiliary losses itself, instead of with grad_scale_func.
_OWN_SCALES = ("moe_grad_scale_func", "mtp_grad_scale_func")


class Runner:
    """Runs Megatron's schedule on this rank's chunks; it divides no loss, and reduces if asked."""

    def __init__(
        self, chunks: list[Any], optimizer: Any, forward: Forward, deadline_s: float
    ) -> None:
        self.chunks = chunks
        self.configs = configs_of(chunks)
        self.running = False
        self.deadline_s = deadline_s
        self.shift = 0
        """The exponent of the power of two that losses are divided by; it changes no mantissa."""
        self.finalize_options: dict[str, Any] = {}
        """Arguments that the schedule passes to the finalize function after chunks and tokens."""
        self._optimizer = optimizer
        self._forward = forward
        self._parameter = next(chunks[0].parameters())
        self._groups: tuple[Any, list[Any]] = None, []

    @property
    def replica(self) -> int:
        """The data-parallel rank of this process."""
        return int(parallel_state.get_data_parallel_rank())

    @property
    def device(self) -> Any:
        """The device of the parameters."""
        return self._parameter.device

    @property
    def per_token(self) -> bool:
        """True if DDP sums gradients over ranks, instead of averaging them."""
        return bool(self.configs[0].calculate_per_token_loss)

    def accept_loss(self, loss: StepLoss) -> None:
        found = moe.auxiliary_losses(self.configs[0])
        if found and needs_weight(loss):
            raise ValueError(
                f"begin() got a loss of kind {loss.kind!r} for a model with {', '.join(found)}, "
                "whose losses are means over a microbatch: give the loss an `auxiliary_weight`, "
                "the number that each of these means is multiplied by before the divisor applies"
            )

    @property
    def microbatch_multiple(self) -> int:
        """The number of stages of an interleaved pipeline, which takes multiples of it; else 1."""
        if len(self.chunks) == 1:
            return 1
        return int(parallel_state.get_pipeline_model_parallel_world_size())

    def accept(self, lists: Sequence[Sequence[Piece]]) -> None:
        stages = self.microbatch_multiple
        for microbatches in lists:
            if len(microbatches) % stages:
                raise ValueError(
                    f"microbatch() got {len(microbatches)} microbatches of equal size for an "
                    f"interleaved pipeline of {stages} stages, whose schedule takes multiples of "
                    f"{stages}: pad the batch with rows whose sample_mask is 0"
                )

    def lockstep_group(self) -> tuple[bool, Any]:
        config = self.configs[0]
        if across_replicas(config) is not None:
            return True, None
        sizes = (
            config.tensor_model_parallel_size,
            config.pipeline_model_parallel_size,
            config.context_parallel_size,
        )
        if max(sizes) == 1:
            return False, None
        if max(sizes[0], sizes[2]) > 1:
            lockstep_group()  # which a guarded call would make in mid-step
        return True, shared_group("replica", self.replica, self.deadline_s)

    def run(
        self, pieces: Sequence[Piece], loss: StepLoss, *, reduce: bool, ghosts: bool
    ) -> list[Reported]:
        found: list[Reported] = []
        iterators = [iter(pieces) for _ in self.chunks]
        arguments: dict[str, Any] = {
            "data_iterator": iterators if len(iterators) > 1 else iterators[0],
            "model": self.chunks,
            "num_microbatches": len(pieces),
            "seq_length": pieces[0].shape[1],
            "micro_batch_size": pieces[0].shape[0],
            "forward_only": False,
        }
        now = _Now(arguments, weigh=functools.partial(self._weight, loss, ghosts))
        arguments["forward_step_func"] = self._forward_step(loss, found, ghosts, now)
        # What auxiliary losses of a pack are means over is known once its forward was called.
        packed = any(piece.segments is not None for piece in pieces)
        weights = {now.weigh(piece) for piece in pieces}
        even = len(weights) == 1 and not packed
        with ExitStack() as stack:
            if ghosts:
                # Routing counts and logs of microbatches that nobody has are not kept.
                kept = MegatronSnapshot(self.chunks, None, None)
                stack.callback(kept.restore)
            self._hold(stack, reduce)
            weight = weights.pop() if even else now.weight
            # The ranks' sums are added up as they are; `update` takes back what DDP averages.
            stack.enter_context(dividing_by(1, auxiliary_weight=weight, context_parallel=False))
            if not even:
                _scale_with_their_forward(stack)
            if packed:
                for chunk in self.chunks:
                    hook = chunk.register_forward_pre_hook(now.look, with_kwargs=True)
                    stack.callback(hook.remove)
            if len({piece.shape for piece in pieces}) > 1:
                for config in self.configs:
                    set_for(stack, config, "variable_seq_lengths", True)
            for chunk in self.chunks:
                if not chunk.training:  # an evaluation may have left it so
                    chunk.train()
            self._call(arguments, now, reduce)
        return found

    def _hold(self, stack: ExitStack, reduce: bool) -> None:
        set_for(stack, self, "running", True)
        use_own_functions(stack, self.chunks, self.configs, self._optimizer)
        self._gather_once(stack)
        if reduce:
            for config in self.configs:
                set_for(stack, config, "finalize_model_grads_func", self._note_finalize)
                if config.no_sync_func is None and self.chunks[0].ddp_config.overlap_grad_reduce:
                    # Else each microbatch registers its gradients, and 0.16 and later reduce when
                    # as many have come as in the first call, whatever number this one has.
                    no_sync = [chunk.no_sync for chunk in self.chunks]
                    set_for(
                        stack, config, "no_sync_func", no_sync if len(no_sync) > 1 else no_sync[0]
                    )
        else:
            suppress_grad_sync(stack, self.chunks, self.configs, self._note_finalize)
        if self._optimizer is not None:
            for config in self.configs:
                if config.grad_scale_func is None:
                    set_for(stack, config, "grad_scale_func", LossScale(self._optimizer))
        if self.shift:
            for config in self.configs:
                for name in _OWN_SCALES:
                    own = getattr(config, name, None)
                    if own is not None:
                        set_for(stack, config, name, _times(2.0**-self.shift, own))

    def _gather_once(self, stack: ExitStack) -> None:
        """Start the parameter gathers, which the schedule would start again in every call.

        Peers may make more calls or fewer in a step, and gathers pair up by order alone.
        """
        for config in self.configs:
            if config.param_sync_func is not None and all(map(gathers_by_hooks, self.chunks)):
                with collective_timeout(self.groups(), self.deadline_s):
                    for chunk in self.chunks:
                        gather_params(chunk, wait=False)
                set_for(stack, config, "param_sync_func", None)

    def _call(self, arguments: dict[str, Any], now: _Now, reduce: bool) -> None:
        schedule = get_forward_backward_func()
        coupled, group = self.lockstep_group()
        if not coupled and not reduce:
            # No rank waits for this one but in gathers of parameters, which `join` makes up for.
            # It may wait there itself, for one that was interrupted in one.
            with (
                collective_timeout(self.groups(), self.deadline_s),
                MissedCollectives(self.chunks).watched(),
            ):
                schedule(**arguments)
            return
        tell: Callable[[str | None], dict[int, str]] = _nobody
        if coupled:
            tell = functools.partial(exchange, deadline_s=self.deadline_s, group=group)
        call = GuardedCall(
            arguments, tell, check=False, skip=lambda pieces: now.begin(next(pieces))
        )
        with collective_timeout(self.groups(), self.deadline_s):
            call.run(schedule)
        if call.failures:
            raise WindowAborted(
                call.failures, "All ranks that share the model have finished the window."
            ) from call.error
        if call.error is not None:
            raise LocalFailure(call.error)

    def groups(self) -> list[Any]:
        """Return Megatron's process groups that this rank is in, and the default one (for 0.12)."""
        # The group itself tells one initialisation from the next.
        known = parallel_state.get_tensor_model_parallel_group()
        if self._groups[0] is not known:
            self._groups = known, [*live_groups(), dist.group.WORLD]
        return self._groups[1]

    def _forward_step(
        self, loss: StepLoss, found: list[Reported], ghosts: bool, now: _Now
    ) -> Callable[..., Any]:
        one = torch.ones((), dtype=torch.int, device=self.device)
        multiplied = 1
        if not self.per_token and multiplies_by_ranks():
            multiplied = self.configs[0].context_parallel_size

        def forward_step(data_iterator: Iterator[Piece], model: Any) -> tuple[Any, Any]:
            piece = next(data_iterator)
            now.begin(piece)
            microbatch = piece.batch
            try:
                output = self._forward(model, microbatch)
            except IndexError as error:
                # Of an embedding on the host; after the fact, as a forward may change what it gets.
                told = outside(tables_of(self.chunks), microbatch, read=True)
                if told is None:
                    raise
                raise ValueError(f"the microbatch {told}") from error

            def loss_func(output: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
                if ghosts:
                    return no_gradient(output), one, {}
                total, metrics = called(loss, output, microbatch)
                # Now, because the schedule works on it in place.
                found.append(reported(loss, total, metrics, piece))
                if not isinstance(total, Tensor) or not has_graph(total):
                    # Nothing is valid, but other ranks wait in the backward.
                    return no_gradient(output), one, {}
                # A token count of one, because dividing by what is valid comes at the end.
                total = total.reshape(())
                if total._base is not None:
                    # With deallocate_pipeline_outputs, which Megatron's arguments set, a schedule
                    # frees what the last stage returns as well, and refuses a view.
                    total = total.clone()
                if multiplied > 1:
                    total = total / multiplied
                if self.shift:
                    total = total.float() * 2.0**-self.shift
                return total, one, {}

            return output, loss_func

        return forward_step

    def _weight(self, loss: StepLoss, ghosts: bool, piece: Piece, masked: bool = False) -> float:
        """Return the number that Megatron is to multiply a microbatch's auxiliary losses by.

        They are means over a microbatch: over its positions, or over its tokens if the model was
        told where padding is (`masked`). With calculate_per_token_loss Megatron multiplies them by
        that number itself. Like the loss, they are divided by the step's normalizer at the end.
        """
        if ghosts or not piece.sequences:
            return 0.0
        if not moe.has_layers_with_losses(self.configs[0]):
            return 1.0  # of nothing: the loss's own function may raise, where the others wait
        number = piece.tokens if masked else piece.positions
        share = auxiliary_weight(loss, piece, number)
        if self.per_token:
            share /= number
        return share * 2.0**-self.shift

    def _note_finalize(self, model: Any, num_tokens: Any = None, **options: Any) -> None:
        self.finalize_options = options


class _Now:
    """Knows the microbatch whose forward runs now, for shapes and weights that depend on it."""

    def __init__(self, arguments: dict[str, Any], *, weigh: Callable[..., float]) -> None:
        self._arguments = arguments
        self.weigh = weigh
        self._piece: Piece | None = None
        self._masked = False

    def begin(self, piece: Piece) -> None:
        """Note that the forward of this microbatch begins."""
        self._piece, self._masked = piece, False
        # Read where this rank's forward fails and zeros go to the next stage in its place.
        self._arguments.update(micro_batch_size=piece.shape[0], seq_length=piece.shape[1])

    def weight(self) -> float:
        """Return the weight of the microbatch's auxiliary losses; 0 before the first one."""
        return 0.0 if self._piece is None else self.weigh(self._piece, self._masked)

    def look(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Note, as a hook before a chunk's forward, whether the chunk is told where padding is."""
        self._masked = kwargs.get("padding_mask") is not None


def _scale_with_their_forward(stack: ExitStack) -> None:
    """Have each backward scale auxiliary losses as the forward of its microbatch did.

    Upstream sets the scale in each forward, and reads it in each backward. In a pipeline that is
    another microbatch's, which is the same as long as all count alike.
    """
    forward, backward = schedules.forward_step, schedules.backward_step
    kept: dict[int, list[tuple[Any, Any]]] = {}

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        # A copy: newer releases write each scale into the tensor of the one before.
        kept[id(_first_tensor(result[0]))] = [
            (scaler, torch.clone(scaler.main_loss_backward_scale))
            for scaler in moe.scalers()
            if isinstance(scaler.main_loss_backward_scale, Tensor)
        ]
        return result

    @functools.wraps(backward)
    def backward_step(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        for scaler, scale in kept.pop(id(_first_tensor(output_tensor)), ()):
            if scaler.main_loss_backward_scale.shape == scale.shape:
                scaler.main_loss_backward_scale.copy_(scale)
            else:
                scaler.main_loss_backward_scale = scale
        return backward(input_tensor, output_tensor, *args, **kwargs)

    set_for(stack, schedules, "forward_step", functools.wraps(forward)(forward_step))
    set_for(stack, schedules, "backward_step", backward_step)


def _first_tensor(output: Any) -> Any:
    # The schedule frees its memory, and keeps the object.
    return output[0] if isinstance(output, list) else output


def _times(factor: float, scale: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: scale() * factor


def _nobody(failure: str | None) -> dict[int, str]:
    """Tells no rank of a failure, because the others learn of it in `finish` or `abort`."""
    return {}


# Field of the config → the method of DDP that belongs there.
_METHODS = {
    "no_sync_func": "no_sync",
    "grad_sync_func": "start_grad_sync",
    "param_sync_func": "start_param_sync",
}


def use_own_functions(
    stack: ExitStack, chunks: Sequence[Any], configs: Sequence[Any], optimizer: Any
) -> None:
    """Let configs call these chunks and this optimizer, and no others, until the stack is left.

    Functions that belong to neither a DDP nor an optimizer are the caller's, and stay.
    """
    for config in configs:
        for name, method in _METHODS.items():
            if _is_of_others(getattr(config, name), chunks):
                own = [getattr(chunk, method) for chunk in chunks]
                set_for(stack, config, name, own if len(own) > 1 else own[0])
        owner = _scaling(config.grad_scale_func)
        if owner is not None and all(owner is not part for part in parts(optimizer)):
            scale = None if optimizer is None else LossScale(optimizer)
            set_for(stack, config, "grad_scale_func", scale)


def _is_of_others(functions: Any, chunks: Sequence[Any]) -> bool:
    """Returns whether one of the functions is the method of a DDP that is not among the chunks."""
    for function in functions if isinstance(functions, list) else [functions]:
        owner = getattr(function, "__self__", None)
        if hasattr(owner, "bucket_groups") and all(owner is not chunk for chunk in chunks):
            return True
    return False


def _scaling(function: Any) -> Any:
    """Returns the optimizer whose loss scale the function applies; None if that is not known."""
    if isinstance(function, LossScale):
        return function.optimizer
    owner = getattr(function, "__self__", None)
    return owner if hasattr(owner, "scale_loss") else None
