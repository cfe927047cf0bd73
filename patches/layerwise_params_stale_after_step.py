"""With Muon's layer-wise optimizer and overlap_param_gather, steps reach no other rank, or late.

Symptom:
    What `params-stale-after-step`, `pending-gather-dropped`, `checkpoint-before-gather` and
    `params-exported-before-gather` say of the distributed optimizer, with
    `LayerWiseDistributedOptimizer`: after a forward-only pass between reduction and step, in a
    forward with the hooks off, in a checkpoint and in an export, the data-parallel ranks hold
    different parameters. No error.

Cause:
    Under overlap_param_gather the step leaves the gather to the forward pre-hooks, and these go by
    `param_gather_dispatched`, as there. The optimizer is a chain without a DistributedOptimizer,
    so that a watch on that one's step does not see it. Where it gathers by lists of parameters,
    `start_param_sync(force_sync=True)` moreover waits for a gather in flight and drops what came.

Affects:
    0.17 on, with dist_muon or use_layer_wise_distributed_optimizer, and overlap_param_gather. 0.16
    has the optimizer, whose step always gathers. What the patch does: its step waits for gathers in
    flight of what it is going to write, declares them outdated and marks the update as pending for
    the case files named above, which then act on it; a forced gather keeps what came. In ordinary
    training no collective is added or moved. With 0.17 `apply()` has to come before the optimizer
    is built, and warns where it did not.

    It was run on CPU ranks, with torch's AdamW in the place of Muon, and with Muon where
    `emerging-optimizers` is installed. By lists only equal sizes were run, as gloo gathers no
    others: two ranks, one bucket.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/optimizer/layer_wise_optimizer.py,
    `LayerWiseDistributedOptimizer.step_with_ready_grads`.

Remove when:
    `LayerWiseDistributedOptimizer`'s step resets the state of the gathers.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import gather

from ._case import Original, Patch, expect_agreement, target


def step(original: Original, self: Any) -> Any:
    """Mark groups whose gather is left to a forward as outdated, then run a chain's update."""
    gather.watch_layer_wise(self)
    for group in gather.deferred_groups(self):
        gather.outdate(group)
    return original(self)


def start(original: Original, self: Any, force_sync: bool = False) -> Any:
    """Start a group's gather; wait for one in flight so that its result is copied."""
    if force_sync and self.param_gather_handle is not None and gather.gathers_by_lists(self):
        gather.wait(self)
        return None
    return gather.start_param_sync(original, self, force_sync=force_sync)


def reproduce() -> None:
    """Run a forward-only pass before the step and one after it, with hooks on throughout."""
    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build(
        dtype="bf16",
        overlap_param_gather=True,
        layer_wise=True,
        distributed_optimizer=tiny.has_layout(),
    )
    model.forward_backward(2, data_seed=0)
    model.forward_backward(1, data_seed=1, forward_only=True)
    model.step()
    model.forward_backward(1, data_seed=2, forward_only=True)
    expect_agreement(model, "in a forward after a layer-wise step")


PATCH = Patch(
    "with Muon's layer-wise optimizer and overlapped gathers, a step is read before it is gathered",
    target("chained.step_with_ready_grads", step),
    target("layer_wise.set_bucket_layerwise_params_list", gather.remember_chunks),
    target("group.start_param_sync", start),
    since="0.17",
    # A gather by lists of parameters would erase the gradients, and the step would change nothing.
    given=("layerwise-gather-erases-gradients",),
    groups=("layer-wise",),
    provides=("layer-wise-gathers-watched", "list-gathers-watched"),
)
