"""A critic and a reward model, as docs/train-step/critic.md has them: in pieces and in one call."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, tiered
from scenario import (
    DEADLINE_S,
    ROWS,
    T,
    build,
    cut,
    data,
    documented,
    mask_of,
    one_shot,
    parameters,
    split_step,
)

pytestmark = pytest.mark.full

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {"overlap_param_gather": True}),
    "tp2": (2, {"tp": 2}),
    "tp2, sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "pp2, bf16": (2, {"pp": 2, "dtype": "bf16"}),
    "tp2 pp2, sequence parallel": (4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
}
ALWAYS = ("tp2, sequence parallel", "pp2")


def _data(seed: int, microbatches: int, replica: int) -> dict[str, Any]:
    rows = microbatches * ROWS
    generator = torch.Generator().manual_seed(seed)
    hidden_TT = torch.ones(T, T).tril() < 0.5
    return {
        **data(seed, rows, replica),
        "attention_mask": hidden_TT.expand(rows, 1, T, T).cuda(),
        "old_values": torch.randn(rows, T, generator=generator).cuda() * 0.1,
        "returns": torch.randn(rows, T, generator=generator).cuda(),
        "lengths": torch.randint(1, T, (rows,), generator=generator).cuda(),
        "group_ids": torch.arange(rows).cuda() // 2 + 1000 * replica,
    }


def _made(options: dict[str, Any]) -> tuple[dict[str, Any], Any, Any, int]:
    """The documented names, and a model with the documented head."""
    names: dict[str, Any] = {}
    shown = documented("critic")
    for program in (shown[0], shown[2]):
        exec(program, names)

    def before_ddp(module: Any) -> None:
        names["add_value_head"](getattr(module, "module", module))

    return names, *build(before_ddp=before_ddp, **options)


def _seen(model: Any, norm: Any) -> list[Any]:
    return [torch.tensor(float(norm)), model.gradients(), parameters(model)]


def critic(options: dict[str, Any]) -> None:
    """Runs on a rank: the documented step, against one schedule call, and what it tells."""
    from megatron.core import parallel_state as ps

    names, model, scheduler, replica = _made(options)
    sizes = [1, 3]
    # The documented step, with the sizes of this one.
    given = {**names, "chunks": model.chunks, "optimizer": model.optimizer, "scheduler": scheduler}
    program = documented("critic")[1].replace("micro_batch_size=4", f"micro_batch_size={ROWS}")
    program = program.replace("global_batch_size=256", "global_batch_size=8")
    found = []
    has_loss = ps.is_pipeline_last_stage()
    program = re.sub(
        r'(    )values = (.*)\.outputs\["values"\].*', r"\1receipts.append(\2)", program
    )
    for seed in (1, 2):
        batch = _data(seed, sum(sizes), replica)
        receipts: list[Any] = []
        exec(program, given | {"stream": cut(batch, sizes), "receipts": receipts}, given)
        found += _seen(model, given["result"].grad_norm)
        values = [row for receipt in receipts for row in receipt.outputs.get("values", ())]
        assert len(values) == (len(batch["input_ids"]) if has_loss else 0)
        if seed == 1 and has_loss:
            _check_metrics(torch.stack(values), batch, given["result"])

    loss = names["ValueLoss"](clip=0.2)
    _, whole, schedule, _ = _made(options)
    wanted = []
    for seed in (1, 2):
        batch = _data(seed, sum(sizes), replica)
        norm = one_shot(whole, schedule, loss, batch, forward=names["forward"])
        wanted += _seen(whole, norm)
    assert float(wanted[0]) > 0
    assert all(map(torch.equal, found, wanted))
    assert mask_of(batch).any()

    # Values of the parameters as they are, in the middle of a step.
    step = given["critic"]
    step_id = step.begin(loss, global_batch_size=8, micro_batch_size=ROWS)
    (piece,) = cut(batch, [1])
    receipt = step.microbatch(step_id, piece)
    with step.reading() as chunks:
        read = _values(chunks, names["forward"], [piece])
    assert model.chunks[0].training
    step.finish(step_id)
    if has_loss:
        assert torch.equal(torch.stack(receipt.outputs["values"]), read[0])


def _values(chunks: Any, forward: Any, microbatches: list[Any]) -> list[Any]:
    """Values [B, T] of each microbatch, on the last stage, as the document says to read them."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(data_iterator: Any, chunk: Any) -> Any:
        return forward(chunk, next(data_iterator)), lambda output, **_: output

    rows, length = microbatches[0]["input_ids"].shape
    found: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(microbatches),
        model=chunks,
        num_microbatches=len(microbatches),
        seq_length=length,
        micro_batch_size=rows,
        forward_only=True,
        collect_non_loss_data=True,
    )
    return found


