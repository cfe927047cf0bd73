"""With overlap_param_gather and its forward pre-hooks off, an update is never gathered.

Symptom:
    The data-parallel ranks train on different parameters, without an error, drifting further apart
    with every step: in the first iteration of a `train()` that starts right after a step, and in
    every iteration of a caller that disabled the hooks and steps itself, as after an interrupted
    `train()` or evaluation. With `check_weight_hash_across_dp_replicas_interval`, `train()` ends
    with "Parameter hashes not matching across DP replicas" instead.

Cause:
    Under overlap_param_gather an optimizer step leaves the gather to the forward pre-hooks.
    `disable_forward_pre_hook(param_sync=False)` removes the hooks, and with them the pending
    gather.

Affects:
    Every release. What the patch does: if an update waits for its gather,
    `disable_forward_pre_hook` gathers it, for any value of `param_sync`; if an update came with the
    hooks off, the next forward of the chunk gathers it first, and also waits for gathers in flight.
    If no update waits, as at the entry of the first `train()`, there is no gather; nor is there one
    if the hooks are on again at the next forward, as in the second iteration of `train()`. The
    patch does not see a forward of the module inside of the chunk: call `ensure_params_synced`
    before it. MXFP8 parameters that share memory with the gradients
    (reuse_grad_buf_for_mxfp8_param_ag) are left alone: only the training loop can stage them.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/training.py, `train`,
    "Disable forward pre-hook to start training".

Remove when:
    an optimizer step with the hooks off gathers, and disabling them does not drop a gather.
    `upstream/pending-gather-dropped` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import gather
from megatron_idempotent.megatron.ddp import bucket_groups

from ._case import Original, Patch, address, bench, expect_agreement, target


def disable(
    original: Original, self: Any, param_sync: bool = True, *args: Any, **kwargs: Any
) -> None:
    """Run `disable_forward_pre_hook`, then the gathers that the hooks would have started.
    Without this a call with `param_sync=False` drops them.
    """
    original(self, param_sync, *args, **kwargs)
    if (
        not param_sync
        and any(gather.marked(group) for group in bucket_groups(self))
        and not gather.shares_memory_with_gradients(self)
    ):
        gather.gather(self)


def forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a chunk's forward: if its pre-hooks are off, first gather an update that is pending."""
    # Megatron-FSDP shares the method and has no such hooks.
    if getattr(self, "use_forward_hook", False) and not self.remove_forward_pre_hook_handles:
        _gather_behind_hooks(self)
    return original(self, *args, **kwargs)


def _gather_behind_hooks(chunk: Any) -> None:
    if gather.shares_memory_with_gradients(chunk) or not any(
        group.param_gather_handle is not None or gather.marked(group)
        for group in bucket_groups(chunk)
    ):
        return
    from megatron.core.transformer.cuda_graphs import is_graph_capturing

    # A graph must not contain the gather; upstream's hooks do nothing during a capture either.
    if not is_graph_capturing():
        gather.gather(chunk)


def reproduce() -> None:
    """Disable the forward pre-hooks right after a step, then run windows and a step.
    On stock Megatron the ranks' parameters then differ.
    """
    model = bench(overlap_param_gather=True)
    model.train_step(2, data_seed=0)
    for chunk in model.chunks:
        chunk.disable_forward_pre_hook(param_sync=False)
    model.forward_backward(2, data_seed=1)
    expect_agreement(model, "in a window with the hooks off")
    model.step()
    model.forward_backward(2, data_seed=2)
    expect_agreement(model, "in the next window with the hooks off")


PATCH = Patch(
    "with the forward pre-hooks off, ranks train on parameters that lack the last update",
    target("ddp.disable_forward_pre_hook", disable),
    target("chunk.forward", forward),
    target("distributed.step_with_ready_grads", gather.updating),
    target("group.start_param_sync", gather.start_param_sync),
    groups=("overlap",),
    fixed_by=(
        (
            address("distributed._copy_main_params_to_model_params"),
            "model_chunk.param_sync_pending = self.ddp_config.overlap_param_gather",
        ),
    ),
    provides=("gathers-watched",),
)
