"""Calls that make no sense are refused, with the fact, before anything is computed or sent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_idempotent import TokenStats, token_logprobs
from megatron_idempotent.logprobs import (
    Sampling,
    context_parallel_part,
    context_parallel_whole,
    shift_targets,
    topk_kl,
    vocab_topk,
)

LOGITS, ZEROS = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
HIDDEN: dict[str, Any] = {"logits": None, "hidden": LOGITS}
WITH_WEIGHT = {**HIDDEN, "weight": torch.zeros(7, 4)}
FUSED = {"gradient_accumulation_fusion": True}
SEVERAL = torch.zeros(2, 3, 4, dtype=torch.int64)


def with_main_grad() -> torch.Tensor:
    weight = torch.zeros(7, 4)
    weight.main_grad = torch.zeros(3, 4)
    return weight


OF_LOGPROBS: list[tuple[dict[str, Any], str]] = [
    ({"logits": SEVERAL}, "int64 and shape (2, 3, 4)"),
    ({"targets": torch.zeros(2, 3)}, "float32 and shape (2, 3)"),
    ({"targets": ZEROS.t()}, "shape (3, 2)"),
    ({"targets": ZEROS + 4}, "target 4"),
    ({"targets": ZEROS - 1}, "target -1"),
    ({"targets": ZEROS + 3, "vocab_size": 3}, "target 3, outside of the vocabulary of 3"),
    ({"vocab_size": 5}, "vocab_size=5, and 1 ranks with 4"),
    ({"vocab_size": 0}, "vocab_size=0"),
    ({"temperature": 0.0}, "temperature 0.0"),
    ({"temperature": -torch.ones(2, 3)}, "temperature -1.0"),
    ({"temperature": torch.ones(3)}, "temperature of shape (3,)"),
    ({"temperature": float("nan")}, "temperature nan"),
    ({"temperature": torch.ones(2, 3, requires_grad=True)}, "detach() it"),
    ({"temperature": "0.7"}, "temperature='0.7': pass a positive number"),
    ({"temperature": None}, "temperature=None"),
    ({"token_mask": ZEROS}, "token_mask of torch.int64"),
    ({"token_mask": [True]}, "as token_mask a list: pass a dense torch.Tensor"),
    ({"ignore_index": None}, "ignore_index=None: pass an int"),
    ({"ignore_index": -100.0}, "ignore_index=-100.0"),
    ({"sampling": "greedy"}, "sampling='greedy': pass a Sampling, or None"),
    ({"logits": LOGITS.numpy()}, "as logits a ndarray"),
    ({"logits": LOGITS.to_sparse()}, "as logits a tensor of layout torch.sparse_coo"),
    ({"logits": LOGITS.to("meta")}, "as logits a tensor on the meta device"),
    ({"targets": ZEROS.to("meta")}, "as targets a tensor on the meta device, which has no values"),
    ({"targets": ZEROS.tolist()}, "as targets a list"),
    ({"targets": None}, "as targets a NoneType"),
    ({**HIDDEN, "weight": LOGITS[0].numpy()}, "as weight a ndarray"),
    ({"entropy": "mean"}, "entropy='mean'"),
    ({"ownership": "steal"}, "ownership='steal'"),
    ({"workspace_bytes": 0}, "workspace_bytes=0"),
    ({"logits": None}, "neither"),
    (HIDDEN, "got hidden"),
    ({"hidden": LOGITS}, "got logits, hidden"),
    ({**HIDDEN, "weight": torch.zeros(7, 5)}, "(2, 3, 4) with weight"),
    ({**WITH_WEIGHT, "ownership": "consume"}, "no logits are kept"),
    ({"hidden_layout": "sequence_parallel"}, "hidden_layout='sequence_parallel'"),
    ({"hidden_layout": "ring"}, "hidden_layout='ring'"),
    (FUSED, "got no weight"),
    ({**WITH_WEIGHT, **FUSED}, "weight of shape (7, 4) with none"),
    ({**HIDDEN, "weight": with_main_grad(), **FUSED}, "with one of shape (3, 4)"),
    # What K targets cannot be, and what computes one target only.
    ({"targets": SEVERAL[0]}, "or (2, 3, 'K') for K of each token"),
    ({"targets": SEVERAL[..., :0]}, "at least one each"),
    ({"targets": SEVERAL + torch.tensor([0, 0, 0, 9])}, "target 9, outside"),
    ({"targets": SEVERAL - torch.tensor([0, 0, 0, 1])}, "target -1, outside"),
    ({"targets": SEVERAL, "triton": True}, "triton=True, which knows one"),
    ({"targets": SEVERAL, "sampling": Sampling(top_k=3)}, "sampling=Sampling(top_k=3"),
    # Ids that a sampler kept.
    ({"sampling": Sampling(keep=SEVERAL[0])}, "keep of shape (3, 4)"),
    ({"sampling": Sampling(keep=SEVERAL + 9)}, "id 9"),
    ({"sampling": Sampling(keep=SEVERAL - 1, target="-inf")}, "names no id"),
]
LOGPROBS = torch.full((2, 3, 4), -2.0)
OF_KL: list[tuple[dict[str, Any], str]] = [
    ({"direction": "sideways"}, "direction='sideways'"),
    ({"mix": 1.5}, "mix=1.5"),
    ({"tail": "cut"}, "tail='cut'"),
    ({"teacher_logprobs": LOGPROBS[..., 1:]}, "teacher_logprobs of shape (2, 3, 3)"),
    ({"teacher_rest": LOGPROBS}, "teacher_rest of shape (2, 3, 4)"),
    ({"valid": ZEROS > 0}, "valid of shape (2, 3) for"),
]
OF_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"top_k": -2}, "top_k=-2"),
    ({"top_k": 2.0}, "top_k=2.0"),
    ({"top_p": 0.0}, "top_p=0.0"),
    ({"top_p": 1.5}, "top_p=1.5"),
    ({"top_p": float("nan")}, "top_p=nan"),
    ({"top_p": "0.9"}, "top_p='0.9'"),
    ({"target": "drop"}, "target='drop'"),
    ({"candidates": 0}, "candidates=0"),
    ({"keep": [1]}, "keep of list"),
    ({"keep": torch.ones(2)}, "keep of torch.float32"),
    ({"keep": ZEROS[0], "top_k": 3}, "keep, top_k=3"),
]
TOKENS, TWO = torch.zeros(2, 8, dtype=torch.int64), [torch.zeros(4), torch.zeros(6)]
FLOATS = torch.tensor([0.0, 1])
ONE_EACH = TokenStats(LOGITS[..., 0], None, LOGITS[..., 0])
FOUR_EACH = TokenStats(LOGPROBS, None, LOGITS[..., 0], LOGITS[..., 0])
OTHERS: list[tuple[Callable[[], object], str]] = [
    *(
        (lambda k=k: vocab_topk(logits=LOGITS, k=k), f"vocab_topk() got k={k!r}: from 1 to 4")
        for k in (0, 5, True, 2.0)
    ),
    (lambda: vocab_topk(logits=LOGITS, k=1, ignore_index=None), "ignore_index=None"),
    (lambda: topk_kl(FOUR_EACH, LOGPROBS.numpy()), "as teacher_logprobs a ndarray"),
    (lambda: shift_targets(TOKENS, ignore_index=None), "ignore_index=None"),
    (lambda: topk_kl(ONE_EACH, LOGPROBS), "one for each token"),
    (lambda: shift_targets(TOKENS.float()), "float32"),
    (lambda: shift_targets(TOKENS, mask=TOKENS[:, 1:]), "mask of shape (2, 7)"),
    (lambda: shift_targets(TOKENS, cu_seqlens=FLOATS), "cu_seqlens of"),
    (lambda: context_parallel_part(TOKENS, rank=2, size=2), "rank 2 of 2"),
    (lambda: context_parallel_part(TOKENS, rank=0, size=3), "multiple of 6"),
    (lambda: context_parallel_whole(TWO), "shapes [(4,), (6,)]"),
    (lambda: context_parallel_whole(torch.zeros(2, 3)), "3 positions from each of 2"),
    (lambda: context_parallel_whole(TWO, losses="all"), "losses='all'"),
    (lambda: context_parallel_whole(TWO, group=1), "a group and a list"),
]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        *(
            pytest.param(functools.partial(call, **{**right, **given}), said, id=said)
            for call, right, table in (
                (token_logprobs, {"logits": LOGITS, "targets": ZEROS}, OF_LOGPROBS),
                (topk_kl, {"stats": FOUR_EACH, "teacher_logprobs": LOGPROBS}, OF_KL),
                (Sampling, {}, OF_SAMPLING),
            )
            for given, said in table
        ),
        *(pytest.param(call, said, id=said) for call, said in OTHERS),
    ],
)
def test_errors_name_the_fact(call, said):
    with pytest.raises(ValueError, match=r"\w+\(") as told:
        call()
    assert said in str(told.value)
