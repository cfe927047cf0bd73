"""A step in several schedule calls gives the auxiliary losses too much weight.

Symptom:
    If several calls of a pipeline schedule make one optimizer step (streamed or packed batches,
    balanced microbatches), the MoE auxiliary loss, the z-loss and the MTP loss count more than in
    one call: four calls of one microbatch give them four times their weight, and the router's
    gradient is off by a factor, even if the caller rescales its own loss to the step. No error.

Cause:
    The schedules divide the loss and the auxiliary losses by the number of microbatches of that
    call. The caller cannot reach the auxiliary ones.

Affects:
    Every release; from 0.19 `config.moe_grad_scale_func` and `mtp_grad_scale_func` let a caller
    correct the weight itself, except for the z-loss and sparse attention's loss. No patch can know
    which calls make a step: say so with `accumulation_window(chunks, total_microbatches=n)` around
    them. Then all losses are divided by n, and only the call that completes the step reduces and
    finalizes the gradients. The gradient has the same bits as in one call.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/pipeline_parallel/schedules.py,
    `forward_step_calc_loss`. https://github.com/NVIDIA-NeMo/RL/issues/3888 reports it for a step of
    several calls.

Remove when:
    the schedules take the number of microbatches of the step.
"""

from __future__ import annotations

import contextlib
from typing import Any

from ._case import Fault, Helper, bench


def reproduce(*, helped: bool) -> None:
    """Compare a router's gradient of four microbatches in one schedule call and in four calls.
    In four calls the auxiliary loss has four times its weight; with `helped`, `accumulation_window`
    prevents this.
    """
    from megatron_idempotent.proof.cpu import tiny

    model = bench(
        experts=4, overlap_grad_reduce=False, config_overrides={"moe_aux_loss_coeff": 1.0}
    )
    model.config.finalize_model_grads_func = None  # so that each rank compares its own gradient
    (chunk,) = model.chunks
    router = chunk.module.decoder.layers[0].mlp.router.weight

    def gradient(calls: int, microbatches: int) -> Any:
        chunk.zero_grad_buffer()
        data = tiny.microbatches(0)
        forward_step = model._forward_step([])
        for _ in range(calls):
            model.schedule(data, microbatches, forward_step)
        return router.main_grad.clone()

    in_one_call = gradient(1, 4)
    divide = 1 if helped else 4
    model.on_microbatch = lambda _, loss: None if loss is None else loss / divide
    with _window(helped, model, 4):
        in_four_calls = gradient(4, 1)
    if not in_one_call.equal(in_four_calls):
        raise Fault(
            f"router gradient norm {in_four_calls.norm():.4g} in four calls, "
            f"{in_one_call.norm():.4g} in one"
        )


def control(*, helped: bool) -> list[bytes]:
    """Run two correct steps, each with one schedule call of three microbatches, as a control.
    With `helped` each step runs in an `accumulation_window`. Return the parameters' bytes.
    """
    model = bench(experts=4, config_overrides={"moe_aux_loss_coeff": 1.0})
    bits = []
    for seed in (0, 1):
        for chunk in model.chunks:
            chunk.zero_grad_buffer()
        model.optimizer.zero_grad()
        with _window(helped, model, 3):
            model.forward_backward(3, data_seed=seed, zero_first=False)
        model.step()
        bits.append(model.bits())
    return bits


def _window(helped: bool, model: Any, microbatches: int) -> Any:
    from megatron_idempotent.window import accumulation_window

    return accumulation_window(model.chunks, microbatches) if helped else contextlib.nullcontext()


HELPER = Helper(
    summary="a step in several schedule calls gives MoE and MTP losses too much weight",
    call="accumulation_window",
)
