"""Completes a training window's communication after one rank failed, then stops all ranks.

A rank that leaves a pipeline schedule half-way leaves messages that the next window consumes, and
collectives that its peers wait in. So a failing rank stays in the schedule: it sends and receives
zeros, starts the collectives that its peers expect, and all ranks stop together before gradients
are finalized.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron_idempotent.window.agreement import (
    DEADLINE_S,
    SessionPoisoned,
    WindowAborted,
    checked_deadline,
    compare,
    describe,
    exchange,
    is_poisoned,
    lockstep_group,
    poison,
    refuse_if_poisoned,
)

from .abort import abort_window
from .accumulation import set_for
from .missed_collectives import MissedCollectives, gather_params


class _NoGradient(torch.autograd.Function):
    """Autograd function with a loss of zero, whose backward sends zeros through the graph.

    The backward really runs, so that every collective inside the model and every gradient hook
    happens as on the other ranks, at any tensor parallel size.
    """

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.like = [(output.shape, output.dtype, output.device) for output in outputs]
        return torch.zeros((), dtype=torch.float32, device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return tuple(
            torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like
        )


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a last stage's output, which may be a tensor, a tuple or a list."""
    parts = output if isinstance(output, (tuple, list)) else [output]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def no_gradient(output: Any) -> torch.Tensor:
    """Return a scalar loss of zero whose backward sends zeros through `output`."""
    loss: torch.Tensor = _NoGradient.apply(*tensors_of(output))
    return loss


def output_like(arguments: Mapping[str, Any], config: Any, input_tensor: Any, device: Any) -> Any:
    """Return a stage's output [s, b, h] of zeros, in the structure that `forward_step` returns.

    Its shape is the one that the receiving stage has allocated: the result of `get_tensor_shapes`,
    or the input's shape if shapes travel with the messages.
    """
    received = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
    if config.variable_seq_lengths and received is not None:
        shape = tuple(received.shape)
    else:
        tokens = arguments.get("decoder_seq_length") or arguments["seq_length"]
        tokens //= config.context_parallel_size
        if config.sequence_parallel:
            tokens //= config.tensor_model_parallel_size
        shape = (tokens, arguments["micro_batch_size"], config.hidden_size)
        adjust = arguments.get("adjust_tensor_shapes_fn")
        if adjust is not None:
            shape = tuple(adjust([shape], [shape])[1][0])
    dtype = config.pipeline_dtype or config.params_dtype
    output = torch.zeros(shape, dtype=dtype, device=device)
    return [output] if isinstance(input_tensor, list) else output


def gradient_like(input_tensor: Any) -> Any:
    """Return zeros in the structure that `backward_step` returns for `input_tensor`."""
    if input_tensor is None:
        return None
    if isinstance(input_tensor, list):
        return [gradient_like(tensor) for tensor in input_tensor]
    return torch.zeros_like(input_tensor)


