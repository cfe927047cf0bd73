"""Bridge's adapters of experts that several ranks share compute wrong products, silently.

Symptom:
    With `expert_tensor_parallel_size` above 1 an adapter on an expert's `linear_fc2` adds a wrong
    product, and one on `linear_fc1` gets only a part of its gradient. With
    `moe_shared_expert_overlap` under tensor parallelism an adapter on the shared expert's
    `linear_fc2` counts once for each rank.

Cause:
    Megatron turns off the collectives of such layers (`explicit_expert_comm`, `parallel_mode`),
    because the dispatcher, or the shared expert, sums their outputs later. The adapter's own layers
    lose their collectives too, although there is no later sum between its factors; and each rank
    adds the complete product to an output that will be summed over ranks.

Affects:
    0.3 on, up to main of August 2026; before 0.3 `moe_shared_expert_overlap` fails. What the patch
    does: the factor before the bottleneck sums over the ranks, and so does the gradient at the
    bottleneck. To an output that will be summed, a rank adds only its own rows, with zeros for the
    others. For separate adapters per expert in grouped layers see
    `bridge-per-expert-adapter-detached`.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5634

Remove when:
    Bridge's adapters complete their own sums.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Original, Patch, arguments, target

from . import _peft


def build(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Build an adapter; an expert's adapter then sums over the ranks that split the expert."""
    original(self, *args, **kwargs)
    call = arguments(original, (self, *args), kwargs)
    if self.linear_out.tp_group.size() == 1:
        return
    expert = self.linear_out.explicit_expert_comm
    self.linear_out.explicit_expert_comm = False
    if not self.input_is_parallel:
        return
    self.linear_in.explicit_expert_comm = False
    if expert or call["disable_tensor_parallel_comm"]:
        self.linear_out.gather_output = False
        self.linear_out.register_forward_hook(_peft.own_rows)


def reproduce() -> None:
    """Compare experts' adapters on two tensor-parallel ranks with the product of their factors.
    Without the patch outputs or gradients are those of one rank's part.
    """
    options = {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True}
    bench = _peft.build("LoRA", {"tp": 2, "sequence_parallel": True, "experts": 2}, config=options)
    _peft.expect_products(bench.chunks)


PATCH = Patch(
    "Bridge's adapters of experts shared by tensor-parallel ranks add other products",
    target(
        "peft.utils:ParallelLinearAdapter.__init__",
        build,
        "lin_out_gather_output = True if input_is_parallel else False",
    ),
    since="0.3",
)
