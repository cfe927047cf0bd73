"""Checkpoints swap optimizer states of parameters if some parameters are kept in 32 bits.

Symptom:
    A model has parameters of 16 bits and of 32 bits, such as norms, routers or heads that are kept
    in float32. Saves of the distributed optimizer have, under a parameter's name, the main weights
    and moments of a different parameter. If the two have the same size, there is no error: a load
    into the same layout swaps them back, but a load into another layout, or by another program,
    does not. If their sizes differ, the save raises, for example `AssertionError:
    (torch.Size([64]), 24640, 24896)`.

Cause:
    The optimizer numbers the parameters of a group in the order of the gradient buffers. Then it
    reorders each group, parameters of 32 bits first, but keeps the numbers, by which saves and
    loads find a parameter's state.

Affects:
    Every release, with the distributed optimizer. Training steps are right. What the patch does: it
    numbers the parameters in the new order, and writes loaded values into parameters of 32 bits
    under `no_grad`, because autograd refuses writes in place. Models with one kind of parameters do
    not change. A checkpoint saved without the patch, with parameters of the same size in both
    kinds, loads swapped with the patch: load it without the patch, and save it again with the
    patch.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/5835 repairs it on the branch dev. miles' fork has
    also repaired it.

Remove when:
    `DistributedOptimizer.__init__` numbers parameters by the order in which it installs them.
    `upstream/optimizer-states-of-others` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import optimizers

from ._case import Fault, Original, Patch, a_body_has, address, bench, target


def init(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the distributed optimizer's constructor: correct parameters' positions in their groups.
    Upstream's positions are wrong if a group has both fp32 and 16-bit parameters.
    """
    original(self, *args, **kwargs)
    # A stub has no parameters, and with Megatron-FSDP the optimizer numbers none.
    if getattr(self, "is_stub_optimizer", False) or optimizers.in_fsdp(self):
        return
    kinds = zip(self.model_fp32_groups, self.model_float16_groups, strict=True)
    for index, (in_32_bits, in_16_bits) in enumerate(kinds):
        for order, parameter in enumerate([*in_32_bits, *in_16_bits]):
            self.model_param_group_index_map[parameter] = (index, order)


def set_states(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the copy of a loaded optimizer state: run it without autograd.
    The main weights of fp32 parameters are the model's own parameters, which require gradients.
    """
    import torch

    with torch.no_grad():
        original(self, *args, **kwargs)


def keep_norms_in_32_bits(module: Any) -> None:
    """Let a model's LayerNorms hold float32 weights, compute in float32, and return bfloat16."""
    import torch

    def enter(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (inputs[0].float(), *inputs[1:])

    def leave(_: Any, inputs: Any, output: Any) -> Any:
        return output.bfloat16()

    for part in module.modules():
        if isinstance(part, torch.nn.LayerNorm):
            part.float()
            part.register_forward_pre_hook(enter)
            part.register_forward_hook(leave)


def reproduce() -> None:
    """Train a bf16 model with norms in float32; compare each parameter with its main weights.
    On stock Megatron some parameters have the main weights of another parameter.
    """
    import torch

    model = bench(dtype="bf16", overlap_grad_reduce=False, before_ddp=keep_norms_in_32_bits)
    model.train_step(1, data_seed=0)
    (optimizer,) = model.optimizer.chained_optimizers
    mismatched = 0
    for parameter in optimizer.model_param_gbuf_map:
        part = optimizer._get_model_param_range_map(parameter)["param"]
        shard = parameter.detach().view(-1)[part.start : part.end]
        main = optimizer._get_main_param_and_optimizer_states(parameter)["param"]
        mismatched += not torch.equal(main.to(shard.dtype), shard)
    if mismatched:
        count = len(optimizer.model_param_gbuf_map)
        raise Fault(f"{mismatched} of {count} parameters have another's main weights")


PATCH = Patch(
    "optimizer checkpoints mix parameters up where some are kept in 32 bits",
    target("distributed.__init__", init, "self._build_model_and_main_param_groups"),
    target("distributed._set_main_param_and_optimizer_states", set_states),
    fixed_when=a_body_has("enumerate([*model_fp32_params, *model_float16_params])"),
    # miles' fork numbers parameters when it builds the groups.
    fixed_by=(
        (
            address("distributed.__init__"),
            "self.model_param_group_index_map[param] = (group_index, group_order)",
        ),
        (
            address("distributed._build_model_and_main_param_groups"),
            "model_param_group_index_map[model_param]",
        ),
    ),
    loudness="both",
)
