"""The operations of `programs.py` on FSDP2, beside a loop of plain torch.

Runs on a rank.
"""

from __future__ import annotations

from typing import Any

import torch
from fsdp_bench import build, one_shot, parameters, step_of
from programs import Pair
from scenario import TokenLoss


class FSDPPair(Pair):
    """Two models on FSDP2, of which one is stepped in pieces."""

    def build(self, options: dict[str, Any]) -> None:
        split, whole = build(**options), build(**options)
        for model, *_ in (split, whole):
            for block in model.blocks:
                block.dropout.p = 0.0  # the two would draw in another order
        self.replica = torch.distributed.get_rank()
        self.step = step_of(*split)
        self.split, self.whole = split[0], whole

    def one_shot(self, batch: Any) -> float:
        grad_norm, _ = one_shot(*self.whole, TokenLoss(), batch)
        return grad_norm

    def logprobs(self, piece: Any) -> None:
        with self.step.reading() as (model,):
            got = model(piece["input_ids"])
        with torch.no_grad():
            want = self.whole[0].eval()(piece["input_ids"])
        self.whole[0].train()
        assert torch.equal(got, want)

    def evaluate(self) -> None:
        tokens_BT = self.batch["input_ids"][:2]
        with torch.no_grad():
            got, want = self.split.eval()(tokens_BT), self.whole[0].eval()(tokens_BT)
        assert torch.equal(got, want)

    def export(self) -> None:
        with self.step.reading() as (model,):
            got = parameters(model)
        assert torch.equal(got, parameters(self.whole[0]))
