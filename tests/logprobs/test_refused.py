"""Calls that make no sense are refused before anything is computed or sent."""

from __future__ import annotations

from typing import Any

import pytest


def refused() -> dict[str, str]:
    """Runs on a rank: what each wrong call is told."""
    import torch
    import torch.distributed as dist

    from megatron_idempotent import token_logprobs

    right = {"logits": torch.zeros(2, 3, 4), "targets": torch.zeros(2, 3, dtype=torch.int64)}
    wrong: dict[str, dict[str, Any]] = {
        "int64 and shape (2, 3, 4)": {"logits": torch.zeros(2, 3, 4, dtype=torch.int64)},
        "float32 and shape (2, 3)": {"targets": torch.zeros(2, 3)},
        "shape (3, 2)": {"targets": torch.zeros(3, 2, dtype=torch.int64)},
        "target 4": {"targets": torch.full((2, 3), 4)},
        "target -1": {"targets": torch.full((2, 3), -1)},
        "target 3, outside of the vocabulary of 3": {
            "targets": torch.full((2, 3), 3),
            "vocab_size": 3,
        },
        "vocab_size=5, and 1 ranks with 4": {"vocab_size": 5, "tp_group": dist.group.WORLD},
        "vocab_size=0": {"vocab_size": 0},
        "temperature 0.0": {"temperature": 0.0},
        "temperature -1.0": {"temperature": torch.full((2, 3), -1.0)},
        "temperature of shape (3,)": {"temperature": torch.ones(3)},
        "temperature nan": {"temperature": float("nan")},
        "token_mask of torch.int64": {"token_mask": torch.ones(2, 3, dtype=torch.int64)},
        "entropy='mean'": {"entropy": "mean"},
        "ownership='steal'": {"ownership": "steal"},
        "workspace_bytes=0": {"workspace_bytes": 0},
        "neither": {"logits": None},
        "got hidden": {"logits": None, "hidden": torch.zeros(2, 3, 4)},
        "got logits, hidden": {"hidden": torch.zeros(2, 3, 4)},
        "(2, 3, 4) with weight": {
            "logits": None,
            "hidden": torch.zeros(2, 3, 4),
            "weight": torch.zeros(7, 5),
        },
        "no logits are kept": {
            "logits": None,
            "hidden": torch.zeros(2, 3, 4),
            "weight": torch.zeros(7, 4),
            "ownership": "consume",
        },
        "hidden_layout='sequence_parallel'": {"hidden_layout": "sequence_parallel"},
        "hidden_layout='ring'": {"hidden_layout": "ring"},
        "detach() it": {"temperature": torch.ones(2, 3, requires_grad=True)},
    }
    told = {}
    for text, change in wrong.items():
        with pytest.raises(ValueError, match=r"token_logprobs\(") as error:
            token_logprobs(**{**right, **change})
        told[text] = str(error.value)
    return told


def test_errors_name_the_fact(megatron_ranks):
    (told,) = megatron_ranks(1, refused)
    for text, message in told.items():
        assert text in message