def _check_metrics(values_BT: Any, batch: dict[str, Any], result: Any) -> None:
    """Hold the step's metrics against float64, where this replica is the only one."""
    from megatron.core import parallel_state as ps

    if ps.get_data_parallel_world_size() > 1:
        return
    valid_BT = (batch["token_mask"] * batch["sample_mask"][:, None]).double()
    valid_BT[:, 0] = 0
    values, old, returns = (
        each.double() for each in (values_BT, batch["old_values"], batch["returns"])
    )
    clip = torch.tensor(0.2).double()
    clipped = old + (values - old).clamp(-clip, clip)
    errors = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) * valid_BT
    number = int(valid_BT.sum())
    assert result.rows[0]["global_valid_toks"] == number
    wanted = 0.5 * float(errors.sum()) / number
    # Of each term: the clipped value, its difference, the square, all to half a unit of float32;
    # then each of the sums, over all places of a microbatch, rounds once a place.
    largest = float(torch.stack((values, old, returns)).abs().max())
    bound = 2.0**-24 * (16 * largest**2 + errors.numel() * float(errors.sum()) / number)
    assert abs(result.metrics["value_loss"] - wanted) <= bound
    fraction = float((((values - old).abs() > clip) * valid_BT).sum()) / number
    assert 0 < fraction < 1
    assert result.metrics["value_clip_fraction"] == pytest.approx(fraction, rel=2.0**-50)


@pytest.mark.parametrize("layout", tiered(LAYOUTS, ALWAYS))
def test_a_critic_in_pieces_is_the_critic_at_once(megatron_ranks, layout):
    ranks, options = LAYOUTS[layout]
    megatron_ranks(ranks, critic, options, timeout_s=200)


@pytest.mark.parametrize("options", [{}, {"pp": 2}], ids=str)
@on_ranks(2, timeout_s=200)
def test_a_reward_model_in_pieces_is_the_one_at_once(options: dict[str, Any]) -> None:
    """A reward model in pieces and at once; its metrics, against the scores."""
    from megatron.core import parallel_state as ps

    from megatron_idempotent import TrainStep

    names, model, scheduler, replica = _made(options)

    def forward(chunk: Any, microbatch: Any) -> Any:
        # The documented one shifts what it returns, as a critic's values are.
        tokens = microbatch["input_ids"]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        output = chunk(tokens, positions, microbatch["attention_mask"])
        return output[..., 0] if output.shape[-1] == 1 else output

    loss = names["PairLoss"]()
    step = TrainStep(
        model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=DEADLINE_S
    )
    batches = []
    for seed in (1, 2):
        batch = _data(seed, 4, replica)
        # Pairs of all ranks are a power of two, whose inverse is exact.
        batch["sample_mask"] = torch.ones(4 * ROWS).cuda()
        batches.append(batch)
    results = [split_step(step, loss, each, [1, 3]) for each in batches]
    assert all(result.updated for result in results)
    found = _seen(model, results[-1].grad_norm)

    _, whole, schedule, _ = _made(options)
    for batch in batches:
        norm = one_shot(whole, schedule, loss, batch, forward=forward)
    wanted = _seen(whole, norm)
    assert float(wanted[0]) > 0
    assert all(map(torch.equal, found, wanted))

    # Scores are of the last token, one for each sequence, and accuracy counts pairs of all ranks.
    step_id = step.begin(loss, global_batch_size=8, micro_batch_size=ROWS)
    receipt = step.microbatch(step_id, batches[0])
    result = step.finish(step_id)
    right = torch.zeros(1)
    if ps.is_pipeline_last_stage():
        scores = torch.stack(receipt.outputs["scores"])
        right += (scores[0::2] > scores[1::2]).sum().cpu()
        assert len(set(scores.tolist())) == len(scores)
    dist.all_reduce(right)
    pairs = 4 * ps.get_data_parallel_world_size()
    assert result.metrics["accuracy"] == float(right) / pairs
