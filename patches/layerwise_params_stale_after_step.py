"""With Muon's layer-wise optimizer and overlap_param_gather, steps reach other ranks late or never.

Symptom:
    The same as in `params-stale-after-step`, `pending-gather-dropped`, `checkpoint-before-gather`
    and `params-exported-before-gather`, with `LayerWiseDistributedOptimizer` instead of the
    distributed optimizer: after a forward-only pass between reduction and step, in a forward with
    the hooks off, in a checkpoint and in an export, the data-parallel ranks hold different
    parameters. No error.

Cause:
    Under overlap_param_gather the step leaves the gather to the forward pre-hooks, which check
    `param_gather_dispatched`, as in those case files. The optimizer is a chain without a
    DistributedOptimizer, so that a patch of that class's step does not see it. If it gathers by
    lists of parameters, `start_param_sync(force_sync=True)` also waits for a gather in flight and
    drops its result.

Affects:
    0.17 on, with dist_muon or use_layer_wise_distributed_optimizer, and overlap_param_gather. 0.16
    has the optimizer too, but its step always gathers. What the patch does: the step waits for
    gathers in flight of parameters that it will write, marks them as outdated, and marks the update
    as pending for the case files named above, which then act on it; a forced gather keeps its
    result. In ordinary training no collective is added or moved. With 0.17 call `apply()` before
    you build the optimizer; otherwise it warns.

    It was tested on CPU ranks, with torch's AdamW instead of Muon, and with Muon if
    `emerging-optimizers` is installed. Gathers by lists were tested with equal sizes only, because
    gloo cannot gather others: two ranks, one bucket.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/optimizer/layer_wise_optimizer.py,
    `LayerWiseDistributedOptimizer.step_with_ready_grads`.

Remove when:
    `LayerWiseDistributedOptimizer`'s step resets the state of the gathers.
    `upstream/layerwise-params-stale-after-step` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import gather

from ._case import Original, Patch, address, expect_agreement, target


def step(original: Original, self: Any) -> Any:
    """Wrap a layer-wise optimizer's update: mark its parameters for a gather by the next forward.
    The marks are set before the update runs.
    """
    gather.watch_layer_wise(self)
    for group in gather.deferred_groups(self):
        gather.outdate(group)
    return original(self)


def start(original: Original, self: Any, force_sync: bool = False) -> Any:
    """Wrap a bucket group's `start_param_sync`, which starts a gather, or waits for one in flight.
    With `force_sync`, only wait for a gather of lists of parameters that is in flight. In all other
    cases run upstream's function; unless it only waited, clear the group's mark.
    """
    if force_sync and self.param_gather_handle is not None and gather.gathers_by_lists(self):
        gather.wait(self)
        return None
    return gather.start_param_sync(original, self, force_sync=force_sync)


def reproduce() -> None:
    """Run a forward-only pass before a layer-wise step and one after it, with overlapped gathers.
    On stock Megatron the ranks' parameters differ in the second pass.

    A gather by lists of parameters erases the gradients of the first pass. The step still moves the
    parameters, by the moments of an earlier step.
    """
    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build(
        dtype="bf16",
        overlap_param_gather=True,
        layer_wise=True,
        distributed_optimizer=tiny.has_layout(),
    )
    model.train_step(1, data_seed=3)
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
    fixed_by=(
        (
            address("layer_wise.step_with_ready_grads"),
            "model_chunk.reset_param_sync_dispatch_state()",
        ),
    ),
    groups=("layer-wise",),
    provides=("layer-wise-gathers-watched", "list-gathers-watched"),
)
