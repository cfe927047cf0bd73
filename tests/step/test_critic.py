"""The critic and the reward model of docs/train-step/critic.md, in what they report.

Their steps in pieces are rows of test_programs.py.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from critic import Task
from ranks import on_ranks
from scenario import ROWS, Bench, cut, documented

pytestmark = pytest.mark.full


@pytest.mark.parametrize("options", [{"pp": 2}, {"tp": 2, "sequence_parallel": True}], ids=str)
@on_ranks(2, timeout_s=120)
def test_the_documented_critic_trains_and_tells_its_values(options: dict[str, Any]) -> None:
    """The page's step, in two calls; and values of the parameters as they are, in the middle."""
    from megatron.core import parallel_state as ps

    task = Task.critic()
    bench = Bench(before_ddp=task.before_ddp, loss=task.loss, **options)
    has_loss = ps.is_pipeline_last_stage()
    batch = task.rows(1, 4 * ROWS, bench.replica)
    # The documented step, with the sizes of this one.
    program = documented("critic")[1].replace("micro_batch_size=4", f"micro_batch_size={ROWS}")
    program = program.replace("global_batch_size=256", "global_batch_size=8")
    program = re.sub(
        r'(    )values = (.*)\.outputs\["values"\].*', r"\1receipts.append(\2)", program
    )
    names = {**task.names, "chunks": bench.model.chunks, "optimizer": bench.optimizer}
    names |= {"scheduler": bench.scheduler, "stream": cut(batch, [1, 3]), "receipts": []}
    exec(program, names)
    values = [row for each in names["receipts"] for row in each.outputs.get("values", ())]
    assert len(values) == (len(batch["input_ids"]) if has_loss else 0)
    if has_loss:
        _check_metrics(torch.stack(values), batch, names["result"])

    step = names["critic"]
    step_id = step.begin(task.loss, global_batch_size=8, micro_batch_size=ROWS)
    (piece,) = cut(batch, [1])
    receipt = step.microbatch(step_id, piece)
    with step.reading() as chunks:
        read = _values(chunks, task.forward, [piece])
    assert bench.model.chunks[0].training
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
    """Hold the step's metrics against float64; this replica is the only one."""
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


@pytest.mark.parametrize("options", [{}, {"pp": 2}], ids=str)
@on_ranks(2, timeout_s=120)
def test_a_reward_model_tells_scores_and_counts_pairs(options: dict[str, Any]) -> None:
    """Scores are of the last token, one for each sequence; accuracy counts pairs of all ranks."""
    from megatron.core import parallel_state as ps

    task = Task.reward()
    bench = Bench(
        before_ddp=task.before_ddp, loss=task.loss, step={"forward": task.forward}, **options
    )
    step_id = bench.begin()
    receipt = bench.step.microbatch(step_id, task.rows(1, 4 * ROWS, bench.replica))
    result = bench.step.finish(step_id)
    right = torch.zeros(1)
    if ps.is_pipeline_last_stage():
        scores = torch.stack(receipt.outputs["scores"])
        right += (scores[0::2] > scores[1::2]).sum().cpu()
        assert len(set(scores.tolist())) == len(scores)
    dist.all_reduce(right)
    pairs = 4 * ps.get_data_parallel_world_size()
    assert result.metrics["accuracy"] == float(right) / pairs
