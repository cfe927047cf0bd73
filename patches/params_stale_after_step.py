"""With overlap_param_gather parameters may never be gathered after an optimizer step.

Symptom:
    After a forward-only pass between the gradients' reduction and `optimizer.step()` (log-probs, a
    KL term, an evaluation) every later forward, even in training, reads parameters that lack the
    last update, except for each rank's own shard: the data-parallel ranks hold different models. No
    error. If a forward does not use a parameter, its gather can still be in flight when the
    optimizer writes the memory that it reads.

Cause:
    `param_gather_dispatched` says that the gathered parameters are current. It is reset when
    gradients are finished (`finish_grad_sync`), not when parameters change. A forward in between
    gathers the old parameters and sets it again.

Affects:
    Every release, with the distributed optimizer and overlap_param_gather. What the patch does: a
    step first waits for gathers in flight of the parameters that it will write, then marks them as
    not gathered. In ordinary training no gather is in flight then: no collective is added or moved.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/param_and_grad_buffer.py,
    `finish_grad_sync`.

Remove when:
    `DistributedOptimizer.step_with_ready_grads` resets the state of the gathers.
    `upstream/params-stale-after-step` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import gather

from ._case import Original, Patch, address, bench, expect_agreement, target


def step(original: Original, self: Any) -> Any:
    """Wrap an optimizer's update: mark the bucket groups that it writes as not gathered.
    First wait for gathers in flight.
    """
    for group in gather.owned_groups(self):
        if group.param_gather_handle is not None:
            # Only wait: the gathered values are about to be overwritten.
            group.param_gather_handle.wait()
            group.param_gather_handle = None
        # Before the call, because without overlap_param_gather upstream gathers inside of it.
        group.param_gather_dispatched = False
    return gather.updating(original, self)


def reproduce() -> None:
    """Run a forward-only pass before a step and one after it, with overlap_param_gather.
    On stock Megatron the second pass reads parameters without the step's update.
    """
    model = bench(overlap_param_gather=True)
    model.forward_backward(2, data_seed=0)
    model.forward_backward(1, data_seed=1, forward_only=True)
    model.step()
    model.forward_backward(1, data_seed=2, forward_only=True)
    expect_agreement(model, "in a hooked forward after the step")


PATCH = Patch(
    "a forward between reduction and step makes the step's update reach no other rank",
    target("distributed.step_with_ready_grads", step),
    target("group.start_param_sync", gather.start_param_sync),
    groups=("overlap",),
    fixed_by=(
        (
            address("distributed.step_with_ready_grads"),
            "model_chunk.reset_param_sync_dispatch_state()",
        ),
    ),
    provides=("gathers-watched",),
)
