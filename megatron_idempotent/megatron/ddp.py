"""Tracks `no_sync` contexts and gradient reductions of chunks in Megatron's DDP.

With overlap_grad_reduce every gradient passes `register_grad_ready` of its bucket group; inside of
`no_sync` that call does nothing. Upstream does not record which reductions were dispatched: the
handle is None again after the wait, and with several distributed-optimizer instances a reduction
has no handle.

A window's gradients are local until `finish_grad_sync` and reduced afterwards, until
`zero_grad_buffer`. Upstream does not record which of the two they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ContextDecorator
from functools import partial
from typing import Any


def is_no_sync_of(installed: Any, chunks: Sequence[Any]) -> bool:
    """Return whether `installed`, a `no_sync_func`, consists of the `no_sync` methods of `chunks`.
    It must be one bound method per chunk, in the chunks' order.

    The `no_sync` attribute of a Megatron-FSDP wrapper is that of the module inside of it.
    """
    functions = installed if isinstance(installed, (list, tuple)) else [installed]
    return len(functions) == len(chunks) and all(
        getattr(function, "__name__", None) == "no_sync"
        and any(function.__self__ is owner for owner in (chunk, getattr(chunk, "module", chunk)))
        for function, chunk in zip(functions, chunks, strict=True)
    )


def innermost(chunk: Any) -> Any:
    """Return a chunk's module without its wrappers, such as DDP and `Float16Module`."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def bucket_groups(chunk: Any) -> list[Any]:
    """Return all bucket groups of a chunk in Megatron's DDP, dense ones before those of experts.

    The list is empty for a module without a wrapper.
    """
    return [
        *getattr(chunk, "bucket_groups", ()),
        *getattr(chunk, "expert_parallel_bucket_groups", ()),
    ]


def forget_first_window(group: Any) -> None:
    """Clear the gradient counts that a bucket group records in its first batch.
    The next batch then is recorded as the first. After the first batch this does nothing.
    """
    if group.is_first_batch:
        group.per_param_grad_ready_counts = {}


def drain(group: Any) -> None:
    """Wait for a bucket group's gradient reduction in flight, if there is one.
    For a reduction without a handle the current CUDA stream waits, not the host.
    """
    handle = group.grad_reduce_handle
    if handle is not None:
        group.grad_reduce_handle = None
        handle.wait()
    elif (
        group.ddp_config.num_distributed_optimizer_instances > 1
        and group.communication_stream is not None
    ):
        import torch

        # Without a handle the streams are ordered, as upstream does; the host does not wait.
        torch.cuda.current_stream().wait_stream(group.communication_stream)


#: Attribute of a chunk: a list with the number of open `no_sync` contexts that were entered since
#: its gradients were zeroed; zeroing sets it to None.
_ENTRIES = "_megatron_idempotent_no_sync"


class NoSync(ContextDecorator):
    """Context that DDP's `no_sync()` returns in place of upstream's generator.
    It prevents gradient reductions until it exits. It also ends if it is garbage-collected without
    an exit.

    The schedules drop it that way at the end of a forward-only pass.
    """

    def __init__(self, chunk: Any) -> None:
        self._chunk = chunk
        self._entries: list[int] | None = None

    def _recreate_cm(self) -> NoSync:
        return NoSync(self._chunk)

    def __enter__(self) -> None:
        if self._entries is not None:
            raise RuntimeError(
                "this no_sync() context was entered twice: call ddp.no_sync() for each entry"
            )
        entries = getattr(self._chunk, _ENTRIES, None)
        if entries is None:
            entries = [0]
            setattr(self._chunk, _ENTRIES, entries)
        entries[0] += 1
        self._entries = entries
        _arm(self._chunk, False)

    def __exit__(self, *exception: object) -> None:
        entries, self._entries = self._entries, None
        if entries is None:
            return
        entries[0] -= 1
        current = getattr(self._chunk, _ENTRIES, None)
        # A context of an earlier window must not end one that a later window has entered.
        if current is None or current[0] == 0:
            _arm(self._chunk, True)

    def __del__(self) -> None:
        self.__exit__()


