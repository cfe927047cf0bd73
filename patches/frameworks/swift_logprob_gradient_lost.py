"""With tensor parallelism ms-swift's GRPO and GKD train on wrong gradients of log-probs, silently.

Symptom:
    Losses and log-probs are right. With tensor parallelism the gradient of a token's log-prob
    reaches only the vocabulary shard that has the token; other shards get zeros. On that shard the
    gradient of the largest logit is too large. torch warns once that `c10d::allreduce_` has no
    autograd kernel.

Cause:
    `vocab_parallel_log_softmax` sums the exponentials of all shards with `torch.distributed`, whose
    backward does not sum over ranks: each rank's gradient has only its own shard's part. The
    maximum is not detached, and its gradient no longer cancels.

Affects:
    3.12 to 4.5.2, in GRPO and GKD; DPO and KTO use Megatron's cross entropy, and are right. What
    the patch does: values are ms-swift's own, and the backward is that of the whole vocabulary,
    with an all-reduce over tensor-parallel ranks. Without gradients nothing changes.

Upstream:
    https://github.com/modelscope/ms-swift/pull/9947, in 4.5.3 and 4.6;
    https://github.com/modelscope/ms-swift/issues/9778 reports it.

Remove when:
    4.5.2 is no longer supported.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_idempotent.patches._case import Fault, Original, Patch, no_body_has, target

from . import _standins

_MODULE = "swift.megatron.trainers.vocab_parallel_utils"
_SUM = "torch.distributed.all_reduce(sum_exp, op=torch.distributed.ReduceOp.SUM, group=tp_group)"


def vocab_parallel_log_softmax(original: Original, logits: Any) -> Any:
    """Return ms-swift's log-probs [..., V / ranks]; their backward uses the whole vocabulary."""
    import torch
    from megatron.core import parallel_state

    ranks = parallel_state.get_tensor_model_parallel_world_size()
    if ranks == 1 or not (torch.is_grad_enabled() and logits.requires_grad):
        return original(logits)
    return _log_softmax()(logits, original, parallel_state.get_tensor_model_parallel_group())


@functools.cache
def _log_softmax() -> Any:
    import torch

    class LogSoftmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Any, original: Original, group: Any) -> Any:
            log_probs = original(logits)
            ctx.save_for_backward(log_probs)
            ctx.group = group
            return log_probs

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            (log_probs,) = ctx.saved_tensors
            total = gradient.sum(-1, keepdim=True)
            # All tensor-parallel ranks must enter: otherwise the others hang.
            torch.distributed.all_reduce(total, group=ctx.group)
            return gradient - log_probs.exp() * total, None, None

    return LogSoftmax.apply


def reproduce() -> None:
    """Compare gradients of log-probs, entropy and KL divergence with those on a whole vocabulary.
    Without the patch the vocabulary shards' gradients are wrong.
    """
    import torch

    swift, logits_BTV, part = _drawn()
    labels_BT = torch.tensor([[0, 1, 5, 7, 3, 6]])
    teacher_BTV = logits_BTV.flip(-1).log_softmax(-1)

    def shard_losses(logits: Any) -> Any:
        logprobs, entropy = swift.compute_logps_and_entropy_from_logits(
            logits, labels_BT, compute_entropy=True
        )
        divergence = swift.vocab_parallel_kl_div(
            swift.vocab_parallel_log_softmax(logits), part(teacher_BTV)
        )
        return logprobs.sum(), entropy.sum(), divergence.sum()

    def whole_losses(logits: Any) -> Any:
        log_probs = logits.log_softmax(-1)
        probs = teacher_BTV.exp()
        return (
            log_probs.gather(-1, labels_BT[..., None]).sum(),
            -(log_probs.exp() * log_probs).sum(),
            (probs * (teacher_BTV - log_probs)).sum(),
        )

    for index, name in enumerate(("log-probs", "entropy", "divergence")):
        whole_BTV = logits_BTV.clone().requires_grad_()
        own_BTV = part(logits_BTV).clone().requires_grad_()
        whole_losses(whole_BTV)[index].backward()
        shard_losses(own_BTV)[index].backward()
        expected = part(whole_BTV.grad)
        # Sums of eight values below one; Megatron's cross entropy, which 4.5.3 uses to repair it,
        # has float32 sums.
        if not torch.allclose(own_BTV.grad, expected, rtol=0, atol=2.0**-20):
            largest = float((own_BTV.grad - expected).abs().max())
            raise Fault(f"the gradient of {name} is off by {largest:.2g}")


def control() -> object:
    """Compute log-probs and entropy without gradients, as a control; return their bytes."""
    import torch

    swift, logits_BTV, part = _drawn()
    with torch.no_grad():
        values = swift.compute_logps_and_entropy_from_logits(
            part(logits_BTV), torch.tensor([[0, 1, 5, 7, 3, 6]]), compute_entropy=True
        )
    return [value.numpy().tobytes() for value in values]


def _drawn() -> Any:
    """Return ms-swift's module, random logits [1, 6, 8], and a function.
    The function takes a tensor [..., V], and returns this rank's half of the vocabulary.
    """
    import torch
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(2)
    rank = parallel_state.get_tensor_model_parallel_rank()
    generator = torch.Generator().manual_seed(0)
    logits_BTV = torch.randn(1, 6, 8, dtype=torch.float64, generator=generator)
    return _standins.import_alone(_MODULE), logits_BTV, lambda full: full.chunk(2, -1)[rank]


PATCH = Patch(
    "with tensor parallelism ms-swift's GRPO trains on wrong gradients of log-probs, silently",
    target(f"{_MODULE}:vocab_parallel_log_softmax", vocab_parallel_log_softmax, _SUM),
    since="3.12",
    before="4.5.3",
    fixed_when=no_body_has(_SUM),
)
