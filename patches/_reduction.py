"""What the case files about reducing gradients know of a chunk in Megatron's DDP.

A window's gradients are local until `finish_grad_sync` and reduced afterwards, until
`zero_grad_buffer`. Upstream keeps no record of which.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.engine.frozen import Record

from ._ddp import bucket_groups


class Reduced(Record):
    """What a chunk's gradients were when `finish_grad_sync` left them."""

    versions: tuple[int, ...]
    """torch's counters of writes in place, per gradient buffer."""
    counts: tuple[dict[Any, int], ...]
    """Registered gradients per bucket group; upstream keeps its first batch's."""


class Windows:
    """Whether chunks' gradients are reduced, kept on them under names of the patch that asks.

    `finished`, `entered_no_sync` and `began` belong into the wrappers of `finish_grad_sync`,
    `no_sync` and `zero_grad_buffer`.
    """

    def __init__(self, purpose: str) -> None:
        self._reduced = f"_megatron_idempotent_{purpose}"
        self._held = f"{self._reduced}_held"

    def reduced(self, chunk: Any) -> Reduced | None:
        """The chunk's gradients as `finish_grad_sync` left them; None before it in a window."""
        found: Reduced | None = getattr(chunk, self._reduced, None)
        return found

    def grown(self, chunk: Any) -> bool:
        """Whether gradients were added to reduced ones."""
        before = self.reduced(chunk)
        return before is not None and grown(chunk, before, held=getattr(chunk, self._held))

    def finished(self, chunk: Any) -> None:
        """All gradients are reduced now."""
        setattr(chunk, self._reduced, snapshot(chunk))
        setattr(chunk, self._held, False)

    def entered_no_sync(self, chunk: Any) -> None:
        """From here on hooks may have added gradients without registering them."""
        setattr(chunk, self._held, True)

    def began(self, chunk: Any) -> None:
        """A window whose gradients are not reduced."""
        setattr(chunk, self._reduced, None)


def snapshot(chunk: Any) -> Reduced:
    """The chunk's gradients as they are now."""
    return Reduced(
        versions=versions(chunk),
        counts=tuple(dict(registered(group)) for group in bucket_groups(chunk)),
    )


def grown(chunk: Any, before: Reduced, *, held: bool) -> bool:
    """Whether gradients were added since `before`.

    Args:
        held: whether `no_sync` was entered since, in which hooks register nothing.
    """
    written = versions(chunk) != before.versions or _replays(chunk.config)
    if not chunk.ddp_config.overlap_grad_reduce:
        return written
    # Clipping and scaling write too, so where hooks register gradients, these count.
    return (held and written) or any(
        group.grad_reduce_handle is not None or registered(group) != counts
        for group, counts in zip(bucket_groups(chunk), before.counts, strict=True)
    )


def _replays(config: Any) -> bool:
    """Whether CUDA graphs may write gradients, which torch's counters do not see."""
    return bool(
        getattr(config, "enable_cuda_graph", False)
        or getattr(config, "external_cuda_graph", False)
        or getattr(config, "cuda_graph_impl", "none") != "none"
    )


def registered(group: Any) -> dict[Any, int]:
    """How often each parameter's gradient came in armed backward passes since `reset`."""
    counts = getattr(group, "per_param_grad_ready_counts", None)
    # Releases before 0.16 keep a set, because they allow one gradient per parameter.
    return dict.fromkeys(group.params_with_grad, 1) if counts is None else counts


def drop_registered(group: Any) -> None:
    """Let the next gradients count anew."""
    if hasattr(group, "params_with_grad"):
        group.params_with_grad = set()
    else:
        group.per_param_grad_ready_counts = {}


def wait(chunk: Any) -> None:
    """Let the reductions in flight end; what they write is of no use any more."""
    for group in bucket_groups(chunk):
        if group.grad_reduce_handle is not None:
            group.grad_reduce_handle.wait()
            group.grad_reduce_handle = None


def name_of(chunk: Any, param: Any) -> str:
    """The parameter's name in the wrapped module, for messages."""
    names = (name for name, other in chunk.module.named_parameters() if other is param)
    return next(names, "?")


def backward(model: Any, *, data_seed: int) -> None:
    """For reproductions: one microbatch of a bench, past the schedules."""
    import torch

    from megatron_idempotent.cpu import tiny

    (chunk,) = model.chunks
    tokens_BT = next(tiny.microbatches(data_seed))
    positions_BT = torch.arange(tiny.SEQUENCE).expand(tiny.BATCH, -1)
    hidden = torch.ones(1, 1, tiny.SEQUENCE, tiny.SEQUENCE).tril() < 0.5
    chunk(tokens_BT, positions_BT, hidden, labels=tokens_BT).float().mean().backward()


def versions(chunk: Any) -> tuple[int, ...]:
    """torch's counters of writes in place into the gradient buffers, reductions included."""
    return tuple(
        tensor._version
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        for tensor in (buffer.grad_data, *getattr(buffer, "extra_main_grads", ()))
    )