def _arm(chunk: Any, armed: bool) -> None:
    if hasattr(chunk, "grad_reduce_pipeline"):  # a MegatronFSDP
        chunk.is_last_microbatch = armed
    for group in bucket_groups(chunk):
        group.is_last_microbatch = armed


def no_sync(original: Callable[..., Any], self: Any) -> NoSync:
    """Wrap DDP's `no_sync`: return a `NoSync` of the chunk instead of upstream's generator."""
    # The result is not used; the call runs the wrappers of other case files.
    original(self)
    return NoSync(self)


def zero_grad_buffer(original: Callable[..., None], self: Any) -> None:
    """Wrap `zero_grad_buffer`: detach the chunk's open `no_sync` contexts, then zero gradients.
    A detached context that exits late does not end a `no_sync` of the next step.
    """
    setattr(self, _ENTRIES, None)
    original(self)


_WATCHES = "_megatron_idempotent_watches"
_DISPATCHED = "_megatron_idempotent_dispatched"
_POSTPONED = "_megatron_idempotent_postponed"
_LATE = "late"


def watch(group: Any, purpose: str) -> None:
    """Begin to record the first parameter of `group` whose gradient becomes ready from now on.
    `purpose` is the record's name: `arrived(group, purpose)` returns the parameter.
    """
    vars(group).setdefault(_WATCHES, {})[purpose] = None
    if not _is_hooked(group):
        # Set on the instance and removed after the first gradient: a wrapper of the method would
        # run once per parameter and microbatch.
        group.register_grad_ready = partial(_register, group, group.register_grad_ready)


def arrived(group: Any, purpose: str) -> Any:
    """Return the first parameter of a bucket group whose gradient became ready since `watch`.
    None if none did. `purpose` is the one given to `watch`.
    """
    return vars(group).get(_WATCHES, {}).get(purpose)


def unwatch(group: Any, purpose: str) -> None:
    """End what `watch(group, purpose)` began: stop recording, and drop the recorded parameter."""
    watches = vars(group).get(_WATCHES, {})
    watches.pop(purpose, None)
    if not watches and _is_hooked(group):
        del group.register_grad_ready


def _is_hooked(group: Any) -> bool:
    hook = vars(group).get("register_grad_ready")
    return isinstance(hook, partial) and hook.func is _register


def _register(
    group: Any, beneath: Callable[..., None], param: Any, *args: Any, **kwargs: Any
) -> None:
    watches = getattr(group, _WATCHES)
    for purpose, first in watches.items():
        watches[purpose] = param if first is None else first
    if _is_hooked(group):  # else other code has wrapped the hook, and removes it
        del group.register_grad_ready
    beneath(param, *args, **kwargs)


