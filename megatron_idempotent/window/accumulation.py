"""Makes one optimizer step of several schedule calls, with the gradient of a single call.

A schedule divides the loss and the auxiliary losses by the number of microbatches of that call, and
reduces and finalizes the gradients at its end. So several calls give a different gradient than one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron_idempotent.megatron import ddp, fsdp
from megatron_idempotent.megatron.schedules import are_held, open_windows
from megatron_idempotent.patching.needs import Need, check_applied


def configs_of(chunks: Sequence[Any]) -> list[Any]:
    """Return the config objects of the chunks, each once; chunks mostly share one."""
    return list({id(config): config for config in map(get_model_config, chunks)}.values())


def suppress_grad_sync(
    stack: ExitStack,
    chunks: Sequence[Any],
    configs: Sequence[Any],
    instead_of_finalize: Callable[..., None],
) -> None:
    """Prevent schedule calls from reducing or finalizing gradients until `stack` is closed.

    Instead of the finalize function, schedules call `instead_of_finalize` with its arguments.
    """
    for config in configs:
        functions = config.no_sync_func
        if functions is None:
            functions = [chunk.no_sync for chunk in chunks if _overlaps(chunk)]
        for function in functions if isinstance(functions, list) else [functions]:
            stack.enter_context(function())
        # The schedule leaves its own no_sync context for the last microbatch.
        set_for(stack, config, "no_sync_func", nullcontext)
        set_for(stack, config, "grad_sync_func", None)
        # Not None: with None the schedules would also skip the deferred embedding gradient.
        set_for(stack, config, "finalize_model_grads_func", instead_of_finalize)


def start_held(chunk: Any) -> None:
    """Start the reductions that `no_sync` prevented, after the last backward of a step.

    Raises:
        RuntimeError: the chunk is in hybrid Megatron-FSDP, which reduces inside a backward only.
    """
    if not fsdp.is_wrapped(chunk):
        ddp.start_held(chunk)
        return
    wrapped = chunk.module
    if wrapped.dist_index.use_hybrid_fsdp:
        raise RuntimeError(
            "hybrid Megatron-FSDP reduces gradients inside a backward only, and this step has had "
            "its last one: give the total before the last call, as in "
            "accumulation_window(chunks, total_microbatches)"
        )
    if wrapped.data_parallel_sharding_strategy in ("no_shard", "optim"):  # others always reduce
        groups = wrapped.param_and_grad_buffer.parameter_groups
        params = [param for group in groups if group.requires_grad for param in group.params]
        wrapped.grad_reduce_pipeline.reduce_gradients(params)


def _overlaps(chunk: Any) -> bool:
    """Return whether a backward of the chunk may start reductions, i.e. overlap_grad_reduce is on.
    If it is off, the caller does not enter the chunk's `no_sync()`.

    Without overlap Megatron-FSDP's `no_sync()` would turn reductions on for later backwards.
    """
    options = getattr(chunk, "ddp_config", None)
    return hasattr(chunk, "no_sync") and getattr(options, "overlap_grad_reduce", True)


def set_for(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set the attribute `name` of `owner` to `value`; closing the stack restores the old value."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


@contextmanager
def dividing_by(
    divisor: int,
    *,
    auxiliary_weight: float | Callable[[], float] = 1.0,
    context_parallel: bool = True,
) -> Iterator[None]:
    """Make schedules divide losses by `divisor` in the block, not by their number of microbatches.

    It replaces the schedules' function that divides, whose only use of that number this is. The
    losses of MoE, MTP and experimental attention are also multiplied by `auxiliary_weight`, unless
    the config has scale functions for them; if it is a function, it is called after each forward.
    The schedules of some releases multiply some losses by the number of context-parallel ranks,
    because DDP averages over these ranks; without `context_parallel` they do not.
    """
    late = hasattr(schedules, "forward_step_calc_loss")  # 0.14 on; before, forward_step divides
    name = "forward_step_calc_loss" if late else "forward_step"
    original = getattr(schedules, name)
    number, config, ranks = _positions(original)

    def with_divisor(*args: Any, **kwargs: Any) -> Any:
        if len(args) > number:
            args = (*args[:number], divisor, *args[number + 1 :])
        else:
            kwargs["num_microbatches"] = divisor
        if ranks is not None and not context_parallel:
            if len(args) > ranks:
                args = (*args[:ranks], args[ranks] and 1, *args[ranks + 1 :])
            elif kwargs.get("cp_group_size"):
                kwargs["cp_group_size"] = 1
        if auxiliary_weight == 1.0:
            return original(*args, **kwargs)
        with ExitStack() as stack:
            its = args[config] if len(args) > config else kwargs["config"]
            # Inside of this function it scales the auxiliary losses only; the loss itself is
            # scaled when its backward starts.
            scale = _times(auxiliary_weight, its.grad_scale_func)
            set_for(stack, its, "grad_scale_func", scale)
            return original(*args, **kwargs)

    setattr(schedules, name, with_divisor)
    try:
        yield
    finally:
        setattr(schedules, name, original)


@functools.lru_cache(maxsize=8)
def _positions(function: Callable[..., Any]) -> tuple[int, int, int | None]:
    """Return the positions of three parameters in a function's signature.
    They are `num_microbatches`, `config` and `cp_group_size`.

    The last is None before 0.14, where functions look up the number of context-parallel ranks.
    """
    parameters = list(inspect.signature(function).parameters)
    number, config = parameters.index("num_microbatches"), parameters.index("config")
    has_cp_group_size = "cp_group_size" in parameters
    return number, config, parameters.index("cp_group_size") if has_cp_group_size else None


def multiplies_by_ranks() -> bool:
    """Return whether schedules multiply losses by the number of context-parallel ranks even under
    `dividing_by(context_parallel=False)`. This is so in 0.12 only.

    0.12 multiplies losses that come with a number of tokens, too: it looks the number of ranks up
    twice, the second time for losses without tokens.
    """
    if hasattr(schedules, "forward_step_calc_loss"):
        return False
    return inspect.getsource(schedules.forward_step).count("get_context_parallel_world_size") > 1


def _times(
    weight: float | Callable[[], float], scale: Callable[[Any], Any] | None
) -> Callable[[Any], Any]:
    def weighed(loss: Any) -> Any:
        # Called here, because before 0.14 the patched function fetches the microbatch itself.
        factor = weight() if callable(weight) else weight
        return (loss if scale is None else scale(loss)) * factor

    return weighed


_DOOR = Need(
    "schedules-ask-windows",
    "each schedule call averages, reduces and finalizes its own microbatches as a whole step",
    a_door=True,
)


class AccumulationWindow:
    """Runs the schedule calls of one optimizer step; `accumulation_window()` creates it."""

    def __init__(self, chunks: list[Any], total: int | None) -> None:
        self._chunks = chunks
        self._configs = configs_of(chunks)
        self._total = total
        # Microbatches that have run forward and backward so far.
        self._done = 0
        # The sum of the calls' token counts, for finalizing under `calculate_per_token_loss`.
        self._num_tokens: Any = None
        self._finalize_call: tuple[Any, dict[str, Any]] = (chunks, {})
        self._finalized = False
        self._broken = False

    def holds(self, chunk: Any) -> bool:
        """Return whether the chunk belongs to this window."""
        return any(chunk is held_chunk for held_chunk in self._chunks)

    def run(self, schedule: Callable[..., Any], **call: Any) -> Any:
        """Run one call of a schedule, and return its result; patched schedules call this.

        Raises:
            ValueError: the call brings more microbatches than the total has left.
            RuntimeError: an earlier call raised, so that the gradients are partial.
        """
        if call.get("forward_only", False):
            return schedule(**call)
        done_after = self._done + call["num_microbatches"]
        if self._broken:
            raise RuntimeError(
                "an earlier schedule call of this accumulation_window() raised, so the gradients "
                "are partial: leave the window, drop them and begin the step again"
            )
        if self._total is not None and done_after > self._total:
            raise ValueError(
                f"accumulation_window() has {self._total} microbatches, {self._done} have run, and "
                f"this call brings {call['num_microbatches']}: pass the total of the whole step"
            )
        self._broken = True
        with ExitStack() as stack:
            divisor = self._total or 1  # without a total they are divided at the end
            if divisor != call["num_microbatches"]:
                stack.enter_context(dividing_by(divisor))
            if done_after == self._total:
                self._let_finalize(stack)
            else:
                suppress_grad_sync(stack, self._chunks, self._configs, self._count_tokens)
            result = schedule(**call)
        self._done = done_after
        self._finalized = done_after == self._total
        self._broken = False
        return result

    def finish(self) -> None:
        """Reduce and finalize the gradients, unless the last schedule call has done so.
        `accumulation_window()` calls this at the end of its block.

        Raises:
            RuntimeError: fewer microbatches ran than the total says, or none at all.
        """
        if self._total is None and self._done:
            self._total = self._done
            if not self._configs[0].calculate_per_token_loss:
                for chunk in self._chunks:
                    chunk.scale_gradients(1 / self._done)
        if self._done != self._total:
            raise RuntimeError(
                f"accumulation_window() ends after {self._done} of {self._total or 'its'} "
                "microbatches: gradients are neither reduced nor finalized. Run the rest; "
                "schedule calls under a full-iteration CUDA graph cannot be seen"
            )
        if self._finalized:
            return
        self._finalized = True
        for chunk in self._chunks:
            if getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False):
                start_held(chunk)  # no later backward starts the reductions
        finalize = self._configs[0].finalize_model_grads_func
        if finalize is not None:
            model, options = self._finalize_call
            finalize(model, self._num_tokens, **options)

    def _let_finalize(self, stack: ExitStack) -> None:
        """Pass the tokens of all the window's calls to the config's finalize function, in place of
        the tokens of the call that runs it, until `stack` is closed.
        """
        for config in self._configs:
            finalize = config.finalize_model_grads_func

            def with_all_tokens(
                model: Any, num_tokens: Any = None, *, finalize: Any = finalize, **options: Any
            ) -> None:
                self._count_tokens(model, num_tokens, **options)
                if finalize is not None:
                    finalize(model, self._num_tokens, **options)

            set_for(stack, config, "finalize_model_grads_func", with_all_tokens)

    def _count_tokens(self, model: Any, num_tokens: Any = None, **options: Any) -> None:
        self._finalize_call = model, options
        if num_tokens is not None:
            both = self._num_tokens is not None
            self._num_tokens = self._num_tokens + num_tokens if both else num_tokens


@contextmanager
def accumulation_window(model_chunks: Any, total_microbatches: int | None = None) -> Iterator[None]:
    """Make the schedule calls in the block one optimizer step, with the gradient of a single call.

    Inside, every division by the number of microbatches in Megatron's schedules (the loss, the MoE
    auxiliary and z-loss, MTP) uses the step's total instead of that call's number. Only the call
    that completes the total reduces and finalizes the gradients; it overlaps as usual. With
    `calculate_per_token_loss` the tokens of all calls are added up. The same microbatches in the
    same order give the same bits in any number of calls. Forward-only calls pass through, and so do
    calls for other models. After each call the config has the caller's functions again.

    A loss function that undoes Megatron's division, by multiplying by the number of microbatches of
    its call, must multiply by the total instead, which has to be known at the start.

    Without a total, no call reduces. At the end of the block the gradients are divided, exactly if
    the total is a power of two, else with one rounding, and reduced without overlap. All ranks
    enter with the same number. Zero the gradient buffers before the block, step after it.

    Args:
        model_chunks: this rank's chunks as the schedule gets them, or the only chunk.
        total_microbatches: the number of microbatches of the step on this data-parallel rank; None
            if it is not known yet.

    Raises:
        ValueError: there is no chunk, the total is not positive, or calls bring more microbatches
            than it has.
        RuntimeError: another window holds one of the chunks; the patch that leads schedule calls to
            this window is not applied; or the block ends, without an exception, before the total.

    Example:
        with accumulation_window(chunks, total_microbatches=8):
            for batch in stream:
                forward_backward(
                    model=chunks, data_iterator=iter(batch), num_microbatches=len(batch), **window
                )
        optimizer.step()
    """
    chunks = list(model_chunks) if isinstance(model_chunks, Sequence) else [model_chunks]
    if not chunks:
        raise ValueError("accumulation_window() got no model chunk: pass what the schedule gets")
    total = total_microbatches
    if total is not None and (type(total) is not int or total < 1):
        raise ValueError(
            f"accumulation_window() takes a positive int as total_microbatches, got {total!r}"
        )
    check_applied("accumulation_window()", (_DOOR,), chunks)
    window = AccumulationWindow(chunks, total)
    if are_held(chunks):
        raise RuntimeError(
            "accumulation_window() is already open for these chunks, and a step has one window: "
            "leave that block first, or make the calls inside of it"
        )
    open_windows.append(window)
    try:
        yield
        window.finish()
    finally:
        open_windows.remove(window)
