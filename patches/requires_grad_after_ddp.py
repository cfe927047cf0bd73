"""A parameter that is frozen after DDP was built goes on moving; an unfrozen one is not trained.

Symptom:
    Adapters, a router or a head that a program freezes between two windows go on moving, by the
    optimizer's momentum and by weight decay. Parameters that it unfreezes are never trained: their
    gradients add up in `param.grad`, outside of the gradient's norm. No error, but for frozen
    parameters with overlap: with overlap_grad_reduce they raise `Communication call has not been
    issued for this bucket`, with overlap_param_gather an `AssertionError` without a text.

Cause:
    DDP and the optimizer take the parameters that require gradients when they are built, and look
    at `requires_grad` no more. A gradient of zero is not the same as none: Adam steps on it.

Affects:
    Every release, and also an adapter that a window leaves out, as where several are trained in
    turn with one optimizer. Nothing here repairs it: parameters with a gradient of zero are an
    ordinary thing, and a parameter outside of DDP's buffers may have an optimizer of its own.
    Freeze before DDP wraps the model. To change what is trained, build DDP and the optimizer again;
    to train adapters in turn, give each one's parameters back the values that they had before the
    step, and their state too, or build one model and optimizer for each.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/distributed_data_parallel.py,
    `DistributedDataParallel.__init__`, "Collect all trainable parameters".

Remove when:
    DDP refuses a parameter whose `requires_grad` has changed.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Limit, bench


def moved(frozen: str, unfrozen: str) -> tuple[bool, bool]:
    """Return, on a rank, whether parameters with these in their names moved after the change.

    Everything but the unfrozen ones is trained for two steps, then both are changed for a third.
    """

    def freeze(module: Any) -> None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(unfrozen not in name)

    model = bench(overlap_grad_reduce=False, before_ddp=freeze)
    found = dict(model.chunks[0].module.named_parameters())
    for seed in range(2):
        model.train_step(1, data_seed=seed)
    before = {name: parameter.detach().clone() for name, parameter in found.items()}
    for name, parameter in found.items():
        parameter.requires_grad_(frozen not in name)
    model.train_step(1, data_seed=2)
    still_frozen, still_trained = (
        any(part in name and not before[name].equal(p) for name, p in found.items())
        for part in (frozen, unfrozen)
    )
    return still_frozen, still_trained


def reproduce() -> None:
    """Freeze the output layer and unfreeze the last norm, between two steps."""
    frozen_moves, unfrozen_moves = moved("output_layer", "final_layernorm")
    if frozen_moves or not unfrozen_moves:
        raise Fault(
            f"what was frozen after DDP was built has moved: {frozen_moves}; "
            f"what was unfrozen has: {unfrozen_moves}"
        )


LIMIT = Limit(
    summary="what is frozen after DDP was built goes on moving, what is unfrozen is not trained"
)
