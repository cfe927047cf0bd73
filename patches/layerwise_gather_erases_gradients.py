"""A forward between reduction and a layer-wise step sets the gradients to zero.

Symptom:
    With `LayerWiseDistributedOptimizer` and overlap_param_gather, a forward-only pass between the
    gradients' reduction and `optimizer.step()` (log-probs, a KL term, an evaluation) sets all
    gradients to zero. The step succeeds and reports a gradient norm of 0.0: the window is lost, and
    weight decay and momentum move the parameters. The ranks agree, so that no check of replicas
    notices. `zero_grad_buffer()` after a step and `start_param_sync()` zeroes the gathered
    parameters that have arrived by then, which depends on timing: the ranks differ.

Cause:
    If the optimizer gathers by lists of parameters, the gather uses the gradient buffer as its
    receive buffer and zeroes it afterwards. Reducing the gradients marks the parameters as
    outdated, so that the next forward gathers, though no parameter was updated.

Affects:
    0.18 and 0.19, with `--no-use-layer-wise-param-layout`, which upstream's own error recommends
    for some models with experts, and in custom loops that wrap the model without a layout; 0.17
    gathers into separate memory. What the patch does: while reduced gradients wait for their step,
    a bucket group of such an optimizer is gathered only if it has an update pending; otherwise its
    parameters are current. Not covered: a forced gather between two microbatches of a window; a
    second step on the same gradients, or one on those of an aborted window, with a gather in
    between; and `ensure_params_synced` without any of the patches, which gathers on every call.

    It was tested with equal sizes only, because gloo cannot gather others: two ranks, one bucket;
    with torch's AdamW instead of Muon, and with Muon if `emerging-optimizers` is installed.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/param_and_grad_buffer.py,
    `start_param_sync`, "Reuse grad_data as the all_gather receive buffer; it is idle during
    forward".

Remove when:
    the gather has its own receive buffer, or no gather is dispatched while gradients wait.
    `upstream/layerwise-gather-erases-gradients` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import gather
from megatron_idempotent.megatron.ddp import bucket_groups

from ._case import Fault, Original, Patch, address, bench, target


def finish_grad_sync(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Finish a bucket group's reduction. If the group gathers lists of whole parameters, also
    record that its gradients wait for an optimizer step.
    """
    result = original(self, *args, **kwargs)
    if gather.gathers_by_lists(self):
        gather.hold_gradients(self, True)
    return result


def zero_grad_buffer(original: Original, self: Any) -> None:
    """Wait for a chunk's parameter gathers into the gradients' memory, then zero the gradients."""
    import torch

    for group in bucket_groups(self):
        gather.hold_gradients(group, False)
        if group.param_gather_handle is not None and gather.gathers_by_lists(group):
            with torch.no_grad():
                gather.wait(group)
    original(self)


def step(original: Original, self: Any) -> Any:
    """Wrap a layer-wise optimizer's update: record that no gradients wait for it any more.
    Gathers may then overwrite them. The bucket groups are also marked for a new gather.
    """
    for group in gather.deferred_groups(self):
        if gather.gathers_by_lists(group):
            gather.hold_gradients(group, False)
            gather.outdate(group)
    return original(self)


def start(original: Original, self: Any, force_sync: bool = False) -> Any:
    """Start a bucket group's gather, unless it would overwrite gradients that wait for a step."""
    if (
        gather.holds_gradients(self)
        and not gather.marked(self)
        and self.param_gather_handle is None
    ):
        self.param_gather_dispatched = True
        return None
    return gather.start_param_sync(original, self, force_sync=force_sync)


def reproduce() -> None:
    """Run a forward-only pass between a window's reduction and its layer-wise step.
    On stock Megatron the pass's gathers zero the gradients.
    """
    model = bench(
        dtype="bf16", overlap_param_gather=True, layer_wise=True, distributed_optimizer=False
    )
    model.forward_backward(2, data_seed=0)
    reduced = model.gradients()
    model.forward_backward(1, data_seed=1, forward_only=True)
    if not model.gradients().equal(reduced):
        norm = float(model.gradients().norm())
        raise Fault(
            f"a forward-only pass changed the gradients: their norm was {float(reduced.norm()):.3f}"
            f" and is {norm:.3f}"
        )


PATCH = Patch(
    "with Muon's layer-wise optimizer, a forward between reduction and step zeroes the gradients",
    target("group.start_param_sync", start),
    target("group.finish_grad_sync", finish_grad_sync),
    target("ddp.zero_grad_buffer", zero_grad_buffer),
    target("chained.step_with_ready_grads", step),
    target("layer_wise.set_bucket_layerwise_params_list", gather.remember_chunks),
    since="0.18",
    came_with=(address("group.start_param_sync"), "bucket.grad_data.view(param_dtype)"),
    fixed_by=(
        (
            address("group.start_param_sync"),
            "torch.empty(total_gather_size, dtype=param_dtype, device=bucket.grad_data.device)",
        ),
    ),
    groups=("layer-wise",),
    provides=("list-gathers-watched",),
)
