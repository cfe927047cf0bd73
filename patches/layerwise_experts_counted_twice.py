"""Without data parallelism the layer-wise optimizer counts experts once for each of their replicas.

Symptom:
    With `LayerWiseDistributedOptimizer` (dist_muon), a tensor-parallel size larger than that of
    experts, and so few ranks that the other layers have no replica, the gradient norm is too large
    and clipping too strong, for all parameters. With TP 2 and replicated experts a small model has
    1.72 instead of 1.53, or 1.61 if the optimizer steps in DDP's buffers. Each replica holds the
    state of all experts. No error.

Cause:
    `shard_params` gives each replica some parameters, and the norm sums over all ranks. It returns
    early if the dense layers have no replica, but experts may have some. DDP still reduces a
    gradient only into one replica's part of its buffers, so that the others count gradients that
    were not reduced.

Affects:
    0.16 on, with lists of parameters or DDP's buffers. What the patch does: experts are distributed
    over their replicas, as upstream does if the dense layers also have replicas. Gradients,
    parameters and the norm are then those of the other optimizers, and the optimizer's state of
    experts is divided. If all layers have replicas, or none, nothing changes. Call `apply()` before
    you build the optimizer. Before 0.19 experts with EP 1 also need
    `experts-reduced-over-dense-ranks`, which marks them as experts.

Upstream:
    https://github.com/radixark/Megatron-LM/pull/82 repairs it in miles' fork; in
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/optimizer/layer_wise_optimizer.py
    `LayerWiseDistributedOptimizer.shard_params` still returns early.

Remove when:
    `shard_params` checks the replicas of experts before it returns.
    `upstream/layerwise-experts-counted-twice` has the repair.
"""

from __future__ import annotations

import math
from typing import Any

from ._case import Fault, Original, Patch, a_body_has, address, bench, target


def shard(original: Original, self: Any, optimizers: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the layer-wise `shard_params`: also shard experts if the dense layers have no replicas.
    In that case upstream divides no parameters among replicas.
    """
    original(self, optimizers, *args, **kwargs)
    groups = self.pg_collection
    if self.expt_dp_params_list is not None or groups.dp_cp.size() > 1 or groups.expt_dp.size() < 2:
        return
    layouts = args[0] if args else kwargs.get("full_param_layouts")
    if layouts is None:
        _deal(self, [group for part in optimizers for group in part.param_groups])
        return
    self._shard_params_from_layout(optimizers, layouts, 1, groups.expt_dp.size())
    self.dp_cp_params_list = None


def _deal(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    """Assign each expert parameter to one replica, in order of size, to balance the replicas.
    The replicas take turns in rank order, then in reverse order, and so on. Afterwards the experts'
    parameter groups have only the parameters of this replica.

    `shard_params` of 0.17.1 does the same with experts.
    """
    replicas = optimizer.pg_collection.expt_dp
    turns = [*range(replicas.size()), *reversed(range(replicas.size()))]
    experts = [group for group in groups if group.get("is_expert_parallel", False)]
    members = [(param, group) for group in experts for param in group["params"]]
    members.sort(key=lambda member: member[0].numel())
    dealt: list[list[Any]] = [[] for _ in range(replicas.size())]
    for group in experts:
        group["params"] = []
    for index, (parameter, group) in enumerate(members):
        owner = turns[index % len(turns)]
        dealt[owner].append(parameter)
        if owner == replicas.rank():
            group["params"].append(parameter)
    optimizer.expt_dp_params_list = dealt if members else None


#: Two ranks have one half of the dense layers each, and all experts.
_LAYOUT: dict[str, Any] = {
    "tp": 2,
    "ep": 1,
    "etp": 1,
    "experts": 2,
    "sequence_parallel": True,
    "overlap_grad_reduce": False,
    "dtype": "bf16",
}


def reproduce() -> None:
    """Compare the gradient norms of the layer-wise and the usual optimizer for the same gradients.
    On stock Megatron the layer-wise optimizer counts experts once per replica.
    """
    from megatron_idempotent.proof.cpu import tiny

    norms = []
    layer_wise = [
        {"layer_wise": True, "distributed_optimizer": layout}
        for layout in {False, tiny.has_layout()}
    ]
    for options in ({}, *layer_wise):
        model = bench(**_LAYOUT, **options)
        model.forward_backward(2, data_seed=0)
        _, norm, _ = model.step()
        norms.append(float(norm))
    right, *layer_wise_norms = norms
    # Sums of the same squares in a different order; float32 has 24 bits.
    wrong = [norm for norm in layer_wise_norms if not math.isclose(norm, right, rel_tol=1e-4)]
    if wrong:
        raise Fault(f"the gradient norm is {wrong[0]:.4g}, and {right:.4g} of another optimizer")


PATCH = Patch(
    "the layer-wise optimizer counts experts once for each replica where no other layer has one",
    target("layer_wise.shard_params", shard),
    since="0.16",
    # In miles' fork.
    fixed_when=a_body_has("dp_cp_size == 1 and expt_dp_size == 1"),
    fixed_by=(
        (address("layer_wise.shard_params"), "dp_cp_size == 1 and get_pg_size(self.expt_dp) == 1"),
    ),
    given=("experts-reduced-over-dense-ranks",),
)
