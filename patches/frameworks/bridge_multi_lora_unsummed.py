"""Bridge's layers of several adapters get only a part of their gradients on each rank, silently.

Symptom:
    With tensor parallelism the first factor of each adapter of `MultiLoRA` has the gradient of one
    rank's part of the outputs: in a tiny model it is off by three quarters. Without sequence
    parallelism the gradients of all earlier layers are also one rank's part.

Cause:
    `MultiLoRALinear.forward` multiplies by the factors of all adapters at once, and has its own
    collectives. The second factor is split over the ranks, so that each rank's gradient at the
    bottleneck comes from its own rows. These gradients are not summed over ranks; Bridge's other
    adapters use Megatron's `ColumnParallelLinear`, which sums them.

Affects:
    Main of August 2026, 0.7. What the patch does: the gradient at the bottleneck is summed over the
    ranks, and, without sequence parallelism, also the gradient at the input of a column-parallel
    layer.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/peft/multi_lora_layers.py,
    `MultiLoRALinear.forward`

Remove when:
    Bridge copies the bottleneck to the tensor-parallel region.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from megatron_idempotent.patches._case import Original, Patch, target

from . import _peft


def compute(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a layer with several adapters; in its backward, sum its input gradients over ranks.
    The ranks are tensor-parallel. Layers of experts are run unchanged.
    """
    from megatron.core import parallel_state

    # Layers of experts need one rank for each expert, and have a different forward.
    dense = self._adapter_enabled and not hasattr(self, "expert_slot_routing")
    shared = parallel_state.get_tensor_model_parallel_world_size() > 1
    with _summing()(self) if dense and shared else contextlib.nullcontext():
        return original(self, *args, **kwargs)


@functools.cache
def _summing() -> Any:
    import torch
    from megatron.core.tensor_parallel import mappings
    from torch.overrides import TorchFunctionMode

    class Summing(TorchFunctionMode):
        """Lets the backward of `torch._grouped_mm` sum the first argument's gradient over ranks.
        The layer's first product is left out if its input is split over ranks, or if sequence
        parallelism sums the gradient already.
        """

        def __init__(self, layer: Any) -> None:
            super().__init__()
            # Sequence parallelism sums gradients before the first product when it scatters them.
            self._sums = not (layer.input_is_parallel or layer.to_wrap.config.sequence_parallel)

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch._grouped_mm:
                if self._sums:
                    args = (mappings.copy_to_tensor_model_parallel_region(args[0]), *args[1:])
                self._sums = True  # always sum before the second product
            return func(*args, **(kwargs or {}))

    return Summing


def reproduce() -> None:
    """Compare gradients of both factors of multi-LoRA adapters on two tensor-parallel ranks.
    Without the patch the first factor's gradient has only one rank's part.
    """
    layout = {"tp": 2, "sequence_parallel": True}
    bench = _peft.build("MultiLoRA", layout, n_adapters=2, dim=8)
    bench.forward_backward(1, data_seed=0)
    _peft.expect_balance(bench.chunks)


PATCH = Patch(
    "Bridge's layers of several adapters get a part of their gradients on each rank, silently",
    target(
        "peft.multi_lora_layers:MultiLoRALinear.forward",
        compute,
        "mid = torch._grouped_mm(x_flat, stacked_A.transpose(-2, -1), offsets)",
        "out = torch._grouped_mm(mid, stacked_B.transpose(-2, -1), offsets)",
    ),
    target(
        "peft.multi_lora_layers:MultiLoRAGroupedExpertLinear.forward",
        compute,
        "routing = self.expert_slot_routing",
    ),
    since="0.7",
)
