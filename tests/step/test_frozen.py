"""Adapters beside frozen weights: turns, log-probs of a frozen head, and the norm.

Their steps in pieces are rows of test_programs.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lora import Lora, use
from ranks import patch
from scenario import Bench

from megatron_idempotent import token_logprobs
from megatron_idempotent.logprobs import shift_targets
from megatron_idempotent.proof.cpu import tiny

pytestmark = pytest.mark.full

GATHERS = {"overlap_param_gather": True}
SMALL = {"ddp_overrides": {"bucket_size": 600}}  # a few adapters in each bucket
LAST = {"layers": (3, 4)}
SHARED = {"experts": 4, "ep": 2, **GATHERS}
#: Layout → ranks, options of the model, what is trained of it: arguments of `Lora`.
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dp2": (2, {**GATHERS, **SMALL}, {}),
    "tp2, sequence parallel": (2, {"tp": 2, "sequence_parallel": True}, {}),
    "pp2, nothing on the first stage": (2, {"pp": 2}, LAST),
    "pp2, experts of the last stage": (2, {"experts": 4, "pp": 2}, LAST),
    "ep2, attention only": (2, SHARED, {"targets": ("linear_qkv", "linear_proj")}),
}


BOTH, ONE, OTHER = ("first", "second"), ("first",), ("second",)


def in_turn(overlap: bool, turns: list[tuple[str, ...]]) -> list[bytes]:
    """Runs on a rank: parameters after steps that train some of the adapters each."""

    # No clipping: a norm is summed in another order where buckets are others.
    bench = Bench(
        before_ddp=Lora(adapters=BOTH),
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        optimizer_overrides={"clip_grad": 0.0},
        **SMALL,
    )
    found = []
    for seed, names in enumerate(turns):
        use(bench.model.chunks, *names)
        bench.run([bench.batch(1, seed=seed), bench.batch(1, seed=seed + 9)])
        found.append(bench.parameters().numpy().tobytes())
    return found


def test_adapters_may_take_turns_where_reductions_are_held_back(megatron_ranks):
    turns = [BOTH, BOTH, ONE, OTHER, BOTH]
    held, plain = (megatron_ranks(2, in_turn, overlap, turns) for overlap in (True, False))
    assert held == plain
    assert held[0] == held[1]


def head_gradients(instead: bool, options: dict[str, Any]) -> list[Any]:
    """Runs on a rank: gradients by log-probs of a frozen head, from hidden states or logits."""
    from megatron_idempotent.logprobs import model_logprobs

    patch()
    from megatron.core import parallel_state

    model = tiny.build(before_ddp=Lora(), with_optimizer=False, **options)
    (chunk,) = model.chunks
    tokens_BT = next(tiny.microbatches(0))
    positions_BT = torch.arange(tiny.SEQUENCE).expand(tiny.BATCH, -1)
    mask = torch.ones(1, 1, tiny.SEQUENCE, tiny.SEQUENCE).tril() < 0.5
    inputs, targets = (tokens_BT, positions_BT, mask), shift_targets(tokens_BT)
    if instead:
        stats = model_logprobs(chunk, *inputs, targets=targets)
    else:
        group = parallel_state.get_tensor_model_parallel_group()
        stats = token_logprobs(logits=chunk(*inputs), targets=targets, tp_group=group)
    stats.logprob.sum().backward()
    return [p.main_grad.clone() for p in chunk.module.parameters() if p.requires_grad]


# What is added up in float32 on the way: words, features, and positions of all rows.
TERMS = 128 + 64 + 2 * 32


@pytest.mark.parametrize(
    "options", [{}, {"tp": 2, "sequence_parallel": True}, {"tied": True}], ids=str
)
def test_logprobs_of_a_frozen_head_train_the_adapters(megatron_ranks, options):
    ranks = options.get("tp", 1)
    both = [megatron_ranks(ranks, head_gradients, way, options) for way in (True, False)]
    for found, wanted in zip(*both, strict=True):
        assert len(found) == len(wanted) > 0
        for mine, want in zip(found, wanted, strict=True):
            assert want.abs().max() > 0
            bound = TERMS * 2.0**-24 * float(want.abs().max())
            torch.testing.assert_close(mine, want, rtol=0, atol=bound)


def stepped_on(options: dict[str, Any], adapted: dict[str, Any], clip: float) -> Any:
    """Runs on a rank: the norm that a step tells; and of the gradients that this rank has stepped
    on,     as Adam's first moments tell, the sum of squares and the number.
    """
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

    patch()
    model = tiny.build(
        before_ddp=Lora(**adapted), optimizer_overrides={"clip_grad": clip}, **options
    )
    model.forward_backward(2, data_seed=0)
    _, norm, _ = model.step()
    squares, elements = 0.0, 0
    for one in getattr(model.optimizer, "chained_optimizers", [model.optimizer]):
        for parameter, state in one.optimizer.state.items() if one.optimizer else ():
            if param_is_not_tensor_parallel_duplicate(parameter):
                beta = one.optimizer.defaults["betas"][0]
                squares += float((state["exp_avg"].double() / (1 - beta)).square().sum())
                elements += parameter.numel()
    return float(norm), squares, elements


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("dp2", marks=pytest.mark.exhaustive),
        "tp2, sequence parallel",
        "pp2, nothing on the first stage",
        pytest.param("ep2, attention only", marks=pytest.mark.exhaustive),
        "pp2, experts of the last stage",
    ],
)
def test_the_norm_is_that_of_what_is_trained_and_clips_it(megatron_ranks, layout):
    ranks, options, adapted = LAYOUTS[layout]
    small = 1e-3
    for clip in (1e9, small):
        found = megatron_ranks(ranks, stepped_on, options, adapted, clip)
        norms, squares, elements = zip(*found, strict=True)
        used, tolerance = sum(squares) ** 0.5, sum(elements) * 2.0**-24
        assert len(set(norms)) == 1
        assert norms[0] > small
        # Megatron adds a millionth to the norm that it divides by.
        assert used == pytest.approx(min(norms[0], clip), rel=tolerance + 1e-6 / norms[0])
