"""Fully reshardable optimizer state is saved shifted if buckets are padded.

Symptom:
    After a load of the format `fully_reshardable` (`--dist-ckpt-optim-fully-reshardable`), which
    can be loaded into any layout, Adam's moments and the main weights are those of other parameters
    from the second bucket on, and zeros at the end of the buffer. The save may warn once per
    parameter that it pads with zeros "which can lead to data corruption"; without this warning the
    state is wrong as well.

Cause:
    `get_parameter_state_dp_zero` leaves out the padding at the end of each bucket;
    `sharded_param_state_fully_reshardable` slices parameters at positions that count the padding.

Affects:
    0.15 and later, if a buffer has several buckets and one before the last is padded. Repaired on
    Megatron main. What the patch does: parameters are sliced at positions without padding.
    Checkpoints that stock Megatron has saved stay wrong: load only their weights, or another
    format.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/5077

Remove when:
    no release without that change is supported.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, a_body_has, bench, target


def sharded_state(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the making of the optimizer's fully reshardable state.
    Meanwhile, parameters' positions in DDP's buffers are counted without the padding of buckets.
    """
    padded = [(buffer, buffer.param_index_map) for buffer in self.buffers]
    for buffer, positions in padded:
        buffer.param_index_map = _without_padding(buffer.buckets, positions)
    try:
        return original(self, *args, **kwargs)
    finally:
        for buffer, positions in padded:
            buffer.param_index_map = positions


def _without_padding(buckets: Any, positions: dict[Any, Any]) -> dict[Any, Any]:
    """Return parameter → (start, end, bucket id), with positions that skip padding of buckets."""
    padding, padding_before = 0, {}
    for bucket in buckets:
        padding_before[bucket.bucket_id] = padding
        padding += bucket.grad_data.numel() - bucket.numel_unpadded
    return {
        param: (start - padding_before[index], end - padding_before[index], index)
        for param, (start, end, index) in positions.items()
    }


def reproduce() -> None:
    """Make the fully reshardable state of a trained fp32 model, and compare it with the parameters.
    On stock Megatron some parameters have the state of another parameter.
    """
    model = bench()
    model.train_step(1, data_seed=0)
    (optimizer,) = model.optimizer.chained_optimizers
    state = optimizer.sharded_state_dict(
        model.chunks[0].module.sharded_state_dict(),
        metadata={"distrib_optim_sharding_type": "fully_reshardable"},
    )
    params = [param for buffer in optimizer.buffers for param in buffer.param_index_map]
    saved = [entry["param"].data for entry in state["param_state"].values()]
    wrong = sum(not a.equal(b.cpu()) for a, b in zip(saved, params, strict=True))
    if wrong:
        raise Fault(f"the state of {wrong} of {len(params)} parameters is another's")


PATCH = Patch(
    "fully reshardable optimizer state is saved shifted where buckets are padded",
    target("distributed.sharded_param_state_fully_reshardable", sharded_state),
    since="0.15",
    fixed_when=a_body_has("param_world_start - padding_adjustment"),
)