def dispatching(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap a bucket group's `start_grad_sync`: run it, then watch for gradients that come later.
    This is done with overlap_grad_reduce only. `late(group)` then returns the first parameter whose
    gradient came after the reduction was dispatched.
    """
    original(self, *args, **kwargs)
    if self.ddp_config.overlap_grad_reduce and not vars(self).get(_POSTPONED, False):
        if not vars(self).get(_DISPATCHED, False):
            watch(self, _LATE)
        setattr(self, _DISPATCHED, True)


def postpone(group: Any, postponed: bool) -> None:
    """Store on a bucket group whether a patch postpones its `start_grad_sync` calls from now on.
    While `postponed` is True, `dispatching` does not record those calls as dispatched reductions.
    """
    setattr(group, _POSTPONED, postponed)


def dispatched(group: Any) -> bool:
    """Return whether a bucket group's overlapped reduction is dispatched and not finished."""
    return vars(group).get(_DISPATCHED, False) or group.grad_reduce_handle is not None


def late(group: Any) -> Any:
    """Return the first parameter whose gradient became ready after its group's reduction began.
    Return None if no gradient of this bucket group came too late.
    """
    return arrived(group, _LATE)


def ended(chunk: Any) -> None:
    """Clear a chunk's records of dispatched reductions and of gradients that came too late.
    Patches call it when the reductions are finished, or the gradients are zeroed.
    """
    for group in bucket_groups(chunk):
        setattr(group, _DISPATCHED, False)
        unwatch(group, _LATE)


#: Attributes of bucket groups for `replica_check`: the number of reductions in this window, and
#: whether all ranks have the parameters of the latest step.
REDUCTIONS = "_megatron_idempotent_reductions"
GATHERED = "_megatron_idempotent_gathered"
_REDUCED = "_megatron_idempotent_reduced"


def reduced(chunk: Any) -> tuple[int, ...] | None:
    """Return the version counters (see `versions`) that a chunk's gradients had when last reduced.
    None if they were not reduced since they were zeroed.
    """
    recorded: tuple[int, ...] | None = getattr(chunk, _REDUCED, None)
    return recorded


def grown(chunk: Any) -> bool:
    """Return whether a chunk's gradients changed, or are reduced again, after they were reduced.
    With overlap_grad_reduce they changed if a gradient became ready; without, if a gradient buffer
    was written. Return False if the gradients were not reduced since they were zeroed.
    """
    reduced_versions = reduced(chunk)
    if reduced_versions is None:
        return False
    if chunk.ddp_config.overlap_grad_reduce:
        return any(
            arrived(group, _REDUCED) is not None or dispatched(group)
            for group in bucket_groups(chunk)
        )
    # Without overlap hooks do not register gradients, so clipping and scaling count as new ones.
    return versions(chunk) != reduced_versions or _replays(chunk.config)


def is_idle(chunk: Any) -> bool:
    """Return whether all gradients of a chunk are reduced, and none was added since."""
    return reduced(chunk) is not None and not grown(chunk)


def finished(chunk: Any) -> None:
    """Record that all gradients of a chunk are reduced.
    Patches call it when a reduction of the chunk has finished.
    """
    setattr(chunk, _REDUCED, versions(chunk))
    ended(chunk)
    if chunk.ddp_config.overlap_grad_reduce:
        for group in bucket_groups(chunk):
            watch(group, _REDUCED)


def began(chunk: Any) -> None:
    """Record that a chunk's gradients were zeroed, so that none of them is reduced now.
    Patches call it after `zero_grad_buffer`.
    """
    setattr(chunk, _REDUCED, None)
    ended(chunk)
    for group in bucket_groups(chunk):
        unwatch(group, _REDUCED)


def _replays(config: Any) -> bool:
    """Return whether a model with this config may replay CUDA graphs that write gradients.
    Torch's version counters do not see such writes.
    """
    return bool(
        getattr(config, "enable_cuda_graph", False)
        or getattr(config, "external_cuda_graph", False)
        or getattr(config, "cuda_graph_impl", "none") != "none"
    )


def registered(group: Any) -> dict[Any, int]:
    """Return parameter → number of gradients registered since the bucket group's last `reset()`.
    Backwards inside of `no_sync` register none.
    """
    counts = getattr(group, "per_param_grad_ready_counts", None)
    # Releases before 0.16 keep a set, because they allow one gradient per parameter.
    return dict.fromkeys(group.params_with_grad, 1) if counts is None else counts


def drop_registered(group: Any) -> None:
    """Clear a bucket group's counts of registered gradients, which `registered` returns."""
    if hasattr(group, "params_with_grad"):
        group.params_with_grad = set()
    else:
        group.per_param_grad_ready_counts = {}


def start_held(chunk: Any, *args: Any, **kwargs: Any) -> None:
    """Dispatch the gradient reductions of a chunk that `no_sync` has prevented.
    `finish_grad_sync` can then wait for them.

    It does nothing in a first batch: there `finish_grad_sync` dispatches by itself, and would
    dispatch a reduction without a handle a second time.
    """
    for group in bucket_groups(chunk):
        if not getattr(group, "is_first_batch", False):
            group.start_grad_sync(*args, **kwargs)


def wait(chunk: Any) -> None:
    """Wait for a chunk's gradient reductions in flight, and drop their handles.
    Call it when the gradients will not be used.
    """
    for group in bucket_groups(chunk):
        if group.grad_reduce_handle is not None:
            group.grad_reduce_handle.wait()
            group.grad_reduce_handle = None


def name_of(chunk: Any, param: Any) -> str:
    """Return the name of a parameter in the module that a chunk wraps; "?" if it is not there."""
    names = (name for name, parameter in chunk.module.named_parameters() if parameter is param)
    return next(names, "?")


def gradients(chunk: Any) -> list[Any]:
    """Return one list of all gradient tensors of a chunk in DDP.
    It has each buffer's flat gradient, followed by that buffer's `extra_main_grads`, if there are
    any.
    """
    return [
        tensor
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        for tensor in (buffer.grad_data, *getattr(buffer, "extra_main_grads", ()))
    ]


def trained(chunk: Any) -> list[Any]:
    """Return tensors that together hold a chunk's trained parameters.
    They are DDP's flat parameter buffers if all of these are floating-point, else the parameters.

    Flat buffers include padding, whose values are arbitrary.
    """
    flat = [buffer.param_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    all_flat = all(data is not None and data.is_floating_point() for data in flat)
    return flat if all_flat else list(chunk.param_to_bucket_group)


def bits(chunk: Any) -> Any:
    """Return a checksum of a chunk's gradients: the sum of their bytes, read as 64-bit integers.

    It is on the gradients' device, and the host does not wait. It is 0 if all gradients are zero,
    or if there are none.
    """
    import torch

    total: Any = 0
    for tensor in gradients(chunk):
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        total = total + flat[: len(flat) // 8 * 8].view(torch.int64).sum()
    return total


def versions(chunk: Any) -> tuple[int, ...]:
    """Return torch's version counters of a chunk's gradient buffers; in-place writes raise them."""
    return tuple(tensor._version for tensor in gradients(chunk))


def reducing_on_host(chunks: Iterable[Any]) -> int | None:
    """Count the gradients that are registered in those bucket groups of these chunks whose
    reduction runs on CPU tensors at present; return None if there is no such group.

    gloo writes the reduced gradients in a thread, which raises their version counters at any time
    until `finish_grad_sync`; NCCL's are raised when a reduction starts. `zero_grad_buffer` drops
    what has registered.
    """
    groups = [
        group
        for chunk in chunks
        for group in bucket_groups(chunk)
        if group.grad_reduce_handle is not None
        and any(bucket.grad_data.device.type == "cpu" for bucket in group.buckets)
    ]
    return sum(len(registered(group)) for group in groups) if groups else None


def checked_chunks(
    caller: str,
    model_chunks: Any,
    optimizer: Any,
    *,
    or_in: Callable[[Any], bool] = lambda chunk: False,
) -> list[Any]:
    """Return `model_chunks` as a list.
    Raise `ValueError` unless each chunk is in Megatron's DDP, and `optimizer` is Megatron's or
    None.

    Chunks have to be in Megatron's DDP, or in a wrapper for which `or_in` is true. `caller` is the
    function that error messages name. Call it before any change, so that an error leaves the model
    as it was.

    Raises:
        ValueError: there is no chunk, a chunk has no such wrapper, or the optimizer is not
            Megatron's.
    """
    if hasattr(model_chunks, "named_modules") or not isinstance(model_chunks, Iterable):
        raise ValueError(
            f"{caller} got a {type(model_chunks).__name__}: pass the list of this rank's "
            "chunks, even if there is only one"
        )
    chunks = list(model_chunks)
    if not chunks:
        raise ValueError(f"{caller} got no model chunk: pass the list that DDP wrapped")
    for chunk in chunks:
        in_ddp = hasattr(chunk, "bucket_groups") and hasattr(chunk, "zero_grad_buffer")
        if not in_ddp and not or_in(chunk):
            raise ValueError(
                f"{caller} got a {type(chunk).__name__}, which has no bucket groups: pass "
                "the chunks wrapped in megatron.core.distributed.DistributedDataParallel, not what "
                "is inside of them"
            )
    if optimizer is not None and not hasattr(optimizer, "step_with_ready_grads"):
        raise ValueError(
            f"{caller} got a {type(optimizer).__name__} as optimizer, which has no "
            "step_with_ready_grads: pass what get_megatron_optimizer() returned, or None"
        )
    return chunks
