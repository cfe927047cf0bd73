"""The layer-wise optimizer lets replicas of several optimizer instances drift apart.

Symptom:
    With `LayerWiseDistributedOptimizer` (dist_muon) and `num_distributed_optimizer_instances` above
    1, each rank updates its parameters by the gradients of its own instance alone. On 0.18
    parameters differ between instances from the first steps on. No error.

Cause:
    The layer-wise optimizer distributes parameters over the data-parallel ranks of all instances,
    while DDP reduces gradients and gathers parameters within one instance.

Affects:
    0.18 and dev; before 0.18 DDP refuses several instances without the distributed optimizer. What
    the patch does: building the optimizer raises a `ValueError`, as 0.19 raises an
    `AssertionError`. With one instance nothing changes.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/6048 refuses it in 0.19.

Remove when:
    no supported release builds the optimizer over several instances.
"""

from __future__ import annotations

from typing import Any

from ._case import (
    Fault,
    Original,
    Patch,
    a_body_has,
    address,
    arguments,
    bench,
    target,
)

_SETTING = "num_distributed_optimizer_instances"


def init(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the layer-wise optimizer's constructor: raise `ValueError` for several instances.
    With several distributed-optimizer instances their parameters would drift apart.
    """
    groups = arguments(original, (self, *args), kwargs)["pg_collection"]
    instance = getattr(groups, "intra_dp_cp", None)
    if instance is not None and instance.size() < groups.dp_cp.size():
        raise ValueError(
            f"LayerWiseDistributedOptimizer has {groups.dp_cp.size()} data-parallel ranks and "
            f"{instance.size()} in an instance ({_SETTING}), so that instances would drift apart: "
            f"set {_SETTING} to 1"
        )
    original(self, *args, **kwargs)


def _built(instances: int) -> Any:
    """Return a tiny model with the layer-wise optimizer on `instances` optimizer instances.
    Their number is set by `num_distributed_optimizer_instances`.
    """
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(**{_SETTING: instances})
    return bench(
        layer_wise=True,
        distributed_optimizer=True,
        overlap_grad_reduce=False,
        dtype="bf16",
        ddp_overrides={_SETTING: instances},
    )


def _norm(instances: int) -> float:
    """Train one step on `instances` distributed-optimizer instances; return the gradient norm."""
    from megatron.core import parallel_state

    model = _built(instances)
    model.forward_backward(1, data_seed=0)
    _, norm, _ = model.step()
    parallel_state.destroy_model_parallel()
    return float(norm)


def reproduce() -> None:
    """Compare a step's gradient norm on one optimizer instance of four ranks and on two.
    On stock Megatron the norms differ: each instance has gradients of its own.
    """
    single = _norm(1)
    try:
        divided = _norm(2)
    except ValueError as refusal:
        if _SETTING not in str(refusal):
            raise
        return
    # Sums in a different order differ by a few units in the last of 24 bits.
    if abs(divided - single) > 1e-3 * single:
        raise Fault(
            f"gradients have the norm {divided:.4g} over two instances, {single:.4g} over one"
        )


def control() -> list[bytes]:
    """Train a step on one optimizer instance, as a control, and return the parameters' bytes."""
    model = _built(1)
    model.train_step(1, data_seed=0)
    return [model.bits()]


PATCH = Patch(
    "the layer-wise optimizer lets replicas of several optimizer instances drift apart",
    target("layer_wise.__init__", init, "self.shard_params"),
    since="0.18",
    before="0.19",
    came_with=(address("layer_wise.compute_full_param_layout"), ""),
    ranks=4,
    fixed_when=a_body_has("get_pg_size(intra_dp_cp) == get_pg_size(self.dp_cp)"),
)
