"""Compute log-probs of packed sequences over a vocabulary that two ranks share.

    python examples/packed_logprobs.py

Three sequences are concatenated into one row. Each token's log-prob equals that of its sequence
alone, and no rank has all columns of the logits at any time.
"""

from __future__ import annotations

import megatron_idempotent
from megatron_idempotent.proof import cpu

LENGTHS = (5, 3, 8)
VOCABULARY = 64


def run() -> list[float]:
    """Return each sequence's log-prob, the sum over its tokens, computed from one row that packs
    all sequences. This rank has only some columns of the row's logits.
    """
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    tokens = torch.randint(0, VOCABULARY, (total,), generator=generator)
    logits = torch.randn(total, VOCABULARY, generator=generator)
    columns = logits.chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous()

    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    targets = megatron_idempotent.logprobs.shift_targets(
        tokens, cu_seqlens=ends
    )  # -100 at each end
    stats = megatron_idempotent.token_logprobs(
        logits=columns, targets=targets, tp_group=dist.group.WORLD, vocab_size=VOCABULARY
    )
    return [float(part.sum()) for part in stats.logprob.split(LENGTHS)]


def alone() -> list[float]:
    """Return each sequence's log-prob, computed on one rank, one sequence at a time, with torch's
    `log_softmax`.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    tokens = torch.randint(0, VOCABULARY, (total,), generator=generator)
    logprobs = torch.randn(total, VOCABULARY, generator=generator).log_softmax(-1)
    found = []
    for ids, rows in zip(tokens.split(LENGTHS), logprobs.split(LENGTHS), strict=True):
        found.append(float(rows[:-1].gather(1, ids[1:, None]).sum()))
    return found


def main() -> None:
    shared, same = cpu.run_ranks(2, run)
    (right,) = cpu.run_ranks(1, alone)
    for length, found, wanted in zip(LENGTHS, shared, right, strict=True):
        print(f"{length} tokens: {found:.4f} on shared columns, {wanted:.4f} alone")
    print("both ranks have the same bits" if shared == same else "the ranks DIFFER")


if __name__ == "__main__":
    main()
