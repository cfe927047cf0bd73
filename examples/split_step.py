"""Take one optimizer step in pieces, as rollouts arrive, in a loop of your own.

    python examples/split_step.py

Two CPU ranks train a small GPT in Megatron's DDP, with the distributed optimizer and overlap. A
batch is passed to `TrainStep` in one call, and in three: the gradient norm is the same. It is also
the same after a step that was aborted halfway.
"""

from __future__ import annotations

from typing import Any

import megatron_idempotent
from megatron_idempotent.proof import cpu


class NextToken:
    """Sums negative log-probs over the valid tokens; `TrainStep` divides the sum by the number of
    these tokens.
    """

    kind = "token"
    normalizers = {"nll": "tokens"}  # noqa: RUF012

    def __call__(self, output: Any, microbatch: Any) -> tuple[Any, dict[str, Any]]:
        targets = megatron_idempotent.logprobs.shift_targets(microbatch["input_ids"])
        counts = microbatch["token_mask"] > 0
        stats = megatron_idempotent.token_logprobs(
            logits=output, targets=targets, token_mask=counts.roll(-1, 1)
        )
        loss = -stats.logprob.sum()
        return loss, {"nll": loss.detach()}


def run(sizes: list[int], *, aborted: bool = False) -> float:
    """Take a step of eight rows on a rank, in calls of these sizes; return the gradient norm."""
    import torch

    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply()
    model = tiny.build(overlap_grad_reduce=True, overlap_param_gather=True)
    step = megatron_idempotent.TrainStep(model.chunks, model.optimizer)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    ids = torch.randint(0, tiny.VOCABULARY, (8, tiny.SEQUENCE), generator=generator).cuda()
    mask = torch.ones_like(ids)
    mask[:, 0] = 0  # the first token is never predicted
    batch = {"input_ids": ids, "token_mask": mask, "sample_mask": torch.ones(8).cuda()}
    if aborted:
        step_id = step.begin(NextToken(), micro_batch_size=2)
        step.microbatch(step_id, batch)
        step.abort(step_id)
    step_id = step.begin(NextToken(), micro_batch_size=2)
    for at, size in zip((sum(sizes[:n]) for n in range(len(sizes))), sizes, strict=True):
        step.microbatch(step_id, {name: each[at : at + size] for name, each in batch.items()})
    return float(step.finish(step_id).grad_norm)


def main() -> None:
    for said, sizes, aborted in (
        ("one call", [8], False),
        ("three calls", [4, 2, 2], False),
        ("after an abort", [4, 2, 2], True),
    ):
        norm, _ = cpu.run_ranks(2, run, sizes, aborted=aborted)
        print(f"{said:15} gradient norm {norm!r}")


if __name__ == "__main__":
    main()
