"""Packs and budgets on FSDP2, whose ranks meet in each microbatch."""

from __future__ import annotations

from typing import Any

import torch
from scenario import DEADLINE_S, raised_by
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_idempotent import FSDPTrainStep
from megatron_idempotent.fp8 import TokenAlignment
from megatron_idempotent.step import pack_batches


def fsdp_steps() -> dict[str, Any]:
    """Runs on two ranks with other numbers of rows: the same step of rows, and of packs."""
    from packs import PackSequenceLoss, PlainSequenceLoss, rows
    from roundings import roundings

    class Model(nn.Module):
        """Each token's logits, of the token and of the mean over its own sequence."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(128, 16)
            self.layer = nn.Linear(16, 16)
            self.head = nn.Linear(16, 128)

        def forward(self, tokens_BT: Any, real_BT: Any, pack: Any) -> Any:
            hidden = torch.tanh(self.layer(self.embedding(tokens_BT)))
            if pack is None:
                real = real_BT[..., None].to(hidden.dtype)
                mean = (hidden * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)
            else:
                lengths_n = torch.tensor(pack.lengths, device=hidden.device).clamp(min=1)
                mean = pack.expand(pack.sums(hidden) / lengths_n[:, None])[None]
            return self.head(hidden + mean)

    def forward(model: Any, microbatch: Any) -> Any:
        tokens_BT = microbatch["input_ids"]
        real_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        real_BT = real_BT < torch.as_tensor(microbatch["lengths"])[:, None]
        return model(tokens_BT, real_BT, microbatch.get("pack"))

    replica = torch.distributed.get_rank()

    def batch_of(replica: int) -> dict[str, Any]:
        given = rows(replica, dtype=torch.float64)
        return {name: value[: (12, 3)[replica]] for name, value in given.items()}

    batch = batch_of(replica)
    torch.manual_seed(5)
    whole = Model().double().cuda()

    def total() -> Any:
        packs = [pack for replica in (0, 1) for pack in pack_batches(batch_of(replica), 256)]
        loss = PlainSequenceLoss()
        return sum(loss(torch.log_softmax(forward(whole, pack), -1), pack)[0] for pack in packs)

    # Between two layers lies a mean over at most 32 tokens too; words as in `packs.allowed`.
    limit = roundings(whole, total, terms=128 + 64, parts=16 + 2, between=16 + 32) * 2.0**-53
    mesh = init_device_mesh("cpu", (2,))
    found: dict[str, Any] = {}
    ways: dict[str, dict[str, Any]] = {
        "rows": {"micro_batch_size": 1},
        "packs": {"max_tokens_per_microbatch": 48},
        "padded": {"max_tokens_per_microbatch": 96},
    }
    for way, arguments in ways.items():
        torch.manual_seed(5)
        model = Model().double().cuda()
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        step = FSDPTrainStep(
            model,
            optimizer,
            forward=forward,
            clip_grad=None,
            alignment=TokenAlignment(sequence=4, pack=16) if way == "padded" else None,
            deadline_s=DEADLINE_S,
        )
        step_id = step.begin(PackSequenceLoss(), global_batch_size=15, **arguments)
        receipt = step.microbatch(step_id, batch, last=True)
        result = step.finish(step_id)
        gradients = [p.grad.full_tensor().flatten() for p in model.parameters()]
        found[way] = torch.cat(gradients), result.global_valid_tokens, receipt.microbatches
    plain = FSDPTrainStep(model, optimizer, deadline_s=DEADLINE_S)
    step_id = plain.begin(PackSequenceLoss(), global_batch_size=15, max_tokens_per_microbatch=48)
    told = str(raised_by(plain.microbatch, step_id, batch))
    plain.abort(step_id)
    want = found["rows"][0]
    assert want.norm() > 0
    return {
        "differing": {
            way: float((each[0] - want).norm() / want.norm()) for way, each in found.items()
        },
        "limit": limit,
        "tokens": [each[1] for each in found.values()],
        "microbatches": [each[2] for each in found.values()],
        "told": told,
    }


def test_fsdp_takes_budgets_and_has_the_gradient_of_rows(megatron_ranks):
    both = megatron_ranks(2, fsdp_steps)
    for found in both:
        limit = found["limit"]
        assert limit < 2.0**-30  # far below a rounding of float32 or bfloat16
        print(f"{max(found['differing'].values()) / limit:.1e} of {limit * 2**53:.1e} roundings")
        assert max(found["differing"].values()) < limit, found
        assert len(set(found["tokens"])) == 1
        assert "give it a forward that hands the pack's cu_seqlens" in found["told"]
    # As many packs on both ranks, up to one for each sequence.
    assert [found["microbatches"] for found in both] == [[12, 4, 2], [3, 3, 2]]
