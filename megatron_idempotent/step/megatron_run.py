"""Runs Megatron's schedule for some microbatches of a step, and its optimizer's `step()`.

Both run with the step's own functions. Wrappers over the same modules mostly have one config, whose
functions are those of the DDP that was wired last. With them a step would hold back the reductions
of that DDP and not its own, or scale its loss for that DDP's optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_idempotent.megatron import moe
from megatron_idempotent.megatron.ddp import reducing_on_host, versions
from megatron_idempotent.megatron.expert_replay import ExpertReplay
from megatron_idempotent.megatron.optimizers import (
    LossScale,
    grad_scalers,
    is_hybrid,
    parts,
    stepping,
    unchained,
)
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
from megatron_idempotent.window.guard import GuardedCall, across_replicas, no_gradient
from megatron_idempotent.window.missed_collectives import (
    MissedCollectives,
    gather_params,
    gathers_by_hooks,
)

from .backend import Backend, LocalFailure, Options
from .loss import (
    OWN_BACKWARD,
    LossResult,
    StepLoss,
    auxiliary_weight,
    call_user,
    evaluate,
    reason_to_skip,
)
from .microbatches import EmbeddingSizes, Microbatch, name_the_token
from .pack_layout import own_routes
from .snapshot import OpenUpdate, keep_megatron, keep_modules, switch_to_training

# Functions by which a config weighs auxiliary losses itself, instead of with grad_scale_func.
_OWN_SCALES = ("moe_grad_scale_func", "mtp_grad_scale_func")

# Field of the config → the method of DDP that belongs there.
_METHODS = {
    "no_sync_func": "no_sync",
    "grad_sync_func": "start_grad_sync",
    "param_sync_func": "start_param_sync",
}


def forget_inference(modules: list[Any]) -> None:
    """Drop the state that generation has left in modules, before they train."""
    for module in modules:
        for name in ("inference_params", "_inference_key_value_memory"):
            if _has(module, name) and getattr(module, name) is not None:
                setattr(module, name, None)
        if _has(module, "reset_inference_cache"):
            module.reset_inference_cache()


def _has(module: Any, name: str) -> bool:
    # Not hasattr(): for a missing attribute a module searches its parameters and formats an error.
    return name in vars(module) or hasattr(type(module), name)


class CurrentMicrobatch:
    """Holds the microbatch whose forward is running, for shapes and weights that depend on it."""

    def __init__(
        self, arguments: dict[str, Any], weigh: Callable[[Microbatch, bool], float]
    ) -> None:
        """Keep a schedule's arguments, and the function that weighs auxiliary losses."""
        self._arguments = arguments
        self._weigh = weigh
        self._microbatch: Microbatch | None = None
        self._is_masked = False

    def start(self, microbatch: Microbatch) -> None:
        """Make `microbatch` the current one: set its shape in the schedule's arguments.
        It is called when the microbatch's forward begins.
        """
        self._microbatch, self._is_masked = microbatch, False
        # Read where this rank's forward fails and zeros go to the next stage in its place.
        rows, positions = microbatch.shape
        self._arguments.update(micro_batch_size=rows, seq_length=positions)

    def weight(self) -> float:
        """Return the weight of the current microbatch's auxiliary losses; 0 before the first
        microbatch.
        """
        return 0.0 if self._microbatch is None else self._weigh(self._microbatch, self._is_masked)

    def note_mask(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of a chunk: record whether the chunk is given the mask that tells it of
        padding.
        """
        # Without experts only MTP heads are told of padding, by `loss_mask`.
        name = "padding_mask" if get_model_config(model).num_moe_experts else "loss_mask"
        self._is_masked = kwargs.get(name) is not None


class MegatronModel(Backend):
    """Holds this rank's model chunks in a step, and runs Megatron's schedule on them."""

    def __init__(self, chunks: list[Any], options: Options, optimizer: Any, scheduler: Any) -> None:
        super().__init__(options, optimizer, scheduler)
        self.forward = options.forward
        self.deadline_s = options.deadline_s
        self._own_update: CheckedUpdate = CheckedUpdate(chunks, optimizer, options)
        self.chunks = chunks
        self.configs = configs_of(chunks)
        self.sizes = embedding_sizes(chunks)
        self.running = False
        """True while a schedule runs for the step."""
        self.may_overlap = True
        """False if gradients may be reduced at the end of the step alone."""
        self.shift = 0
        """The exponent of the power of two that losses are divided by; it changes no mantissa."""
        self.finalize_options: dict[str, Any] = {}
        """Arguments that the schedule passes to the finalize function after chunks and tokens."""
        config = self.configs[0]
        self.has_auxiliary = moe.has_layers_with_losses(config)
        """True if layers may add losses of their own, such as MoE's."""
        self.replay: ExpertReplay | None = None
        """Gives routers the experts that microbatches bring; None with router_replay="off"."""
        self.replica = int(parallel_state.get_data_parallel_rank())
        self._optimizer_parts = parts(optimizer)
        self._meets_replicas = across_replicas(config) is not None
        self._parameter = next(chunks[0].parameters())
        self._groups: tuple[Any, list[Any]] = None, []

    @property
    def device(self) -> Any:
        return self._parameter.device

    @property
    def per_token(self) -> bool:
        """True if DDP sums gradients over ranks, instead of averaging them."""
        return bool(self.configs[0].calculate_per_token_loss)

    def lockstep_group(self) -> tuple[bool, Any]:
        if self._meets_replicas:
            return True, None
        config = self.configs[0]
        ranks_in_layers = max(config.tensor_model_parallel_size, config.context_parallel_size)
        if max(ranks_in_layers, config.pipeline_model_parallel_size) == 1:
            return False, None
        if ranks_in_layers > 1:
            lockstep_group()  # which a guarded call would make in mid-step
        return True, shared_group("replica", self.replica, self.deadline_s)

    def groups(self) -> list[Any]:
        """Return Megatron's process groups that this rank is in, and the default one (for 0.12)."""
        # The group itself tells one initialisation from the next.
        tensor_group = parallel_state.get_tensor_model_parallel_group()
        if self._groups[0] is not tensor_group:
            self._groups = tensor_group, [*live_groups(), dist.group.WORLD]
        return self._groups[1]

    def gradient_writes(self) -> tuple[int, ...]:
        """Return torch's version counters of this rank's gradients, which change with writes."""
        return tuple(number for chunk in self.chunks for number in versions(chunk))

    def run(
        self, microbatches: Sequence[Microbatch], loss: StepLoss, *, reduce: bool, dummies: bool
    ) -> list[LossResult]:
        """Run Megatron's schedule for these microbatches on this rank's chunks. Losses are not
        divided, and gradients are reduced only with `reduce`.

        Returns what the loss returned, see `Backend.run`.
        """
        reduce = reduce and self.may_overlap
        self._is_reducing = self._is_reducing or reduce
        results: list[LossResult] = []
        iterators = [iter(microbatches) for _ in self.chunks]
        arguments: dict[str, Any] = {
            "data_iterator": iterators if len(iterators) > 1 else iterators[0],
            "model": self.chunks,
            "num_microbatches": len(microbatches),
            "seq_length": microbatches[0].shape[1],
            "micro_batch_size": microbatches[0].shape[0],
            "forward_only": False,
        }

        def weigh(microbatch: Microbatch, is_masked: bool) -> float:
            return 0.0 if dummies else self._auxiliary_weight(loss, microbatch, is_masked)

        current = CurrentMicrobatch(arguments, weigh)
        arguments["forward_step_func"] = self._forward_step(loss, results, dummies, current)
        # What auxiliary losses are means over is known once the forward was called.
        padded = self.has_auxiliary and any(mb.may_be_padded for mb in microbatches)
        weights = {weigh(mb, False) for mb in microbatches} if self.has_auxiliary else {1.0}
        has_one_weight = len(weights) == 1 and not padded
        with ExitStack() as stack:
            if dummies:
                # Routing counts and logs of dummy microbatches are not kept.
                stack.callback(keep_modules(self.modules))
                for restore in keep_megatron(self.chunks, auxiliary=self.has_auxiliary):
                    stack.callback(restore)
            self._replace_functions(stack, reduce)
            if self.replay is not None:
                stack.callback(self.replay.clear)
            # The ranks' sums are added up as they are; `update` takes back what DDP averages.
            weight = weights.pop() if has_one_weight else current.weight
            stack.enter_context(dividing_by(1, auxiliary_weight=weight, context_parallel=False))
            if not has_one_weight:
                _keep_scale_of_each_forward(stack)
            if padded:
                for chunk in self.chunks:
                    hook = chunk.register_forward_pre_hook(current.note_mask, with_kwargs=True)
                    stack.callback(hook.remove)
            if len({microbatch.shape for microbatch in microbatches}) > 1:
                for config in self.configs:
                    set_for(stack, config, "variable_seq_lengths", True)
            switch_to_training(self.chunks, self.modules)
            self._call(arguments, current, reduce)
        return results

    def _replace_functions(self, stack: ExitStack, reduce: bool) -> None:
        """Replace functions in the chunks' configs (finalize, no_sync, parameter gather, loss
        scale) for one schedule call; closing `stack` puts the old ones back.
        """

        def note_finalize(model: Any, num_tokens: Any = None, **options: Any) -> None:
            self.finalize_options = options

        set_for(stack, self, "running", True)
        self._use_own_functions(stack)
        for config in self.configs:
            # The schedule would start the parameter gathers again in every call. Peers may make
            # more calls or fewer in a step, and gathers pair up by order alone.
            if config.param_sync_func is not None and all(map(gathers_by_hooks, self.chunks)):
                with collective_timeout(self.groups(), self.deadline_s):
                    for chunk in self.chunks:
                        gather_params(chunk, wait=False)
                set_for(stack, config, "param_sync_func", None)
        if reduce:
            for config in self.configs:
                set_for(stack, config, "finalize_model_grads_func", note_finalize)
                if config.no_sync_func is None and self.chunks[0].ddp_config.overlap_grad_reduce:
                    # Else each microbatch registers its gradients, and 0.16 and later reduce when
                    # as many have come as in the first call, whatever number this one has.
                    set_for(stack, config, "no_sync_func", self._of_chunks("no_sync"))
        else:
            suppress_grad_sync(stack, self.chunks, self.configs, note_finalize)
        for config in self.configs:
            if self.optimizer is not None and config.grad_scale_func is None:
                set_for(stack, config, "grad_scale_func", LossScale(self.optimizer))
            for name in _OWN_SCALES if self.shift else ():
                scale = getattr(config, name, None)
                if scale is not None:
                    set_for(stack, config, name, _times(2.0**-self.shift, scale))

    def _use_own_functions(self, stack: ExitStack) -> None:
        """Replace config functions that belong to another model's DDP or optimizer by those of this
        model, until `stack` is closed at the end of the schedule call.

        Functions that are methods of neither a DDP nor an optimizer are the caller's, and stay.
        """
        for config in self.configs:
            for name, method in _METHODS.items():
                function = getattr(config, name)
                functions = function if isinstance(function, list) else [function]
                owners = [getattr(bound, "__self__", None) for bound in functions]
                ddps = [owner for owner in owners if hasattr(owner, "bucket_groups")]
                if any(all(ddp is not chunk for chunk in self.chunks) for ddp in ddps):
                    set_for(stack, config, name, self._of_chunks(method))
            # The optimizer whose loss scale the function applies, if that is known.
            scale = config.grad_scale_func
            is_known = isinstance(scale, LossScale)
            owner = scale.optimizer if is_known else getattr(scale, "__self__", None)
            if not is_known and not hasattr(owner, "scale_loss"):
                continue
            if all(owner is not part for part in self._optimizer_parts):
                scale = None if self.optimizer is None else LossScale(self.optimizer)
                set_for(stack, config, "grad_scale_func", scale)

    def _of_chunks(self, method: str) -> Any:
        """Return the chunk's method of this name; with several chunks a list of their methods, as
        in Megatron's config.
        """
        methods = [getattr(chunk, method) for chunk in self.chunks]
        return methods if len(methods) > 1 else methods[0]

    def _call(self, arguments: dict[str, Any], current: CurrentMicrobatch, reduce: bool) -> None:
        schedule = get_forward_backward_func()
        coupled, group = self.lockstep_group()
        if not coupled and not reduce:
            # Peers can only block in parameter gathers, which `join` completes. This rank may wait
            # there itself, for one that was interrupted in one.
            with (
                collective_timeout(self.groups(), self.deadline_s),
                MissedCollectives(self.chunks).watched(),
            ):
                schedule(**arguments)
            return
        exchange_failure: Callable[[str | None], dict[int, str]] = _tell_no_rank
        if coupled:
            exchange_failure = functools.partial(exchange, deadline_s=self.deadline_s, group=group)
        call = GuardedCall(
            arguments,
            exchange_failure,
            check=False,
            skip=lambda iterator: current.start(next(iterator)),
        )
        with collective_timeout(self.groups(), self.deadline_s):
            call.run(schedule)
        if call.failures:
            raise WindowAborted(
                call.failures, "All ranks that share the model have finished the window."
            ) from call.error
        if call.error is not None:
            raise LocalFailure(call.error)

    def _forward_step(
        self, loss: StepLoss, results: list[LossResult], dummies: bool, current: CurrentMicrobatch
    ) -> Callable[..., Any]:
        # The token count of each microbatch, because dividing by what is valid comes at the end.
        one_token = torch.ones((), dtype=torch.int, device=self.device)
        upstream_factor = 1
        if not self.per_token and multiplies_by_ranks():
            upstream_factor = self.configs[0].context_parallel_size

        def forward(model: Any, inputs: Any) -> Any:
            run = functools.partial(call_user, "forward", self.forward, model, inputs)
            return run() if self.replay is None else self.replay.run(model, own_routes(inputs), run)

        def forward_step(data_iterator: Iterator[Microbatch], model: Any) -> tuple[Any, Any]:
            microbatch = next(data_iterator)
            current.start(microbatch)
            writes = self.gradient_writes()
            try:
                output = forward(model, microbatch.inputs)
            except IndexError as error:
                raise name_the_token(error, self.sizes, microbatch.inputs)  # noqa: B904  has it

            def loss_func(output: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
                if dummies:
                    return no_gradient(output), one_token, {}
                # Its metrics are copied now, because the schedule works on them in place.
                total, result = evaluate(loss, output, microbatch)
                written = self.gradient_writes() != writes
                if written and reducing_on_host(self.chunks) is None:
                    raise ValueError(OWN_BACKWARD)
                results.append(result)
                if total is None:
                    # Nothing is valid, but other ranks wait in the backward.
                    return no_gradient(output), one_token, {}
                if total._base is not None:
                    # With deallocate_pipeline_outputs, which Megatron's arguments set, a schedule
                    # frees what the last stage returns as well, and refuses a view.
                    total = total.clone()
                if upstream_factor > 1:
                    total = total / upstream_factor
                if self.shift:
                    total = total.float() * 2.0**-self.shift
                return total, one_token, {}

            return output, loss_func

        return forward_step

    def _auxiliary_weight(self, loss: StepLoss, microbatch: Microbatch, is_masked: bool) -> float:
        """Return the number that Megatron is to multiply a microbatch's auxiliary losses by.

        They are means over a microbatch: over its positions, or over its tokens if the model was
        given a padding mask. With calculate_per_token_loss Megatron multiplies them by that number
        itself. Like the loss, they are divided by the step's normalizer at the end.
        """
        if not microbatch.sequences:
            return 0.0
        number = microbatch.tokens if is_masked else microbatch.positions
        weight = auxiliary_weight(loss, microbatch, number)
        if self.per_token:
            weight /= number
        return weight * 2.0**-self.shift


def embedding_sizes(chunks: Sequence[Any]) -> EmbeddingSizes:
    """Return the sizes of a `GPTModel`'s vocabulary and of its learned positions; None for a size
    that the model does not have.

    All stages of a pipeline know them.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, GPTModel):
                is_learned = module.position_embedding_type == "learned_absolute"
                positions = module.max_sequence_length if is_learned else None
                return EmbeddingSizes(module.vocab_size, positions)
    return EmbeddingSizes(None, None)


def _keep_scale_of_each_forward(stack: ExitStack) -> None:
    """Let each backward scale auxiliary losses with the scale of its own microbatch's forward.

    Upstream sets the scale in each forward, and reads it in each backward. In a pipeline that is
    another microbatch's, which is the same as long as all microbatches have the same count.
    """
    forward, backward = schedules.forward_step, schedules.backward_step
    scales: dict[int, list[tuple[Any, Any]]] = {}

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        # A copy: newer releases write each scale into the tensor of the one before.
        scales[id(_first_tensor(result[0]))] = [
            (scaler, torch.clone(scaler.main_loss_backward_scale))
            for scaler in moe.scalers()
            if isinstance(scaler.main_loss_backward_scale, Tensor)
        ]
        return result

    @functools.wraps(backward)
    def backward_step(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        for scaler, scale in scales.pop(id(_first_tensor(output_tensor)), ()):
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


def _tell_no_rank(failure: str | None) -> dict[int, str]:
    """Return {}, i.e. no failures. This stands in for `exchange` where no other rank waits for this
    one; others learn of this rank's failure in `finish` or `abort`.
    """
    return {}


class CheckedUpdate(OpenUpdate):
    """Runs the optimizer's `step()`.
    It checks the gradients' norm right before the update, and tells whether an update stopped
    half-way.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any, options: Options) -> None:
        super().__init__(undo=options.undo)
        self._chunks = list(chunks)
        self._optimizer = optimizer
        self._non_finite = options.non_finite
        self._norms: list[Any] = []

    @property
    def lowers_scale(self) -> bool:
        """True if the optimizer has a dynamic loss scale, which gradients that are not finite
        lower.
        """
        scalers = grad_scalers(self._optimizer)
        return any(isinstance(scaler, DynamicGradScaler) for scaler in scalers)

    def run(self) -> tuple[float | None, str | None]:
        """Call the optimizer's `step()`; return the gradients' norm and why there was no update.
        The reason is None if there was an update.

        Raises:
            RuntimeError: the norm is not finite, and the rule is "refuse". Nothing was updated.
        """
        self.reset()
        self._norms = []
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
        if not self.begun:
            return norm, f"the norm of the gradients, {norm:g}, is above grad_norm_skip_threshold"
        return norm, "the optimizer reports that it has not updated"

    @contextmanager
    def _watched(self) -> Iterator[list[str]]:
        """Context manager: let the optimizer check the norm over all ranks right before its update.

        Yields the reasons to skip the update. The norm is read here instead of at the end, so that
        the host waits for the device no more often.
        """
        optimizer, reasons = self._optimizer, list[str]()
        begin_update = optimizer.step_with_ready_grads

        def keep_norm_of(compute: Callable[..., Any]) -> Callable[..., Any]:
            def compute_and_keep(*args: Any, **kwargs: Any) -> Any:
                self._norms = [compute(*args, **kwargs)]
                return self._norms[0]

            return compute_and_keep

        def update(*args: Any, **kwargs: Any) -> Any:
            reason = self._reason_to_skip()
            if reason is not None:
                reasons.append(reason)
                return False
            inner = [part.optimizer for part in unchained(optimizer)]
            # A hybrid one holds the state of those inside of it, and they hold copies.
            inner += [part for hybrid in inner if is_hybrid(hybrid) for part in stepping(hybrid)]
            self.begin(
                (param for chunk in self._chunks for param in chunk.param_to_bucket_group),
                [part for part in inner if part is not None],
            )
            return begin_update(*args, **kwargs)

        replaced = {"step_with_ready_grads": update}
        if self._non_finite != "update":
            replaced["get_grad_norm"] = keep_norm_of(optimizer.get_grad_norm)
            replaced["clip_grad_norm"] = keep_norm_of(optimizer.clip_grad_norm)
        try:
            for name, function in replaced.items():
                setattr(optimizer, name, function)
            yield reasons
        finally:
            for name in replaced:
                vars(optimizer).pop(name, None)

    def _reason_to_skip(self) -> str | None:
        # Gradients of parameter groups that Megatron clips separately are not in the global norm.
        by_group = getattr(self._optimizer, "grad_norms_by_group", None) or {}
        for norm in (*self._norms, *by_group.values()):
            if norm is not None:
                reason = reason_to_skip(float(norm), self._non_finite)
                if reason is not None:
                    return reason
        return None


def _overflow(scales: Sequence[tuple[Any, Any]]) -> str:
    """Return the reason for a skip after an overflow, with the loss scale before and after it.

    `scales` has each scaler with its scale from before the update.
    """
    changes = [(scaler, float(old), float(scaler.scale)) for scaler, old in scales]
    lowered = [change for change in changes if change[2] < change[1]]
    scaler, old, new = (lowered or changes)[0]
    if lowered:
        return f"gradients overflowed; the loss scale is {new:g} now, not {old:g}"
    if not isinstance(scaler, DynamicGradScaler):
        return f"gradients overflowed, or are NaN, under a fixed loss scale of {new:g}: lower it"
    if new <= float(scaler.min_scale):
        return f"gradients overflowed, and the loss scale of {new:g} is the least that is allowed"
    return f"gradients overflowed; the loss scale stays at {new:g}, as its hysteresis says"
