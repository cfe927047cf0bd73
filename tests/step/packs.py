"""Sequences as rows and as packs, and losses that take either; runs on a rank.

Legend: n sequences, B rows, T positions of a row or of a pack, V columns of the vocabulary.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from ranks import patch
from roundings import output_roundings, roundings
from scenario import Bench

import megatron_idempotent
from megatron_idempotent import token_logprobs
from megatron_idempotent.logprobs import shift_targets
from megatron_idempotent.proof.cpu import tiny
from megatron_idempotent.step import own_positions

T = 32
LENGTHS = (9, 1, 30, 17, 4, 0, 12, 26, 7, 21, 3, 14)


def rows(
    replica: int = 0, lengths: tuple[int, ...] = LENGTHS, seed: int = 0, dtype: Any = None
) -> dict[str, Any]:
    """A batch of rows that are padded at the end, about half of whose tokens are valid."""
    generator = torch.Generator().manual_seed(100 * seed + replica)
    n = len(lengths)
    tokens_BT = torch.randint(0, tiny.VOCABULARY, (n, T), generator=generator)
    mask_BT = (torch.rand(n, T, generator=generator) < 0.5).float()
    sample_mask_B = (torch.rand(n, generator=generator) < 0.8).float()
    weight_B = torch.rand(n, generator=generator)
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    mask_BT *= torch.arange(T) < lengths_B[:, None]
    sample_mask_B *= lengths_B > 0  # a row counts, and an empty sequence does not
    batch = {
        "input_ids": tokens_BT.cuda(),
        "token_mask": mask_BT.cuda(),
        "sample_mask": sample_mask_B.cuda(),
        "advantages": weight_B.to(dtype or torch.float32).cuda(),
        "lengths": lengths_B.cuda(),
    }
    return batch


def one_by_one(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Each sequence as a row of its own length; the empty ones are left out."""
    found = []
    for row, length in enumerate(batch["lengths"].tolist()):
        if length:
            one = {name: value[row : row + 1] for name, value in batch.items()}
            one["input_ids"] = one["input_ids"][:, :length]
            one["token_mask"] = one["token_mask"][:, :length]
            found.append(one)
    return found


class PackLoss:
    """Weighed log-probs, summed over valid tokens, of rows or of a pack."""

    kind = "token"
    normalizers: ClassVar[dict[str, Any]] = {"sequences": "none"}

    def __call__(self, output: Any, microbatch: Any) -> Any:
        logprob_BT, valid_BT, weight_BT = self.terms(output, microbatch)
        total = -(logprob_BT * valid_BT * weight_BT).sum()
        return total, {"nll": -(logprob_BT * valid_BT).sum()}

    @staticmethod
    def terms(output: Any, microbatch: Any) -> Any:
        """Log-probs, masks and weights [B, T] of the positions that predict."""
        pack = microbatch.get("pack")
        targets_BT = shift_targets(
            microbatch["input_ids"],
            mask=None if pack is None else pack.mask[None],
            cu_seqlens=None if pack is None else pack.cu_seqlens,
        )
        from megatron.core import parallel_state

        # None on FSDP2.
        group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
        borders = None if pack is None else pack.cu_seqlens
        stats = token_logprobs(
            logits=output, targets=own_positions(targets_BT, cu_seqlens=borders), tp_group=group
        )
        each_n = microbatch["sample_mask"], microbatch["advantages"]
        if pack is None:
            sample_BT, weight_BT = (each[:, None] for each in each_n)
        else:
            sample_BT, weight_BT = (pack.expand(each)[None] for each in each_n)
        mask_BT = torch.nn.functional.pad(microbatch["token_mask"][:, 1:], (0, 1))
        valid_BT = mask_BT * sample_BT * (targets_BT >= 0)
        own = [
            own_positions(each.expand_as(valid_BT), cu_seqlens=borders)
            for each in (valid_BT, weight_BT)
        ]
        return stats.logprob, *own


class PackSequenceLoss(PackLoss):
    """A mean over each sequence's valid tokens, summed over sequences."""

    kind = "sequence"
    normalizers: ClassVar[dict[str, Any]] = {}

    def __call__(self, output: Any, microbatch: Any) -> Any:
        logprob_BT, valid_BT, weight_BT = self.terms(output, microbatch)
        pack = microbatch.get("pack")
        if pack is None:
            return -(
                (logprob_BT * weight_BT * valid_BT).sum(1) / valid_BT.sum(1).clamp(min=1)
            ).sum(), {}
        sums_n = pack.sums(logprob_BT * weight_BT * valid_BT)
        return -(sums_n / pack.sums(valid_BT).clamp(min=1)).sum(), {}


