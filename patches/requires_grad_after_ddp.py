"""A parameter that is unfrozen after DDP was built is not trained.

Symptom:
    Parameters that a program unfreezes between two windows are never trained: their gradients add
    up in `param.grad`, and the gradient norm does not count them. No error.

Cause:
    DDP and the optimizer collect the parameters that require gradients when they are built, and do
    not read `requires_grad` again.

Affects:
    Every release. A related case: if several adapters are trained in turn with one optimizer, Adam
    also steps on the adapter that a window does not use, because its gradient is zero, not missing.
    There is no patch: parameters with a gradient of zero are normal, and a parameter outside of
    DDP's buffers may have its own optimizer. Build DDP and the optimizer with all parameters that
    will be trained, and freeze some afterwards: with the patches `frozen-parameters-move` and
    `frozen-parameters-refused` frozen parameters do not change, and are trained again once they are
    unfrozen.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/distributed_data_parallel.py,
    `DistributedDataParallel.__init__`, "Collect all trainable parameters".

Remove when:
    DDP refuses a parameter whose `requires_grad` has changed.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Limit, bench


def reproduce() -> None:
    """Freeze the last norm, build DDP, unfreeze the norm, and take a step.
    The norm does not move.
    """

    def freeze(module: Any) -> None:
        module.decoder.final_layernorm.requires_grad_(False)

    model = bench(overlap_grad_reduce=False, before_ddp=freeze)
    norm = model.chunks[0].module.decoder.final_layernorm.requires_grad_(True)
    weight_before = norm.weight.detach().clone()
    model.train_step(1, data_seed=0)
    if norm.weight.equal(weight_before):
        raise Fault("a parameter that was unfrozen after DDP was built is not trained")


LIMIT = Limit(summary="a parameter that is unfrozen after DDP was built is not trained")
