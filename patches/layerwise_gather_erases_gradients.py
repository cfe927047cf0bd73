"""A forward between reduction and a layer-wise step sets the gradients to zero.

Symptom:
    With `LayerWiseDistributedOptimizer` and overlap_param_gather, a forward-only pass between the
    gradients' reduction and `optimizer.step()` (log-probs, a KL term, an evaluation) leaves
    gradients of zero. The step succeeds and reports a gradient norm of 0.0: the window is lost, and
    weight decay and momentum move the parameters. The ranks agree, so that no check of replicas
    notices. `start_param_sync()` after a step, and then `zero_grad_buffer()`, zeroes what the
    gather has brought so far, as the machine's timing has it: the ranks differ.

Cause:
    Where the optimizer gathers by lists of parameters, the gather takes the gradient buffer for its
    receive buffer and zeroes it after. Reducing the gradients declares the parameters outdated, so
    that the next forward gathers, though nothing was updated.

Affects:
    0.18 and 0.19, with `--no-use-layer-wise-param-layout`, to which upstream's own error sends
    some models with experts, and in loops of one's own that wrap the model without a layout; 0.17
    gathers into memory of its own. What the patch does: while reduced gradients wait for their
    step, a bucket group of such an optimizer without an update pending is not gathered, since its
    parameters are current. Not covered: a forced gather between two microbatches of a window; a
    second step on the same gradients, or one on those of an aborted window, with a gather in
    between; and `ensure_params_synced` where none of the patches is applied, which gathers on
    every call.

    Only equal sizes were run, as gloo gathers no others: two ranks, one bucket; with torch's AdamW
    in the place of Muon, and with Muon where `emerging-optimizers` is installed.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/param_and_grad_buffer.py,
    `start_param_sync`, "Reuse grad_data as the all_gather receive buffer; it is idle during
    forward".

Remove when:
    the gather has a receive buffer of its own, or none is dispatched while gradients wait.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import gather
from megatron_idempotent.megatron.ddp import bucket_groups

from ._case import Fault, Original, Patch, address, bench, target


def finish_grad_sync(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Finish a bucket group's reduction, and note that its gradients wait for a step."""
    result = original(self, *args, **kwargs)
    if gather.gathers_by_lists(self):
        gather.hold_gradients(self, True)
    return result


def zero_grad_buffer(original: Original, self: Any) -> None:
    """Wait for gathers into the gradients' memory, then zero the gradients."""
    import torch

    for group in bucket_groups(self):
        gather.hold_gradients(group, False)
        if group.param_gather_handle is not None and gather.gathers_by_lists(group):
            with torch.no_grad():
                gather.wait(group)
    original(self)


def step(original: Original, self: Any) -> Any:
    """Note that no gradient waits any more, then run a chain's update."""
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
    """Run a forward-only pass between reduction and step."""
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
    groups=("layer-wise",),
    provides=("list-gathers-watched",),
)
