"""After an exception in the experts, overlapped shared experts refuse every later forward.

Symptom:
    With moe_shared_expert_overlap, after an exception in an MoE layer (for example, out of memory
    in the routed experts): `AssertionError: pre_forward_comm must be called from IDLE state, but
    current state is POST_FORWARD_COMM_DONE` from every later forward of that layer, even in
    evaluation. Before 0.18 a bare `AssertionError`, if the exception came after the shared experts
    were done.

Cause:
    The shared experts run in four pieces between those of the token dispatcher. The module keeps
    the tensors that one piece passes to the next, and from 0.18 on the state of the sequence. An
    exception in between leaves both in the module.

Affects:
    Every release. What the patch does: before the first piece runs, it drops the tensors and the
    state of an earlier forward. A forward that did not raise leaves none.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/transformer/moe/shared_experts.py,
    `overlap_state_check`.

Remove when:
    the state is reset when a layer raises, or when its forward starts.
    `upstream/shared-experts-wedged` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron.moe import reset_shared_experts

from ._case import Original, Patch, address, bench, expect_gradients, target


def pre_forward_comm(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap `pre_forward_comm` of overlapped shared experts: first reset an interrupted forward."""
    reset_shared_experts(self)
    original(self, *args, **kwargs)


def reproduce() -> None:
    """Interrupt an MoE layer before it takes its shared experts' output, then run a window.
    On stock Megatron every later forward of the layer asserts.
    """
    model = bench(
        experts=4,
        overlap_grad_reduce=False,
        config_overrides={
            "moe_shared_expert_intermediate_size": 64,
            "moe_shared_expert_overlap": True,
        },
    )
    model.forward_backward(1, data_seed=0)
    expected = model.gradients()
    shared = model.chunks[0].module.decoder.layers[0].mlp.shared_experts

    def fail() -> None:
        raise ValueError("interrupted")

    shared.get_output = fail
    try:
        model.forward_backward(1, data_seed=1)
    except ValueError:
        del shared.get_output
    expect_gradients(model, expected)


PATCH = Patch(
    "after an exception in an MoE layer, overlapped shared experts refuse every forward",
    target("moe.shared_experts:SharedExpertMLP.pre_forward_comm", pre_forward_comm),
    groups=("abort",),
    fixed_by=(
        (
            address("moe.shared_experts:overlap_state_check"),
            "required_state == SharedExpertState.IDLE",
        ),
    ),
    stock_error=r"AssertionError",
)
