"""With MTP layers the output layer's deferred gradient is wrong, and goes into the wrong weight.

Symptom:
    With `defer_embedding_wgrad_compute` and multi-token prediction (MTP) the output layer's weight
    gets no gradient, and the embedding gets a wrong one. No error.

Cause:
    The last stage keeps the inputs of the output layer, and the gradients of its outputs, and
    multiplies them after the window. With MTP a microbatch calls the output layer several times.
    Inputs are kept in the order of these calls, gradients in the reverse order of the backward, and
    both lists are read from their beginning. And `finish_embedding_wgrad_compute` asks for the
    shared weight even if nothing is shared; in a stage with MTP layers that is the embedding's.

Affects:
    Every release, and main. What the patch does: the inputs of each microbatch are reversed before
    they are multiplied, and the result goes into the weight that the output layer used. With a
    `wgrad_deferral_limit` that ends inside of a microbatch inputs and gradients cannot be paired: a
    RuntimeError names both numbers. In the Megatron of slime's image and in miles' fork MTP trains
    no output weight; a deferred gradient does, even with the patch. Do not defer it there.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/pipeline_parallel/schedules.py,
    `finish_embedding_wgrad_compute`.

Remove when:
    Upstream pairs them and takes the right weight, or refuses the two options together.
    `upstream/deferred-embedding-mispaired` has the repair.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_idempotent.megatron import schedules

from . import _deferred_embedding
from ._case import Fault, Original, Patch, address, bench, target

_ASKED = "embedding_module.shared_embedding_or_output_weight()"


def finish(
    original: Original, config: Any, embedding_module: Any, *args: Any, **kwargs: Any
) -> None:
    """Wrap the computation of the deferred gradient: use the weight of the output layer.
    With MTP layers upstream uses the embedding's weight.
    """
    if embedding_module is None or not getattr(config, "mtp_num_layers", None):
        original(config, embedding_module, *args, **kwargs)
        return
    embedding = SimpleNamespace(
        embedding_activation_buffer=embedding_module.embedding_activation_buffer,
        grad_output_buffer=embedding_module.grad_output_buffer,
        share_embeddings_and_output_weights=True,  # so that upstream takes `output_layer.weight`
        output_layer=SimpleNamespace(weight=schedules.output_weight(embedding_module)),
    )
    original(config, embedding, *args, **kwargs)


def drain(
    original: Original,
    config: Any,
    embedding_activation_buffer: list[Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Wrap the computation of the deferred gradient: with MTP layers, reverse the order of the
    output layer's kept inputs within each microbatch, because the kept output gradients are in
    reverse order.
    """
    inputs = embedding_activation_buffer
    calls = 1 + (getattr(config, "mtp_num_layers", None) or 0)
    if calls > 1:
        if len(inputs) % calls:
            raise RuntimeError(
                f"the output layer is called {calls} times in a microbatch, and {len(inputs)} of "
                f"its inputs are kept: set wgrad_deferral_limit={config.wgrad_deferral_limit} to 0 "
                f"or a multiple of {calls}"
            )
        for first in range(0, len(inputs), calls):
            inputs[first : first + calls] = inputs[first : first + calls][::-1]
    original(config, inputs, *args, **kwargs)


def reproduce() -> None:
    """Compare gradients of two microbatches with an MTP layer, deferred and not.
    On stock Megatron the deferred gradient of the output layer is wrong.
    """
    direct, deferred = _gradients(mtp_layers=1)
    if direct is not None and (deferred - direct).norm() > direct.norm() / 10:
        off = float((deferred - direct).norm() / direct.norm())
        raise Fault(f"the deferred gradient is off by {off:.0%} of its norm")


def control() -> object:
    """Compare deferred gradients of two microbatches with direct ones, without MTP, as a control.
    Return the deferred gradients on the last pipeline stage, None on the first.
    """
    direct, deferred = _gradients(mtp_layers=0)
    if direct is not None and not direct.equal(deferred):
        raise Fault("the deferred gradient differs from the one computed at once")
    return None if deferred is None else deferred.tolist()


def _gradients(mtp_layers: int) -> tuple[Any, Any]:
    """Return the last pipeline stage's gradients twice: computed at once, and with deferral.
    On other stages return (None, None).
    """
    import torch

    pair = []
    # Without overlap, see deferred-embedding-reduced-early.
    options: dict[str, Any] = {"overlap_grad_reduce": False, "distributed_optimizer": False}
    if mtp_layers:
        options |= {"mtp": mtp_layers, "config_overrides": {"mtp_loss_scaling_factor": 0.1}}
    for model in (bench(pp=2, **options), _deferred_embedding.build(**options)):
        model.forward_backward(2, data_seed=0)
        last = _deferred_embedding.output_weight(model) is not None
        gradients = [param.main_grad.flatten() for param in model.chunks[0].parameters()]
        pair.append(torch.cat(gradients) if last else None)
    return pair[0], pair[1]


PATCH = Patch(
    "with MTP the output layer's deferred gradient is another one, in another weight",
    target("utils.drain_embedding_wgrad_compute", drain),
    target("schedules.finish_embedding_wgrad_compute", finish, _ASKED),
    groups=("deferred-embedding",),
    fixed_by=(
        (
            address("schedules.finish_embedding_wgrad_compute"),
            "calls = 1 + (config.mtp_num_layers or 0)",
        ),
    ),
    provides=("deferred-embedding-paired",),
    given=("mtp-without-transformer-engine",),
)
