"""Drops a failed window, so that the next one has the result that it would have without it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from megatron.core.tensor_parallel import random
from megatron.core.utils import get_model_config

from megatron_idempotent.megatron import fsdp, gather, moe
from megatron_idempotent.megatron.ddp import (
    bucket_groups,
    checked_chunks,
    drain,
    forget_first_window,
)
from megatron_idempotent.megatron.moe import forget_tokens, reset_shared_experts
from megatron_idempotent.megatron.training import abandon, live_machine

from .open_contexts import close_contexts, drop_coalescing, leave_no_sync

# Timers that Megatron starts between the beginning of a window and the end of its step. The
# caller's own timers, around several windows, keep running.
WINDOW_TIMERS = frozenset(
    {
        *("all-grads-sync", "backward-compute", "backward-recv", "backward-send"),
        *("backward-send-backward-recv", "backward-send-forward-recv", "batch-generator"),
        *("conditional-embedder-grads-all-reduce", "embedding-grads-all-reduce"),
        *("forward-backward", "forward-backward-send-forward-backward-recv", "forward-compute"),
        *("forward-recv", "forward-send", "forward-send-backward-recv"),
        *("forward-send-forward-recv", "layernorm-grads-all-reduce"),
        *("non-tensor-parallel-grads-all-reduce", "optimizer", "optimizer-clip-main-grad"),
        *("optimizer-copy-main-to-model-params", "optimizer-copy-to-main-grad"),
        *("optimizer-count-zeros", "optimizer-inner-step", "optimizer-unscale-and-check-inf"),
        "params-all-gather",
    }
)


def abort_window(model_chunks: Sequence[Any], optimizer: Any = None) -> None:
    """Drop a window that raised, so that later windows give the results they would give without it.
    A window is all calls whose gradients go into one optimizer step.

    Call it after any exception, a keyboard interrupt included, between the start of a window's
    forward and the end of `optimizer.step()`; on every rank that holds the model, with or without
    patches applied. Safe to repeat; on a model between two steps it changes no value.

    It works on this rank alone: it starts no collective, and only waits for those in flight. So use
    it for failures that all ranks have at the same point. After a failure on some ranks only, the
    other ranks hang in a collective, or have sent messages that no rank receives: agree between
    ranks first.

    When it returns, reductions and gathers in flight have ended, and gradients are zero in the
    buffers, in `param.grad` and in the optimizer. Collectives that were being coalesced are
    dropped. `no_sync` is left, even if a traceback still holds it, and so are other contexts whose
    exit the exception interrupted, if it is being handled. A first window's counts are dropped. MoE
    token counts, auxiliary losses kept for logging, router replay, overlapped shared experts and
    deferred embedding gradients are empty. Megatron's timers of a window are stopped. The rerun
    state machine waits for a step, and no recomputation is under way. Config, training mode, hooks,
    random states and loss scale stay as they are.

    It cannot undo an update that has begun. If `optimizer.step()` raised before its inner optimizer
    ran, parameters are unchanged. If it raised later, the step count, `state["step"]`, is one
    higher, and this rank's shards are updated: all of them, if the inner optimizer returned. Then
    all ranks can complete the step: `_copy_main_params_to_model_params()` of an optimizer that
    keeps float32 copies, and `chunk.start_param_sync(force_sync=True)`, or with
    overlap_param_gather the next forward. If the inner optimizer raised, or one of several, load a
    checkpoint. A dynamic loss scale has counted the window once `prepare_grads` has returned.

    It does not cover tensors in flight between pipeline stages, CUDA graphs, Transformer Engine's
    FP8 state, fine-grained activation offloading, or the second version of Megatron-FSDP.

    Args:
        model_chunks: this rank's chunks, in Megatron's `DistributedDataParallel` or Megatron-FSDP.
        optimizer: what `get_megatron_optimizer` returned for them, if they have one.

    Raises:
        ValueError: there is no chunk, a chunk has neither of these wrappers, or the optimizer is
            not Megatron's.

    Example:
        try:
            forward_backward(model=chunks, **window)
            optimizer.step()
        except BadSample:
            abort_window(chunks, optimizer)
    """
    chunks = checked_chunks("abort_window()", model_chunks, optimizer, or_in=fsdp.is_wrapped)
    close_contexts(sys.exc_info()[1])
    leave_no_sync(chunks)
    drop_coalescing(chunks)
    for chunk in chunks:
        for group in bucket_groups(chunk):
            # First, because gathers and reductions may write into the gradients.
            gather.wait(group)
            drain(group)
            if hasattr(group, "is_first_batch"):  # from 0.16 on
                forget_first_window(group)
        if fsdp.is_wrapped(chunk):
            fsdp.start_over(chunk.module)
        chunk.zero_grad_buffer()
        for param in chunk.parameters():
            param.grad = None
        forget_tokens(chunk)
        _forget_activations(chunk)
    if optimizer is not None:
        optimizer.zero_grad()
    _clear_logs()
    _stop_timers(chunks, optimizer)
    if hasattr(random, "_unset_checkpointing"):  # from 0.16 on
        random._unset_checkpointing()
    machine = live_machine()
    if machine is not None:
        abandon(machine)


def drop_collectives(chunks: Sequence[Any]) -> None:
    """Drop the handles of the chunks' reductions and gathers in flight, without a wait.
    Such a collective may never end after a failure on some ranks only.

    A gather may have ended on some ranks only, so all ranks gather again before the next forward.
    """
    for chunk in chunks:
        for group in bucket_groups(chunk):
            group.grad_reduce_handle = None
            group.param_gather_handle = None
            group.param_gather_dispatched = False


def _forget_activations(chunk: Any) -> None:
    """Drop activations and expert choices that modules keep for later calls of the same window."""
    for module in chunk.modules():
        if hasattr(module, "pre_forward_comm"):
            reset_shared_experts(module)
        for name in ("embedding_activation_buffer", "grad_output_buffer"):
            deferred = getattr(module, name, None)
            if deferred is not None:
                deferred.clear()
        replay = getattr(module, "router_replay", None)
        if replay is not None:  # expert choices that a recomputation would have consumed
            replay.replay_backward_list = []


def _clear_logs() -> None:
    """Zero the auxiliary losses that layers add up for logging, on this rank.
    Losses of earlier windows that are not logged yet are zeroed, too.
    """
    logging = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    moe_utils = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    if logging is not None:  # from 0.18 on
        logging.get_moe_metrics_tracker().clear()
    elif moe_utils is not None:
        moe_utils.clear_aux_losses_tracker()
    for value in moe.layer_logs():
        value.zero_()


def _stop_timers(chunks: list[Any], optimizer: Any) -> None:
    training = sys.modules.get("megatron.training.global_vars")
    for timers in (
        *(get_model_config(chunk).timers for chunk in chunks),
        getattr(getattr(optimizer, "config", None), "timers", None),
        getattr(training, "_GLOBAL_TIMERS", None),
    ):
        for name, timer in getattr(timers, "_timers", {}).items():
            if name in WINDOW_TIMERS:
                # Not stop(), which would add the broken window's time to the earlier ones.
                timer._started = False
