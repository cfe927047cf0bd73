"""Runs Megatron's schedule for some microbatches of a step, and its optimizer's `step()`.

Both run with the step's own functions. Wrappers over the same modules mostly have one config, whose
functions are those of the DDP that was wired last. With them a step would hold back the reductions
of the other one and not its own, or scale its loss for the other's optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_idempotent.megatron import moe
from megatron_idempotent.megatron.optimizers import (
    LossScale,
    grad_scalers,
    is_hybrid,
    parts,
    stepping,
    unchained,
)
from megatron_idempotent.window.accumulation import (
    dividing_by,
    multiplies_by_ranks,
    set_for,
    suppress_grad_sync,
)
from megatron_idempotent.window.agreement import (
    WindowAborted,
    collective_timeout,
    exchange,
)
from megatron_idempotent.window.guard import GuardedCall, no_gradient
from megatron_idempotent.window.missed_collectives import (
    MissedCollectives,
    gather_params,
    gathers_by_hooks,
)

from .lifecycle import Options, skipped_for
from .loss import OWN_BACKWARD, Reported, StepLoss, auxiliary_weight, called, evaluate
from .microbatches import Piece, explained
from .open_step import LocalFailure
from .packs import own_routes
from .snapshot import MegatronSnapshot, Restore, keep_update, refuse_update

if TYPE_CHECKING:
    from .megatron import MegatronBackend


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


# Functions by which a config weighs auxiliary losses itself, instead of with grad_scale_func.
_OWN_SCALES = ("moe_grad_scale_func", "mtp_grad_scale_func")


def run_schedule(
    backend: MegatronBackend, pieces: Sequence[Piece], loss: StepLoss, *, reduce: bool, ghosts: bool
) -> list[Reported]:
    """Run the schedule on this rank's chunks; it divides no loss, and reduces if asked.

    Returns what the loss reported, see `Backend.run`.
    """
    found: list[Reported] = []
    iterators = [iter(pieces) for _ in backend.chunks]
    arguments: dict[str, Any] = {
        "data_iterator": iterators if len(iterators) > 1 else iterators[0],
        "model": backend.chunks,
        "num_microbatches": len(pieces),
        "seq_length": pieces[0].shape[1],
        "micro_batch_size": pieces[0].shape[0],
        "forward_only": False,
    }
    now = _Now(arguments, weigh=functools.partial(_weight, backend, loss, ghosts))
    arguments["forward_step_func"] = _forward_step(backend, loss, found, ghosts, now)
    # What auxiliary losses are means over is known once the forward was called.
    padded = backend.has_auxiliary and any(piece.may_be_padded for piece in pieces)
    weights = {now.weigh(piece) for piece in pieces} if backend.has_auxiliary else {1.0}
    even = len(weights) == 1 and not padded
    with ExitStack() as stack:
        if ghosts:
            # Routing counts and logs of microbatches that nobody has are not kept.
            kept = MegatronSnapshot(backend.chunks, auxiliary=backend.has_auxiliary)
            stack.callback(kept.restore)
        _hold(backend, stack, reduce)
        if backend.replay is not None:
            stack.callback(backend.replay.clear)
        weight = weights.pop() if even else now.weight
        # The ranks' sums are added up as they are; `update` takes back what DDP averages.
        stack.enter_context(dividing_by(1, auxiliary_weight=weight, context_parallel=False))
        if not even:
            _scale_with_their_forward(stack)
        if padded:
            for chunk in backend.chunks:
                hook = chunk.register_forward_pre_hook(now.look, with_kwargs=True)
                stack.callback(hook.remove)
        if len({piece.shape for piece in pieces}) > 1:
            for config in backend.configs:
                set_for(stack, config, "variable_seq_lengths", True)
        for chunk in backend.chunks:
            if not chunk.training:  # an evaluation may have left it so
                chunk.train()
        _call(backend, arguments, now, reduce)
    return found


def _hold(backend: MegatronBackend, stack: ExitStack, reduce: bool) -> None:
    def note_finalize(model: Any, num_tokens: Any = None, **options: Any) -> None:
        backend.finalize_options = options

    set_for(stack, backend, "running", True)
    _use_own_functions(stack, backend)
    for config in backend.configs:
        # The schedule would start the parameter gathers again in every call. Peers may make more
        # calls or fewer in a step, and gathers pair up by order alone.
        if config.param_sync_func is not None and all(map(gathers_by_hooks, backend.chunks)):
            with collective_timeout(backend.groups(), backend.deadline_s):
                for chunk in backend.chunks:
                    gather_params(chunk, wait=False)
            set_for(stack, config, "param_sync_func", None)
    if reduce:
        for config in backend.configs:
            set_for(stack, config, "finalize_model_grads_func", note_finalize)
            if config.no_sync_func is None and backend.chunks[0].ddp_config.overlap_grad_reduce:
                # Else each microbatch registers its gradients, and 0.16 and later reduce when
                # as many have come as in the first call, whatever number this one has.
                no_sync = [chunk.no_sync for chunk in backend.chunks]
                set_for(stack, config, "no_sync_func", no_sync if len(no_sync) > 1 else no_sync[0])
    else:
        suppress_grad_sync(stack, backend.chunks, backend.configs, note_finalize)
    if backend.optimizer is not None:
        for config in backend.configs:
            if config.grad_scale_func is None:
                set_for(stack, config, "grad_scale_func", LossScale(backend.optimizer))
    if backend.shift:
        for config in backend.configs:
            for name in _OWN_SCALES:
                own = getattr(config, name, None)
                if own is not None:
                    set_for(stack, config, name, _times(2.0**-backend.shift, own))


def _call(backend: MegatronBackend, arguments: dict[str, Any], now: _Now, reduce: bool) -> None:
    schedule = get_forward_backward_func()
    coupled, group = backend.lockstep_group()
    if not coupled and not reduce:
        # No rank waits for this one but in gathers of parameters, which `join` makes up for.
        # It may wait there itself, for one that was interrupted in one.
        with (
            collective_timeout(backend.groups(), backend.deadline_s),
            MissedCollectives(backend.chunks).watched(),
        ):
            schedule(**arguments)
        return
    tell: Callable[[str | None], dict[int, str]] = _nobody
    if coupled:
        tell = functools.partial(exchange, deadline_s=backend.deadline_s, group=group)
    call = GuardedCall(arguments, tell, check=False, skip=lambda pieces: now.begin(next(pieces)))
    with collective_timeout(backend.groups(), backend.deadline_s):
        call.run(schedule)
    if call.failures:
        raise WindowAborted(
            call.failures, "All ranks that share the model have finished the window."
        ) from call.error
    if call.error is not None:
        raise LocalFailure(call.error)


def _forward_step(
    backend: MegatronBackend, loss: StepLoss, found: list[Reported], ghosts: bool, now: _Now
) -> Callable[..., Any]:
    # The token count of each microbatch, because dividing by what is valid comes at the end.
    one = torch.ones((), dtype=torch.int, device=backend.device)
    multiplied = 1
    if not backend.per_token and multiplies_by_ranks():
        multiplied = backend.configs[0].context_parallel_size

    def computed(model: Any, microbatch: Any) -> Any:
        run = functools.partial(called, "forward", backend.forward, model, microbatch)
        if backend.replay is None:
            return run()
        return backend.replay.run(model, own_routes(microbatch), run)

    def forward_step(data_iterator: Iterator[Piece], model: Any) -> tuple[Any, Any]:
        piece = next(data_iterator)
        now.begin(piece)
        microbatch, before = piece.batch, backend.gradient_writes()
        try:
            output = computed(model, microbatch)
        except IndexError as error:
            raise explained(error, backend.tables, microbatch)  # noqa: B904  it has its cause

        def loss_func(output: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
            if ghosts:
                return no_gradient(output), one, {}
            # What it reports is kept now, because the schedule works on it in place.
            total, here = evaluate(loss, output, piece)
            if backend.gradient_writes() != before:
                raise ValueError(OWN_BACKWARD)
            found.append(here)
            if total is None:
                # Nothing is valid, but other ranks wait in the backward.
                return no_gradient(output), one, {}
            if total._base is not None:
                # With deallocate_pipeline_outputs, which Megatron's arguments set, a schedule
                # frees what the last stage returns as well, and refuses a view.
                total = total.clone()
            if multiplied > 1:
                total = total / multiplied
            if backend.shift:
                total = total.float() * 2.0**-backend.shift
            return total, one, {}

        return output, loss_func

    return forward_step


def _weight(
    backend: MegatronBackend, loss: StepLoss, ghosts: bool, piece: Piece, masked: bool = False
) -> float:
    """Return the number that Megatron is to multiply a microbatch's auxiliary losses by.

    They are means over a microbatch: over its positions, or over its tokens if the model was
    told where padding is (`masked`). With calculate_per_token_loss Megatron multiplies them by
    that number itself. Like the loss, they are divided by the step's normalizer at the end.
    """
    if ghosts or not piece.sequences:
        return 0.0
    number = piece.tokens if masked else piece.positions
    share = auxiliary_weight(loss, piece, number)
    if backend.per_token:
        share /= number
    return share * 2.0**-backend.shift


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
        # Without experts it is MTP heads alone that are.
        name = "padding_mask" if get_model_config(model).num_moe_experts else "loss_mask"
        self._masked = kwargs.get(name) is not None


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
    """Tell no rank of a failure, because the others learn of it in `finish` or `abort`."""
    return {}


# Field of the config → the method of DDP that belongs there.
_METHODS = {
    "no_sync_func": "no_sync",
    "grad_sync_func": "start_grad_sync",
    "param_sync_func": "start_param_sync",
}


def _use_own_functions(stack: ExitStack, backend: MegatronBackend) -> None:
    """Let configs call the backend's chunks and optimizer, and no others, until the stack is left.

    Functions that belong to neither a DDP nor an optimizer are the caller's, and stay.
    """
    for config in backend.configs:
        for name, method in _METHODS.items():
            found = getattr(config, name)
            owners = [
                getattr(each, "__self__", None)
                for each in (found if isinstance(found, list) else [found])
            ]
            ddps = [each for each in owners if hasattr(each, "bucket_groups")]
            if any(all(ddp is not chunk for chunk in backend.chunks) for ddp in ddps):
                own = [getattr(chunk, method) for chunk in backend.chunks]
                set_for(stack, config, name, own if len(own) > 1 else own[0])
        # The optimizer whose loss scale the function applies, if that is known.
        scale = config.grad_scale_func
        known = isinstance(scale, LossScale)
        owner = scale.optimizer if known else getattr(scale, "__self__", None)
        if not known and not hasattr(owner, "scale_loss"):
            continue
        if all(owner is not part for part in backend.optimizer_parts):
            scale = None if backend.optimizer is None else LossScale(backend.optimizer)
            set_for(stack, config, "grad_scale_func", scale)


class CheckedUpdate:
    """Runs an optimizer's `step()`, checks the norm in it, and knows how far it has come."""

    def __init__(self, chunks: Sequence[Any], optimizer: Any, options: Options) -> None:
        self.updating = False
        """True once parameters may have been changed."""
        self.undo: Restore | None = None
        """Goes back to before the update; None without a copy, or before it has begun."""
        self._chunks = list(chunks)
        self._optimizer = optimizer
        self._options = options
        self._norms: list[Any] = []
        self._allow: list[Restore] = []

    def open(self) -> None:
        """Begin a step, in which the optimizer steps in `run` alone."""
        self.reset()
        if self._optimizer is not None:
            self._allow = [refuse_update(each) for each in parts(self._optimizer)]

    def reset(self) -> None:
        """Forget an earlier step."""
        self.updating, self.undo, self._norms = False, None, []
        while self._allow:
            self._allow.pop()()

    @property
    def lowers_scale(self) -> bool:
        """True if a loss scale is lowered where gradients are not finite."""
        return any(isinstance(each, DynamicGradScaler) for each in grad_scalers(self._optimizer))

    def run(self) -> tuple[float | None, str | None]:
        """Call `step()`; return the gradients' norm, and the reason if there was no update.

        Raises:
            RuntimeError: the norm is not finite, and the rule is "refuse". Nothing was updated.
        """
        self.reset()
        # A scale is never written in place, so these are the values from before.
        scales = [(scaler, scaler.scale) for scaler in grad_scalers(self._optimizer)]
        with self._watched() as reasons:
            updated, grad_norm, _ = self._optimizer.step()
        norm = None if grad_norm is None else float(grad_norm)
        if updated:
            return norm, None
        if reasons:
            return norm, reasons[0]
        if norm is None:
            return None, _overflow(scales)
        if not self.updating:
            return norm, f"the norm of the gradients, {norm:g}, is above grad_norm_skip_threshold"
        return norm, "the optimizer reports that it has not updated"

    @contextmanager
    def _watched(self) -> Iterator[list[str]]:
        """Have the optimizer check the norm, which is that of all ranks, right before its update.

        Yields the reasons to skip the update. The norm is read here instead of at the end, so that
        the host waits for the device no more often.
        """
        optimizer, reasons = self._optimizer, list[str]()
        begin_update = optimizer.step_with_ready_grads

        def noting(compute: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*args: Any, **kwargs: Any) -> Any:
                self._norms = [compute(*args, **kwargs)]
                return self._norms[0]

            return noted

        def update(*args: Any, **kwargs: Any) -> Any:
            reason = self._reason_to_skip()
            if reason is not None:
                reasons.append(reason)
                return False
            if self._options.undo:
                inner = [one.optimizer for one in unchained(optimizer)]
                # A hybrid one holds the state of those inside of it, and they hold copies.
                inner += [one for each in inner if is_hybrid(each) for one in stepping(each)]
                self.undo = keep_update(
                    [param for chunk in self._chunks for param in chunk.param_to_bucket_group],
                    [one for one in inner if one is not None],
                )
            self.updating = True
            return begin_update(*args, **kwargs)

        replaced = {"step_with_ready_grads": update}
        if self._options.non_finite != "update":
            replaced["get_grad_norm"] = noting(optimizer.get_grad_norm)
            replaced["clip_grad_norm"] = noting(optimizer.clip_grad_norm)
        try:
            for name, function in replaced.items():
                setattr(optimizer, name, function)
            yield reasons
        finally:
            for name in replaced:
                vars(optimizer).pop(name, None)

    def _reason_to_skip(self) -> str | None:
        # Those of parameter groups that Megatron clips by themselves are not in the norm of all.
        by_group = getattr(self._optimizer, "grad_norms_by_group", None) or {}
        for norm in (*self._norms, *by_group.values()):
            if norm is not None:
                reason = skipped_for(float(norm), self._options.non_finite)
                if reason is not None:
                    return reason
        return None


def _overflow(scales: Sequence[tuple[Any, Any]]) -> str:
    """Return the reason for a skip after an overflow, with what became of the loss scale."""
    found = [(scaler, float(before), float(scaler.scale)) for scaler, before in scales]
    lowered = [each for each in found if each[2] < each[1]]
    scaler, before, now = (lowered or found)[0]
    if lowered:
        return f"gradients overflowed; the loss scale is {now:g} now, not {before:g}"
    if not isinstance(scaler, DynamicGradScaler):
        return f"gradients overflowed, or are NaN, under a fixed loss scale of {now:g}: lower it"
    if now <= float(scaler.min_scale):
        return f"gradients overflowed, and the loss scale of {now:g} is the least that is allowed"
    return f"gradients overflowed; the loss scale stays at {now:g}, as its hysteresis says"