def _shared(config: Any, arguments: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Return the setting that makes ranks communicate inside of a layer, such as
    `context_parallel_size=2`, and whether those ranks run in lockstep, that is, the same code on
    one batch.

    The setting is None without such communication. Tensor and context parallel ranks run in
    lockstep. Other ranks have batches of their own, so that one rank can fail alone.
    """
    if type(arguments.get("p2p_communicator")).__name__ == "MultiModulePipelineCommunicator":
        return "a multi-module pipeline", False
    setting = across_replicas(config)
    if setting is not None:
        return setting, False
    experts = _expert_tensor_size(config)
    if experts > 1:
        return f"expert_tensor_parallel_size={experts}", False
    for name in ("tensor_model_parallel_size", "context_parallel_size"):
        if _size(config, name) > 1:
            return f"{name}={_size(config, name)}", True
    return None, False


def across_replicas(config: Any) -> str | None:
    """Return, as name=value, the setting that makes data-parallel replicas communicate inside of a
    layer; None if they do not communicate there.
    """
    if "global_aux_loss" in (getattr(config, "moe_router_load_balancing_type", None) or ()):
        return "moe_router_load_balancing_type=global_aux_loss"
    shards = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
    for name in ("expert_model_parallel_size", *shards):
        if _size(config, name) > 1:
            return f"{name}={_size(config, name)}"
    experts = _expert_tensor_size(config)
    if experts > _size(config, "tensor_model_parallel_size"):
        return f"expert_tensor_parallel_size={experts}"
    return None


def _expert_tensor_size(config: Any) -> int:
    if getattr(config, "num_moe_experts", None) is None:
        return 1
    return _size(config, "expert_tensor_parallel_size")


def _size(config: Any, name: str) -> int:
    return int(getattr(config, name, None) or 1)


class GuardedCall:
    """Runs one schedule call; after a failure on this rank it communicates zeros until the end.
    So other ranks do not wait for the rank that failed.

    `error` is the failure of this rank, `failures` has those of all ranks by global rank. At the
    end of the window `exchange` takes this rank's failure or None, and returns those of all ranks.
    With `check` gradients are checked for NaN before that, if finalizing would do so. `skip` takes
    the data iterator of each forward that is skipped after a failure.

    With tensor or context parallel ranks, creating the first `GuardedCall` is a collective over all
    ranks: it makes a gloo group of the ranks that communicate inside the model's layers.
    """

    def __init__(
        self,
        arguments: dict[str, Any],
        exchange: Callable[[str | None], dict[int, str]],
        *,
        check: bool = True,
        skip: Callable[[Any], None] | None = None,
    ) -> None:
        model = arguments["model"]
        self._arguments = arguments
        self._exchange = exchange
        self._check = check
        self._skip = skip
        self._forward_only = arguments.get("forward_only", False)
        self.chunks = model if isinstance(model, list) else [model]
        self.config = get_model_config(self.chunks[0])
        if not self._forward_only and not all(hasattr(c, "bucket_groups") for c in self.chunks):
            raise ValueError(
                f"guarded_window() got {type(self.chunks[0]).__name__} to train: pass the chunks "
                "wrapped in megatron.core.distributed.DistributedDataParallel"
            )
        self.debts = MissedCollectives(self.chunks)
        self.error: BaseException | None = None
        self.failures: dict[int, str] = {}
        self._told: str | None = None
        self._settled = False
        self._shared, in_lockstep = _shared(self.config, arguments)
        self._lockstep = lockstep_group() if in_lockstep else None
        # True after a failure in the model, which then runs no more; False after one in the loss.
        self._skipping = False
        self._chunk_of: dict[int, tuple[Any, Any]] = {}

    def run(self, forward_backward_func: Callable[..., Any]) -> Any:
        """Run the schedule with this guard, tell all ranks of failures, and return the result.
        Failures are stored in `failures`, and are not raised here.

        Raises:
            SessionPoisoned: a rank failed where others may wait for it, or did not arrive in time.
        """
        try:
            with self._installed():
                returned = forward_backward_func(**self._arguments)
                self.settle()
        except SessionPoisoned:
            raise
        except Exception as error:
            raise poison(f"a window was left by {describe(error)}") from error
        except BaseException as error:
            poison(f"a window was left by {describe(error)}")
            raise
        self.debts.learn(failed=self.error is not None)
        return returned

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        """Replace the schedule's forward, backward and finalize functions during the block."""
        finalize = self.config.finalize_model_grads_func
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.debts.watched())
            for name, step in (("forward_step", self._forward), ("backward_step", self._backward)):
                original = getattr(schedules, name)
                set_for(stack, schedules, name, functools.partial(step, original))
            if finalize is not None:
                finalize_all = functools.partial(self._finalize, finalize)
                set_for(stack, self.config, "finalize_model_grads_func", finalize_all)
            yield

    def settle(self) -> None:
        """Exchange failures with all ranks, once per window, and store them in `failures`.
        A collective. Before it, check this rank's gradients for NaN if `check` is set.
        """
        if self._settled:
            return
        self._settled = True
        if self.error is None and self._check and not self._forward_only:
            try:
                self.debts.check()
            except Exception as error:  # noqa: BLE001  reported to all ranks, and raised on all
                self._fail(error, "gradient check")
        self.failures = self._exchange(self._told)

    def stop(self, optimizer: Any) -> None:
        """Drop the window's gradients and counts after a failure; all ranks call it.

        This includes a first window's counts. Otherwise only ranks that finished their backward
        would have completed upstream's first batch, and would start reductions in a different order
        than the others.
        """
        if not self._forward_only:
            abort_window(self.chunks, optimizer)
        if self.error is not None:
            # The caller may keep the error, whose frames would keep the activations alive.
            traceback.clear_frames(self.error.__traceback__)

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step, model, input_tensor = args[0], args[2], args[4]
        if self._skipping:
            if self._skip is not None:
                self._skip(args[1])
        else:
            try:
                result = original(self._with_watched_loss(step), *args[1:], **kwargs)
            except Exception as error:  # noqa: BLE001  raised on all ranks at the window's end
                self._stop_timer("forward-compute")
                self._give_up(error, f"forward of {self._name(model, kwargs)}")
            else:
                self._remember(result[0], model)
                return result
        gather_params(model)
        self._clear_deferred()
        device = next(model.parameters()).device
        output = output_like(self._arguments, self.config, input_tensor, device)
        self._remember(output, model)
        return output, torch.tensor(0, dtype=torch.int)

    def _backward(
        self,
        original: Callable[..., Any],
        input_tensor: Any,
        output_tensor: Any,
        *args: Any,
        **kw: Any,
    ) -> Any:
        _, chunk = self._chunk_of.pop(id(_single(output_tensor)))
        if not self._skipping:
            try:
                with self.debts.backward(chunk):
                    return original(input_tensor, output_tensor, *args, **kw)
            except Exception as error:  # noqa: BLE001  raised on all ranks at the window's end
                self._stop_timer("backward-compute")
                self._give_up(error, f"backward of {self._name(chunk, {})}")
        self.debts.reduce(chunk)
        self._clear_deferred()
        return gradient_like(input_tensor)

    def _finalize(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.settle()
        return None if self.failures else original(*args, **kwargs)

    def _with_watched_loss(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def forward_step(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            output, loss_func = step(*args, **kwargs)
            if loss_func is None:
                return output, None

            def loss(*loss_args: Any, **loss_kwargs: Any) -> Any:
                try:
                    return loss_func(*loss_args, **loss_kwargs)
                except Exception as error:
                    if not tensors_of(output):
                        raise  # no graph to send zeros through
                    self._fail(error, "loss")
                    return no_gradient(output), {}

            return output, loss

        return forward_step

    def _give_up(self, error: Exception, location: str) -> None:
        """Record this rank's error, and skip all further forwards and backwards of this window.
        Raise `SessionPoisoned` if other ranks may wait for this one inside a layer.
        """
        self._fail(error, location)
        if is_poisoned():
            raise poison(f"{location}: {describe(error)}") from error
        self._require_that_nobody_waits(error, location)
        self._skipping = True

    def _require_that_nobody_waits(self, error: Exception, location: str) -> None:
        """Raise unless no rank can wait for this one inside of a layer: either layers do not
        communicate, or all tensor- and context-parallel ranks raised the same error at the same
        place.

        A rank that failed alone left a layer that the others may still wait in.

        Raises:
            SessionPoisoned: other ranks may wait for this one.
        """
        if self._shared is None:
            return
        headline, reports = f"{location}: {describe(error)}", []
        if self._lockstep is not None:
            frames = traceback.extract_tb(error.__traceback__)
            stack = [f"{frame.filename}:{frame.lineno}" for frame in frames]
            reports = compare("\n".join((headline, *stack)), self._lockstep)
            if reports and len(set(reports)) == 1:
                return
        heads = [text.partition("\n")[0] for text in reports]
        failures = "".join(f" ({head})" for head in heads if head != headline)
        raise poison(
            f"{headline}; it cannot be reported later with {self._shared}: the other "
            f"ranks{failures} did not fail at the same place and may wait inside a layer"
        ) from error

    def _fail(self, error: BaseException, location: str) -> None:
        if self.error is None:
            self.error, self._told = error, f"{location}: {describe(error)}"

    def _remember(self, output: Any, model: Any) -> None:
        if self._forward_only:
            return
        single = _single(output)
        # The tensor is kept, so that no other object gets its id.
        self._chunk_of[id(single)] = (single, model)

    def _name(self, model: Any, kwargs: dict[str, Any]) -> str:
        name = f"chunk {self.chunks.index(model)}" if len(self.chunks) > 1 else "the model"
        microbatch = kwargs.get("current_microbatch")
        return name if microbatch is None else f"{name}, microbatch {microbatch}"

    def _stop_timer(self, name: str) -> None:
        if self.config.timers is not None:
            timer = self.config.timers(name, log_level=2)
            if getattr(timer, "_started", False):
                timer.stop()

    def _clear_deferred(self) -> None:
        """Empty the lists of activations and output gradients of a deferred embedding gradient.
        The schedule pairs their items at its end, which fails if one list is longer.
        """
        if not self.config.defer_embedding_wgrad_compute:
            return
        for chunk in self.chunks:
            for module in chunk.modules():
                for name in ("embedding_activation_buffer", "grad_output_buffer"):
                    if getattr(module, name, None):
                        getattr(module, name).clear()


def _single(output: Any) -> Any:
    return output[0] if isinstance(output, list) else output


def guarded_window(
    forward_backward_func: Callable[..., Any],
    *,
    optimizer: Any = None,
    deadline_s: float = DEADLINE_S,
    **arguments: Any,
) -> Any:
    """Run one window; if one rank fails, end it on all ranks and leave later windows unharmed.

    All ranks of the default group take part, once per window, in one all-reduce of one number on
    the host, right before `finalize_model_grads_func`. If no rank fails, nothing else changes.

    Args:
        forward_backward_func: what `get_forward_backward_func()` returns.
        optimizer: its gradients are zeroed too if the window is stopped.
        deadline_s: how long a rank waits at the window's end for the slowest one, in seconds.
        **arguments: the schedule's arguments: forward_step_func, data_iterator, model and so on.

    Returns:
        The schedule's result.

    Raises:
        WindowAborted: some rank failed. Gradients are zero, and the next window computes what it
            would have without this one; data iterators have advanced by different counts.
        SessionPoisoned: a rank failed where others may wait for it, or did not arrive within the
            deadline.
        ValueError: the schedule is not Megatron's, a chunk to train is not wrapped in DDP, or the
            deadline is infinite or not positive.

    Example:
        run = functools.partial(guarded_window, get_forward_backward_func(), optimizer=optimizer)
        losses = run(forward_step_func=forward_step, data_iterator=data, model=chunks, **window)
    """
    deadline_s = checked_deadline(deadline_s)
    refuse_if_poisoned()
    if getattr(forward_backward_func, "__module__", None) != schedules.__name__:
        raise ValueError(
            f"guarded_window() knows the schedules of {schedules.__name__}, found "
            f"{forward_backward_func!r}: pass what get_forward_backward_func() returns"
        )
    window = GuardedCall(arguments, functools.partial(exchange, deadline_s=deadline_s))
    returned = window.run(forward_backward_func)
    if window.failures:
        window.stop(optimizer)
        raise WindowAborted(
            window.failures, "All ranks finished the window and dropped its gradients."
        ) from window.error
    return returned
