"""After an exception in a recomputed layer Megatron takes all later code for recomputation.

Symptom:
    `megatron.core.tensor_parallel.random.is_checkpointing()` stays True after an exception in a
    layer under activation recomputation. CUDA graphs then treat every later forward as one inside a
    checkpoint.

Cause:
    `CheckpointFunction` sets a global flag on entry to its forward and its backward and clears it
    after them, without `finally`.

Affects:
    0.16 on, where the flag exists. What the patch does: the flag is also cleared if the call
    raises. A later call that succeeds clears it too, so only code that reads it in between is
    affected.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/tensor_parallel/random.py,
    `CheckpointFunction`.

Remove when:
    the flag is cleared in a `finally`. `upstream/is-checkpointing-left-set` has the repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, address, bench, target


def clear_on_error(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run the forward or backward of activation recomputation; clear its flag if it raises.
    The flag is the one that `is_checkpointing()` returns.
    """
    try:
        return original(*args, **kwargs)
    except BaseException:
        from megatron.core.tensor_parallel import random

        random._unset_checkpointing()
        raise


def reproduce() -> None:
    """Raise in a recomputed layer, once in its forward and once in its recomputation.
    On stock Megatron `is_checkpointing()` stays True.
    """
    from megatron.core.tensor_parallel.random import is_checkpointing

    model = bench(
        overlap_grad_reduce=False,
        config_overrides={
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    )
    layer = model.chunks[0].module.decoder.layers[0].mlp
    for call in (0, 1):
        countdown = iter(range(call, -1, -1))

        def fail(*_: Any, countdown: Any = countdown) -> None:
            if next(countdown) == 0:
                raise ValueError("interrupted")

        hook = layer.register_forward_hook(fail)
        try:
            model.forward_backward(1, data_seed=0)
        except ValueError:
            hook.remove()
        if is_checkpointing():
            raise Fault("is_checkpointing() is True outside of any layer")


PATCH = Patch(
    "is_checkpointing() stays True after an exception in a recomputed layer",
    target("random.CheckpointFunction.forward", clear_on_error),
    target("random.CheckpointFunction.backward", clear_on_error),
    since="0.16",
    groups=("abort",),
    fixed_by=((address("random.CheckpointFunction.forward"), "_checkpointing()"),),
    ranks=1,
)
