"""The first window decides for ever when gradients are reduced, even if it was never finished.

Symptom:
    After a first window that was aborted in its last backward, or that left some parameters of a
    bucket unused (a text-only first batch): a bare `AssertionError` from every later
    `zero_grad_buffer()`, in `assert len(self.per_param_grad_ready_counts) == len(self.params)`. If
    the abort came after every parameter of a bucket had one gradient, but a complete window gives
    some of them two (tied weights, several backward calls): no error, but all later windows reduce
    that bucket too early, and gradients are wrong.

Cause:
    With overlap_grad_reduce a bucket group counts in its first window how often each parameter's
    gradient becomes ready; `reset()` then takes these counts as golden: whenever a later window
    reaches them, the reduction starts. `reset()` does not check whether the window was finished,
    and asserts if some parameters have no count.

Affects:
    0.16 on. What the patch does: `zero_grad_buffer()` drops the counts of a first window in which a
    bucket group was not reduced by `finish_grad_sync()`, or in which some of its parameters had no
    gradient. The next window then counts as the first, and reduces at its end, exactly. All bucket
    groups of a chunk learn from the same window, so that ranks start their reductions in the same
    order. Unchanged: a later window that leaves out parameters with counts still ends in upstream's
    "Communication call has not been issued". No rank can repair that alone: if the other ranks used
    those parameters, their reductions come in a different order. All ranks have to use the same
    parameters, as upstream requires.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/param_and_grad_buffer.py,
    `_ParamAndGradBucketGroup.reset`.

Remove when:
    `reset()` takes the counts of finished and complete windows only.
    `upstream/first-window-aborted` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import ddp

from ._case import Original, Patch, abort_in_backward, address, bench, expect_gradients, target

_REDUCED = "_megatron_idempotent_first_window_reduced"


def finish_grad_sync(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap a bucket group's `finish_grad_sync`: record that its first window was reduced."""
    original(self, *args, **kwargs)
    if self.is_first_batch:
        setattr(self, _REDUCED, True)


def zero_grad_buffer(original: Original, self: Any) -> None:
    """Wrap `zero_grad_buffer`: drop the gradient counts of a first window that was not complete.
    A window is complete if all bucket groups with counts were reduced, with all their parameters.
    """
    learning = [
        group
        for group in (*self.bucket_groups, *self.expert_parallel_bucket_groups)
        if group.is_first_batch
    ]
    if learning:
        _drop_what_is_unfinished(learning)
    original(self)


def _drop_what_is_unfinished(groups: list[Any]) -> None:
    counting = [group for group in groups if group.per_param_grad_ready_counts]
    complete = all(
        getattr(group, _REDUCED, False)
        and len(group.per_param_grad_ready_counts) == len(group.params)
        for group in counting
    )
    for group in groups:
        setattr(group, _REDUCED, False)
        if not complete:
            ddp.forget_first_window(group)


def reproduce() -> None:
    """Interrupt the backward of the very first window, then run three windows.
    On stock Megatron the later windows assert, or their gradients are wrong.
    """
    import torch

    expected = bench()
    expected.forward_backward(1, data_seed=0)
    model = bench()
    abort_in_backward(model, torch.Tensor.register_hook)
    for _ in range(3):  # the second learns, the third reduces in its backward
        expect_gradients(model, expected.gradients())


PATCH = Patch(
    "a first window that was aborted, or left parameters unused, breaks all later ones",
    target("ddp.zero_grad_buffer", zero_grad_buffer),
    target("group.finish_grad_sync", finish_grad_sync),
    since="0.16",
    came_with=(address("group.__init__"), "self.is_first_batch = True"),
    groups=("overlap", "abort"),
    fixed_by=(
        (
            address("group.reset"),
            "self.is_first_batch and self.grad_reduce_finished "
            "and len(self.per_param_grad_ready_counts) == len(self.params)",
        ),
    ),
    stock_error=r"AssertionError",
    loudness="both",
)
