"""A step under context parallelism is the step of one rank: gradient, counts, metrics and rows."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from ranks import on_ranks, tiered
from scenario import Bench, TokenLoss, cut, mask_of, raised_by

from megatron_idempotent.proof.cpu import tiny
from megatron_idempotent.step import all_positions, own_positions

pytestmark = pytest.mark.full

# All is in float64 but the cross entropy, which upstream computes in float32: a term for each word,
# and a few roundings more. The aux loss of experts has fewer.
TOLERANCE = (128 + 32) * 2.0**-24


def loss_that(kind: str, returned: str, bad_rank: int | None) -> Any:
    """Cross entropy over valid tokens, of this rank's positions or of whole rows."""

    class Loss(TokenLoss):
        context_parallel = returned

        def __call__(self, output: Any, microbatch: Any) -> Any:
            if returned == "part":
                total, metrics = super().__call__(output, microbatch)
            else:
                whole_BT = all_positions(output)
                total = (whole_BT.float() * mask_of(microbatch)).sum()
                metrics = {
                    "nll": total,
                    "nll_by_sequence": total,
                    "rows": len(whole_BT),
                    "nll_max": whole_BT.max(),
                    "nll_min": whole_BT.min(),
                }
            if torch.distributed.get_rank() == bad_rank:
                total = total * float("nan")
            return total, metrics

    Loss.kind = kind
    return Loss()


def stepped(
    options: dict[str, Any],
    kind: str = "token",
    returned: str = "part",
    per_token: bool = True,
    bad_rank: int | None = None,
    positions: int | None = None,
) -> Any:
    """Runs on a rank: a step of 8 rows in two batches; its place, result and gradients."""
    from megatron.core import parallel_state

    from megatron_idempotent.step import gpt_forward

    torch.set_default_dtype(torch.float64)
    overrides = {
        "calculate_per_token_loss": per_token,
        "params_dtype": torch.float64,
        "pipeline_dtype": torch.float64,
        **options.get("config_overrides", {}),
    }
    bench = Bench(
        step={"forward": gpt_forward} if positions else {},
        loss=loss_that(kind, returned, bad_rank),
        distributed_optimizer=False,
        ddp_overrides={"grad_reduce_in_fp32": False},
        optimizer_overrides={"clip_grad": 0.0},  # Megatron clips float32 only
        **{**options, "config_overrides": overrides},
    )
    batch = {name: value[..., :positions] for name, value in bench.batch(4).items()}
    result = bench.run(list(cut(batch, [2, 2])))
    gradients = {
        f"{index} {name}": parameter.main_grad.clone()
        for index, chunk in enumerate(bench.model.chunks)
        for name, parameter in chunk.module.named_parameters()
    }
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    return place, result, gradients


#: Name → ranks, options of the model, and of the loss.
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "cp2": (2, {"cp": 2}, {}),
    "cp2, averaged, whole": (
        2,
        {"cp": 2},
        {"per_token": False, "returned": "whole", "kind": "sequence"},
    ),
    "cp2 dp2, averaged": (4, {"cp": 2}, {"per_token": False}),
    "cp4, whole": (4, {"cp": 4}, {"returned": "whole"}),
    "cp2 tp2, averaged": (4, {"cp": 2, "tp": 2, "sequence_parallel": True}, {"per_token": False}),
    "cp2 pp2 vpp2": (4, {"cp": 2, "pp": 2, "vpp": 2, "layers_per_stage": 1}, {}),
    "cp2 experts, averaged": (2, {"cp": 2, "experts": 4}, {"per_token": False}),
    "cp2 dp2 ep2": (4, {"cp": 2, "experts": 4, "ep": 2}, {}),
}
ALWAYS = ("cp2, averaged, whole", "cp2 tp2, averaged", "cp2 dp2 ep2")


@pytest.mark.parametrize("layout", tiered(LAYOUTS, ALWAYS))
def test_it_is_the_step_of_one_rank(megatron_ranks, layout):
    ranks, options, how = LAYOUTS[layout]
    cp = options["cp"]
    known = {}
    alone = {**options, "cp": 1}
    for place, result, gradients in megatron_ranks(ranks // cp, stepped, alone, **how):
        known[place] = result, gradients
    found = megatron_ranks(ranks, stepped, options, **how)
    for place, result, gradients in found:
        whole, wanted = known[place]
        assert result.updated
        assert result.global_valid_tokens == whole.global_valid_tokens > 0
        assert result.global_valid_sequences == whole.global_valid_sequences
        assert result.microbatches == whole.microbatches
        assert result.grad_norm == pytest.approx(whole.grad_norm, rel=TOLERANCE)
        assert result.metrics == pytest.approx(whole.metrics, rel=TOLERANCE)
        for mine, row in zip(result.rows, whole.rows, strict=True):
            assert {**mine, "rank": 0} == pytest.approx({**row, "rank": 0}, rel=TOLERANCE)
        for name, gradient in gradients.items():
            largest = wanted[name].abs().max()
            assert (gradient - wanted[name]).abs().max() <= TOLERANCE * largest, name
    # Each microbatch is reported once.
    rows = [len(result.own_rows) for _, result, _ in found]
    assert sum(rows) == len(found[0][1].rows)


def refused(options: dict[str, Any], **how: Any) -> str:
    """Runs on a rank: what is said of such a step."""
    return str(raised_by(stepped, options, **how))


@pytest.mark.parametrize(
    ("ranks", "how", "said"),
    [
        (2, {"bad_rank": 1}, "rank 1: the loss of its microbatch 1 is nan"),
        (2, {"positions": 30}, r"rows of 30 positions for 2 .* a multiple of 4"),
        (1, {"returned": "half"}, "`context_parallel` is 'half': give it one of 'part'"),
    ],
    ids=["a part that is NaN", "rows that cannot be dealt out", "neither part nor whole"],
)
def test_a_step_that_ranks_cannot_share_is_refused_on_all_of_them(megatron_ranks, ranks, how, said):
    for told in megatron_ranks(ranks, refused, {"cp": ranks}, **how):
        assert re.search(said, told), told


@on_ranks(2)
def test_rows_are_cut_with_their_positions_and_masks() -> None:
    from megatron_idempotent.step.megatron import gpt_forward

    torch.set_default_dtype(torch.float64)
    wide = {"params_dtype": torch.float64}
    model = tiny.build(cp=2, with_optimizer=False, wire=False, config_overrides=wide)
    tokens_BT = torch.arange(64, device="cuda").view(2, 32) % tiny.VOCABULARY
    hidden = torch.ones(1, 1, 32, 32, device="cuda").tril() < 0.5
    found = [
        gpt_forward(model.chunks[0], {"input_ids": tokens_BT, **more})
        for more in (
            {},
            {"attention_mask": hidden},
            {"position_ids": torch.arange(32, device="cuda").expand(2, -1)},
        )
    ]
    part = torch.rand(2, 16, 3, device="cuda", requires_grad=True)
    whole = all_positions(part)
    weights = torch.arange(192.0, device="cuda").view(2, 32, 3)
    (whole * weights).sum().backward()
    assert torch.equal(own_positions(whole), part)
    assert torch.equal(part.grad, own_positions(weights))
    off = max(float((each - found[0]).abs().max()) for each in found[1:])
    # With a mask all keys are summed over, without one those that can be seen: as many
    # roundings as there are keys and channels, in each of two layers, of numbers below 1.
    assert off <= 2 * (32 + 64) * 2.0**-52
    assert found[0].shape == (2, 16, 128)
