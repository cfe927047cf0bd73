"""A critic and a reward model as docs/train-step/critic.md has them; runs on a rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from scenario import ROWS, T, data, documented


@dataclasses.dataclass(frozen=True)
class Task:
    """A head of the model, its forward and its loss; `rows` are those of a step."""

    before_ddp: Callable[[Any], None]
    forward: Callable[[Any, Any], Any]
    loss: Any
    rows: Callable[[int, int, int], dict[str, Any]]
    names: dict[str, Any]
    """All that the page defines."""

    @classmethod
    def critic(cls) -> Task:
        names = _page()
        return cls(_head(names), names["forward"], names["ValueLoss"](clip=0.2), rows_of, names)

    @classmethod
    def reward(cls) -> Task:
        """Its forward does not shift what it returns, as a critic's values are."""

        def forward(chunk: Any, microbatch: Any) -> Any:
            tokens = microbatch["input_ids"]
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            output = chunk(tokens, positions, microbatch["attention_mask"])
            return output[..., 0] if output.shape[-1] == 1 else output

        def rows(seed: int, number: int, replica: int) -> dict[str, Any]:
            # All pairs count: one of a masked and a valid row would be a group without a pair.
            return {**rows_of(seed, number, replica), "sample_mask": torch.ones(number).cuda()}

        names = _page()
        return cls(_head(names), forward, names["PairLoss"](), rows, names)


def _page() -> dict[str, Any]:
    names: dict[str, Any] = {}
    shown = documented("critic")
    for program in (shown[0], shown[2]):
        exec(program, names)
    return names


def _head(names: dict[str, Any]) -> Callable[[Any], None]:
    def before_ddp(module: Any) -> None:
        names["add_value_head"](getattr(module, "module", module))

    return before_ddp


def rows_of(seed: int, number: int, replica: int) -> dict[str, Any]:
    """Rows with old values and returns, of which two in a row are a pair."""
    generator = torch.Generator().manual_seed(seed)
    hidden_TT = torch.ones(T, T).tril() < 0.5
    return {
        **data(seed, number, replica),
        "attention_mask": hidden_TT.expand(number, 1, T, T).cuda(),
        "old_values": torch.randn(number, T, generator=generator).cuda() * 0.1,
        "returns": torch.randn(number, T, generator=generator).cuda(),
        "lengths": torch.randint(1, T, (number,), generator=generator).cuda(),
        "group_ids": torch.arange(number).cuda() // ROWS + 1000 * replica,
    }
