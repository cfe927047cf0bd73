"""A model that was deleted is never freed, if it has experts or fp32 parameters.

Symptom:
    After `del model, optimizer` and `gc.collect()` all memory of the model is still allocated: its
    parameters, its gradient buffers and all modules. A process that builds its model again, for
    another stage, after a failure or in a test, ends in
    `torch.OutOfMemoryError: CUDA out of memory`. One MoE layer that has run is enough, or, under
    the distributed optimizer, one parameter in fp32, as state space models have.

Cause:
    DDP's hook is on the graph node that accumulates a parameter's gradient, and refers to DDP.
    Python's collector sees this cycle only while no other object refers to the node. But the MoE
    layers' dispatchers keep `probs` of the last microbatch with its graph, which contains the node;
    and the distributed optimizer's shard of an fp32 parameter is `model_param.view(-1)[start:end]`,
    without the `detach()` of the half-precision branch.

Affects:
    Every release. What the patch does: when a schedule ends, even by an exception, it detaches the
    tensors that its model's dispatchers keep. The optimizer's shards are also detached. Both keep
    their memory.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/optimizer/distrib_optimizer.py,
    `_build_model_and_main_param_groups`;
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/transformer/moe/token_dispatcher.py

Remove when:
    dispatchers keep no tensor with a graph after the forward, and shards of fp32 parameters are
    detached. `upstream/model-never-freed` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import schedules

from ._case import Fault, Original, Patch, address, bench, schedule_targets, target


def build(
    original: Original,
    cls: Any,
    gbuf_ranges: Any,
    param_gbuf_map: Any,
    opt_group_ranges: Any,
    config: Any,
) -> Any:
    """Wrap the building of the distributed optimizer's shards: detach shards of fp32 parameters.
    Otherwise the shards keep the autograd graph, and with it the model, in memory.
    """
    groups = original(cls, gbuf_ranges, param_gbuf_map, opt_group_ranges, config)
    shard_fp32_groups = groups[3]
    for shards, group_range in zip(shard_fp32_groups, opt_group_ranges, strict=True):
        detached = {}
        for index, shard in enumerate(shards):
            shards[index] = detached[id(shard)] = shard.detach()
            # Marks such as `tensor_model_parallel`.
            vars(shards[index]).update(vars(shard))
        group = group_range["orig_group"]
        group["params"] = [detached.get(id(param), param) for param in group["params"]]
    return groups


def schedule(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run a schedule, then detach the tensors that the token dispatchers of MoE layers keep."""
    import torch

    chunks = schedules.chunks(kwargs["model"])
    if not getattr(schedules.config_of(chunks), "num_moe_experts", None):
        return original(*args, **kwargs)
    try:
        return original(*args, **kwargs)
    finally:
        for chunk in chunks:
            for module in chunk.modules():
                dispatcher = vars(module).get("token_dispatcher")
                for holder in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
                    for name, value in vars(holder).items() if holder is not None else ():
                        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                            setattr(holder, name, value.detach())


def reproduce() -> None:
    """Train a model for a step, delete it and its optimizer, and check that its memory is freed.
    Do so in fp32, and with experts. On stock Megatron both models stay alive.
    """
    import gc
    import weakref

    surviving = []
    for kind, layout in (("fp32", {}), ("experts", {"experts": 4, "dtype": "bf16"})):
        model = bench(**layout)
        model.train_step(1, data_seed=0)
        chunk = weakref.ref(model.chunks[0])
        del model
        gc.collect()
        surviving += [kind] if chunk() is not None else []
    if surviving:
        raise Fault(f"models outlive their deletion: {', '.join(surviving)}")


PATCH = Patch(
    "a model that was deleted stays in memory, if it has experts or fp32 parameters",
    target("distributed._build_model_and_main_param_groups", build),
    *schedule_targets(schedule),
    fixed_by=(
        (
            address("moe.token_dispatcher:MoEAlltoAllTokenDispatcher.combine_postprocess"),
            "self.probs = None",
        ),
    ),
    ranks=1,
    loudness="both",
)
