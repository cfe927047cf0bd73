"""The auxiliary losses keep the weight that the last pipeline schedule gave them.

Symptom:
    A backward outside of a schedule (`model(...)` and `loss.backward()`, a look at the gradients, a
    second loss) weighs the MoE auxiliary loss, the z-loss and the MTP loss by loss scale ÷ number
    of microbatches of the schedule that ran last, even if it was forward-only: after four
    microbatches the auxiliary losses count a quarter. Before the first schedule they count fully.
    No error.

Cause:
    The schedules write the weight into a class attribute (`MoEAuxLossAutoScaler`,
    `MTPLossAutoScaler`, since 0.16 `DSAIndexerLossAutoScaler`) and never reset it.

Affects:
    Every release. What the patch does: when a schedule ends, even by an exception, each scaler has
    its earlier value again, or 1 if it had none. The value is written into the existing tensor,
    because captured CUDA graphs read it at its address. `accumulation_window()` reaches the
    schedules through this patch, or through `timers-left-running`.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/pipeline_parallel/schedules.py,
    `forward_step_calc_loss`.

Remove when:
    the weight travels with the loss instead of through a class attribute.
    `upstream/aux-loss-scale-left-set` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import moe, schedules

from ._case import Fault, Original, Patch, backward, bench, schedule_targets

_AUXILIARY = ("num_moe_experts", "mtp_num_layers", "experimental_attention_variant")


def schedule(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run a schedule, then set the scales of auxiliary losses back to their values before it."""
    model = kwargs["model"]
    original = schedules.around(original, model)
    config = schedules.config_of(model)
    if all(getattr(config, name, None) is None for name in _AUXILIARY):
        return original(*args, **kwargs)
    saved = []
    for scaler in moe.scalers():
        scale = scaler.main_loss_backward_scale
        saved.append((scaler, scale, None if scale is None else scale.clone()))
    try:
        return original(*args, **kwargs)
    finally:
        for scaler, scale, value in saved:
            _put_back(scaler, scale, value)


def _put_back(scaler: Any, scale: Any, value: Any) -> None:
    current = scaler.main_loss_backward_scale
    if current is None or current.is_inference():  # an inference tensor cannot be written here
        return
    if scale is None:
        current.fill_(1.0)
    elif current is scale:
        current.copy_(value)
    else:
        scaler.main_loss_backward_scale = scale


def reproduce() -> None:
    """Run a direct backward after a schedule of one microbatch and after one of four.
    On stock Megatron the MoE auxiliary loss has a quarter of its weight in the second backward.
    """
    model = bench(
        experts=4, overlap_grad_reduce=False, config_overrides={"moe_aux_loss_coeff": 1.0}
    )
    (chunk,) = model.chunks
    router = chunk.module.decoder.layers[0].mlp.router.weight

    def gradient_after(num_microbatches: int) -> Any:
        model.forward_backward(num_microbatches, data_seed=1)
        chunk.zero_grad_buffer()
        backward(model, data_seed=0)
        return router.main_grad.clone()

    after_one, after_four = gradient_after(1), gradient_after(4)
    if not after_one.equal(after_four):
        raise Fault(
            f"router gradient norm {after_four.norm():.4g} after four microbatches, "
            f"{after_one.norm():.4g} after one"
        )


PATCH = Patch(
    "a direct backward weighs MoE and MTP losses by the last schedule's microbatches",
    *schedule_targets(schedule),
    groups=("aux-loss",),
    provides=(schedules.ASKS_WINDOWS,),
    ranks=1,
)
