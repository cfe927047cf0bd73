"""A parameter that is unfrozen after DDP was built is not trained.

Symptom:
    Parameters that a program unfreezes between two windows are never trained: their gradients add
    up in `param.grad`, outside of the gradient's norm. No error.

Cause:
    DDP and the optimizer take the parameters that require gradients when they are built, and look
    at `requires_grad` no more.

Affects:
    Every release, and also an adapter that a window leaves out without being frozen, as where
    several are trained in turn with one optimizer: a gradient of zero is not the same as none, and
    Adam steps on it. Nothing here repairs it: parameters with a gradient of zero are an ordinary
    thing, and a parameter outside of DDP's buffers may have an optimizer of its own. Build DDP and
    the optimizer with all that will be trained, and freeze afterwards: with the patches
    `frozen-parameters-move` and `frozen-parameters-refused` what is frozen stays as it is, and is
    trained again once it is unfrozen.

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
    """Unfreeze the last norm after DDP was built, and take a step."""

    def freeze(module: Any) -> None:
        module.decoder.final_layernorm.requires_grad_(False)

    model = bench(overlap_grad_reduce=False, before_ddp=freeze)
    norm = model.chunks[0].module.decoder.final_layernorm.requires_grad_(True)
    before = norm.weight.detach().clone()
    model.train_step(1, data_seed=0)
    if norm.weight.equal(before):
        raise Fault("what was unfrozen after DDP was built is not trained")


LIMIT = Limit(summary="what is unfrozen after DDP was built is not trained")
