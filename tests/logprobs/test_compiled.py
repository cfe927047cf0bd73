"""Compiled blocks compute what the others do, within the same bounds."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from ranks import on_ranks


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))),
    reason="torch.compile needs a C++ compiler for a CPU",
)
@on_ranks(1, timeout_s=180.0)
def test_compiled_blocks_stay_within_the_same_bounds() -> None:
    """Random calls in two types, against float64; and from hidden states, and
    cut."""
    import warnings

    import torch
    from cases import case, close, total, truth

    from megatron_idempotent import token_logprobs
    from megatron_idempotent.logprobs import Sampling, statistics

    done: set[tuple[Any, str]] = set()
    for seed in range(300):
        given = case(seed, 1)
        kind = given.whole.dtype, given.arguments["entropy"]
        # Each kind takes seconds to compile, whatever its shape; one row or column is one more.
        few = given.whole.shape[-1] == 1 or given.of_logprob.numel() < 6
        if few or kind in done or kind not in {(torch.float32, "grad"), (torch.bfloat16, "none")}:
            continue
        if kind[1] == "none":  # of which the backward has no origin
            given.arguments["temperature"] = 1.0
            given.whole.mul_(0.1)
        leaf, logits = given.shard(0, 1)
        given.arguments["workspace_bytes"] = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stats = token_logprobs(logits=logits, compiled=True, **given.arguments)
        found = stats._asdict()
        total(found, given).backward()
        values, bounds = truth(given)
        for what, value in {**found, "gradient": leaf.grad}.items():
            if value is not None:
                close(what, value, values[what], bounds[what], kind)
        done.add(kind)
    assert len(done) == 2
    assert statistics.compiled.cache_info().currsize == 2  # statistics and their gradient

    torch.manual_seed(0)
    arguments = {
        "hidden": torch.randn(9, 16, requires_grad=True),
        "weight": torch.randn(300, 16, requires_grad=True),
        "targets": torch.arange(9),
        "entropy": "grad",
        "workspace_bytes": 5000,
    }
    inputs = arguments["hidden"], arguments["weight"]
    for sampling in (None, Sampling(top_p=0.8)):
        found = []
        for each in (False, True):
            stats = token_logprobs(**arguments, sampling=sampling, compiled=each)
            summed = stats.logprob.sum() + stats.entropy.sum()
            found.append((*stats[:3], *torch.autograd.grad(summed, inputs)))
        # The same numbers below 20 in another order of roundings: V of them, and 16 products.
        for eager, fast in zip(*found, strict=True):
            torch.testing.assert_close(fast, eager, rtol=1e-5, atol=316 * 20 * 2.0**-24)