def make(loss: Any = None, forward: Any = None, **options: Any) -> Any:
    """A bench of a tiny model whose attention takes packs."""
    clip = {"optimizer_overrides": {"clip_grad": 1e3}}  # none, which would hide a scale
    step = {"forward": forward or megatron_idempotent.step.gpt_forward}
    return Bench(
        step=step, loss=loss or PackLoss(), exact_attention=True, sequence=T, **clip, **options
    )


def double(**options: Any) -> Any:
    """The same in float64, for which there is no optimizer: gradients are looked at before it."""
    overrides = {
        "params_dtype": torch.float64,
        "pipeline_dtype": torch.float64,
        "attention_softmax_in_fp32": False,
        **options.pop("config_overrides", {}),
    }
    torch.set_default_dtype(torch.float64)
    try:
        patch()
        return tiny.build(
            exact_attention=True,
            sequence=T,
            with_optimizer=False,
            distributed_optimizer=False,
            ddp_overrides={"grad_reduce_in_fp32": False},
            config_overrides=overrides,
            **options,
        )
    finally:
        torch.set_default_dtype(torch.float32)


def exact_gradients(model: Any) -> Any:
    """All gradient buffers of this rank as they are, a copy."""
    buffers = [b for c in model.chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
    return torch.cat([buffer.grad_data.flatten() for buffer in buffers]).clone()


def twice_differentiable(model: Any, loss: PackLoss) -> Any:
    """The loss of all rows, in a pack, of plain log-probs."""
    (microbatch,) = megatron_idempotent.step.pack_batches(rows(dtype=torch.float64), 256)
    output = megatron_idempotent.step.gpt_forward(model, microbatch)
    return loss(torch.log_softmax(output, -1), microbatch)[0]


class Plain:
    """Log-probs of logits that are log-probs already, in the place of `token_logprobs`."""

    @staticmethod
    def terms(output: Any, microbatch: Any) -> Any:
        pack = microbatch["pack"]
        targets_BT = shift_targets(
            microbatch["input_ids"], mask=pack.mask[None], cu_seqlens=pack.cu_seqlens
        )
        logprob_BT = output.gather(-1, targets_BT.clamp(min=0)[..., None])[..., 0]
        sample_BT, weight_BT = (
            pack.expand(microbatch[name])[None] for name in ("sample_mask", "advantages")
        )
        mask_BT = torch.nn.functional.pad(microbatch["token_mask"][:, 1:], (0, 1))
        return logprob_BT, mask_BT * sample_BT * (targets_BT >= 0), weight_BT


class PlainLoss(Plain, PackLoss):
    """Computes what `PackLoss` does."""


class PlainSequenceLoss(Plain, PackSequenceLoss):
    """Computes what `PackSequenceLoss` does."""


def allowed(kind: str, options: dict[str, Any]) -> float:
    """Runs on one rank: the bound of `roundings` for the same model and rows.

    The logits' gradient has as many roundings as there are words, and 64 more: of exponentials of
    logits below 8, and of the few that follow. Gradients are added up over at most 16 microbatches
    and the ranks.
    """
    model = double(**options).chunks[0].module
    loss = PlainLoss() if kind == "token" else PlainSequenceLoss()

    def total() -> Any:
        return twice_differentiable(model, loss)

    return roundings(model, total, terms=tiny.VOCABULARY + 64, parts=16 + 4)


def allowed_logprobs(lengths: tuple[int, ...]) -> float:
    """Runs on one rank: the bound of `output_roundings` for log-probs of all tokens."""
    model = double().chunks[0].module
    batch = rows(dtype=torch.float64)
    batch["lengths"] = torch.tensor(lengths).cuda()
    (microbatch,) = megatron_idempotent.step.pack_batches(batch, 256)
    chosen = shift_targets(microbatch["input_ids"], cu_seqlens=microbatch["pack"].cu_seqlens)

    def output() -> Any:
        logprob = torch.log_softmax(megatron_idempotent.step.gpt_forward(model, microbatch), -1)
        return logprob.gather(-1, chosen.clamp(min=0)[..., None])[chosen >= 0]

    return output_roundings(model, output, terms=tiny.VOCABULARY + 64)
