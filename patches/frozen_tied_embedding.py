"""With a frozen embedding that both ends of a pipeline share, each window ends in a TypeError.

Symptom:
    `TypeError: Invalid function argument. Expected parameter tensor of type torch.Tensor but got
    <class 'NoneType'> instead`, from `finalize_model_grads`, if the output layer shares the
    embedding's weight, the model has several pipeline stages, and that weight is not trained, as
    with adapters.

Cause:
    Megatron sums the gradients of the shared weight's copies without checking that there are any.

Affects:
    0.12. What the patch does: for a frozen weight it skips the sum.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.13.0/megatron/core/distributed/finalize_model_grads.py,
    "When the embedding is frozen, the grad is None."

Remove when:
    0.12 is no longer supported.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, a_body_has, bench, target


def add_up(original: Original, model: list[Any], config: Any) -> None:
    """Wrap the sum of tied embeddings' gradients over stages: skip it if the weight is frozen."""
    if not (_is_shared() and any(map(_is_frozen, model))):
        original(model, config)


def _is_shared() -> bool:
    """Return whether this rank sums shared embedding gradients with other pipeline stages.
    If it does not, upstream never looks into the model, which may be any module; the caller must
    not either.
    """
    import torch
    from megatron.core import parallel_state

    return parallel_state.is_rank_in_embedding_group(ignore_virtual=True) and (
        torch.distributed.get_world_size(parallel_state.get_embedding_group()) > 1
    )


def _is_frozen(chunk: Any) -> bool:
    from megatron.core.utils import get_attr_wrapped_model

    module = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    # Only the first and the last chunk share the weight.
    if not (module.pre_process or module.post_process):
        return False
    weight = module.shared_embedding_or_output_weight()
    return weight is not None and not weight.requires_grad


def _freeze(module: Any) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("decoder.layers" in name)


def reproduce() -> None:
    """Run a window of a two-stage model whose tied embedding is frozen.
    On stock Megatron the window ends in a `TypeError`.
    """
    model = bench(pp=2, tied=True, before_ddp=_freeze)
    model.forward_backward(2, data_seed=0)
    if not model.gradients().any():
        raise Fault("the gradients are zero")


def control() -> object:
    """Finalize gradients of a linear layer in place of a GPTModel, on one stage, as a control.
    Return the gradients.
    """
    import torch
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads

    base = bench(with_optimizer=False, overlap_grad_reduce=False)
    layer = torch.nn.Linear(4, 4).cuda()
    torch.nn.init.constant_(layer.weight, 0.5)
    model = DistributedDataParallel(base.config, base.chunks[0].ddp_config, layer)
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    finalize_model_grads([model])
    return [buffer.grad_data.tolist() for buffer in model.buffers]


PATCH = Patch(
    "a frozen embedding that both ends of a pipeline share ends each window in a TypeError",
    target("finalize._allreduce_word_embedding_grads", add_up),
    before="0.13",
    # 0.13 asks whether there is a gradient; from 0.14 on a function of its own does.
    fixed_when=a_body_has("grad is None", "_allreduce_embedding_grad"),
    stock_error=r"TypeError: .*Expected parameter `tensor` of type torch.Tensor",
)
