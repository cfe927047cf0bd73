"""Routers of later pipeline stages refuse a padding mask under sequence parallelism.

Symptom:
    With pipeline and sequence parallelism a model with experts and a `padding_mask` raises
    `RuntimeError: The size of tensor a … must match the size of tensor b …` in each stage but the
    first one.

Cause:
    `GPTModel._preprocess` cuts the mask to the rank's part of the sequence only in the stage that
    embeds tokens.

Affects:
    0.16 on, in which routers take a mask. Repaired on the branch dev. What the patch does: a mask
    that is longer than a router's input is cut to the rank's part of it.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/4359 (on dev);
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5470 cuts the mask itself.

Remove when:
    no supported release has a `MoELayer` that passes on the mask unchanged.
    `upstream/router-mask-of-later-stages` has the repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, address, target


def forward(
    original: Original,
    self: Any,
    input: Any,
    padding_mask: Any = None,
    *args: Any,
    **kwargs: Any,  # routers of the branch dev also take tokens
) -> Any:  # these are upstream's names
    """Wrap a router's forward: cut a padding mask [T, B] to this rank's part of the sequence.
    This is done only if the mask is longer than the input [T / tp, B, H].
    """
    if padding_mask is not None and len(padding_mask) != len(input):
        from megatron.core import parallel_state

        part = parallel_state.get_tensor_model_parallel_rank()
        padding_mask = padding_mask.split(len(input))[part]
    return original(self, input, padding_mask, *args, **kwargs)


def reproduce() -> None:
    """Run a later pipeline stage with a padding mask under sequence parallelism.
    On stock Megatron its router raises, because mask and input have different lengths.
    """
    import torch
    from megatron.core import parallel_state

    from megatron_idempotent.megatron.layer_specs import gpt_stage
    from megatron_idempotent.proof.cpu import tiny

    config = tiny.build(
        tp=2,
        sequence_parallel=True,
        experts=4,
        with_optimizer=False,
        config_overrides={"moe_z_loss_coeff": 1.0, "moe_aux_loss_coeff": 0.0},
    ).config
    stage = gpt_stage(
        config,
        vp_stage=None,
        pre_process=False,
        vocab_size=tiny.VOCABULARY,
        max_sequence_length=tiny.SEQUENCE,
    ).cuda()
    half = tiny.SEQUENCE // 2
    stage.set_input_tensor(torch.randn(half, tiny.BATCH, tiny.HIDDEN, device="cuda"))
    tokens, positions, hidden = tiny.inputs(0)
    padding = torch.zeros_like(tokens, dtype=torch.bool)
    padding[:, half:] = True
    (stage(tokens, positions, hidden, padding_mask=padding) * 0.0).sum().backward()
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    if bool(stage.decoder.layers[0].mlp.router.weight.grad.any()) != first:
        raise Fault("a router takes another rank's part of the padding mask")


PATCH = Patch(
    "under sequence parallelism routers of later pipeline stages refuse a padding mask",
    target("moe.router:TopKRouter.forward", forward),
    since="0.16",
    fixed_by=(
        (
            address("moe.moe_layer:MoELayer.forward"),
            "padding_mask.shape[1] != hidden_states.shape[0]",
        ),
    ),
    stock_error=r"RuntimeError: The size of tensor a",
)
