"""`StepSchedule` takes the place of Megatron's schedule, in one call or in several."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, patch, tiered
from scenario import IS_0_12

from megatron_idempotent import step
from megatron_idempotent.proof.cpu import tiny

NUMBER = 4
MOE = {"experts": 4, "config_overrides": {"moe_aux_loss_coeff": 1.0}}
PER_TOKEN = {"config_overrides": {"moe_aux_loss_coeff": 1.0, "calculate_per_token_loss": True}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "dp2, fp16": {"dtype": "fp16", "loss_scale": 256.0},
    "dp2, experts": MOE,
    "dp2, experts, per token": {**MOE, **PER_TOKEN},
    "cp2": {"cp": 2},
    "cp2, per token": {"cp": 2, "config_overrides": {"calculate_per_token_loss": True}},
    "pp2": {"pp": 2},
    "pp2, interleaved": {"pp": 2, "vpp": 2},
}
#: Layouts in which all is compared; others are asked for by -m exhaustive.
ALWAYS = ("dp2, experts", "cp2", "pp2, interleaved")


class Program:
    """A framework's loop around a small model, with a forward step as Megatron's have."""

    def __init__(self, options: dict[str, Any], *, values: int = 2) -> None:
        patch()
        self.model = tiny.build(overlap_grad_reduce=False, **options)
        self.values = values
        self.size = {"seq_length": tiny.SEQUENCE, "micro_batch_size": tiny.BATCH}

    def batches(self, seed: int) -> list[Any]:
        return list(itertools.islice(tiny.microbatches(seed), NUMBER))

    def forward_step(self, iterator: Any, model: Any) -> tuple[Any, Any]:
        tokens_BT = next(iterator)
        positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        side = tokens_BT.shape[1]
        # Under context parallelism these are a rank's part, and attention knows what follows.
        hidden: Any = None
        if self.model.config.context_parallel_size == 1:
            hidden = torch.ones(1, 1, side, side, device=tokens_BT.device).tril() < 0.5
        output = model(tokens_BT, positions_BT.expand_as(tokens_BT), hidden)
        return output, lambda logits: self.loss(logits, tokens_BT)

    def loss(self, logits_BTV: Any, tokens_BT: Any) -> tuple[Any, ...]:
        logprobs_BTV = logits_BTV.float().log_softmax(-1)
        nll_BT = -logprobs_BTV.gather(-1, tokens_BT[..., None])[..., 0]
        if self.values == 3:  # of about two thirds of the tokens, as many as there are
            mask_BT = tokens_BT % 3 > 0
            tokens = mask_BT.sum(dtype=torch.int)
            return (nll_BT * mask_BT).sum(), tokens, {"first": int(tokens_BT[0, 0])}
        total = nll_BT.sum()
        return total / tokens_BT.numel(), {"first": int(tokens_BT[0, 0])}

    def call(self, schedule: Any, batches: list[Any], **options: Any) -> Any:
        chunks = self.model.chunks
        iterators = [iter(batches) for _ in chunks]
        return schedule(
            forward_step_func=self.forward_step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(batches),
            **self.size,
            **options,
        )

    def outcome(self) -> bytes:
        bits: bytes = self.model.parameters().cpu().numpy().tobytes()
        return bits


def in_one_call(options: dict[str, Any], ours: bool, values: int = 2) -> Any:
    """Runs on a rank: steps of one call each, of Megatron's schedule or of a `StepSchedule`."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    program = Program(options, values=values)
    model = program.model
    schedule = (
        step.StepSchedule(model.chunks, model.optimizer) if ours else get_forward_backward_func()
    )
    seen: list[Any] = []
    for seed in range(2):
        if not ours:
            for chunk in model.chunks:
                chunk.zero_grad_buffer()
            model.optimizer.zero_grad()
        seen.append(program.call(schedule, program.batches(seed)))
        seen.append(schedule.finish().grad_norm if ours else model.optimizer.step()[1])
    return program.outcome(), seen


def both(options: dict[str, Any], values: int = 2) -> list[bool]:
    """Runs on a rank; returns whether parameters, norms and what losses reported are the same."""
    want, got = in_one_call(options, False, values), in_one_call(options, True, values)
    assert want[1][1] > 0
    return [want[0] == got[0], want[1] == got[1]]


@pytest.mark.parametrize("layout", tiered(LAYOUTS, (*ALWAYS, "cp2, per token")))
def test_one_call_of_it_has_the_bits_of_megatrons_schedule(layout, megatron_ranks):
    assert megatron_ranks(2, both, LAYOUTS[layout]) == [[True, True]] * 2


@pytest.mark.parametrize("layout", tiered(LAYOUTS, ALWAYS))
def test_a_loss_of_sum_and_tokens_has_the_bits_of_megatrons_schedule(layout, megatron_ranks):
    if IS_0_12 and "cp" in LAYOUTS[layout]:
        pytest.skip("0.12 multiplies such losses by cp, or divides them by each rank's own tokens")
    for per_token in (False, True):
        assert (
            megatron_ranks(2, both, with_tokens(LAYOUTS[layout], per_token), 3)
            == [[True, True]] * 2
        )


def with_tokens(options: dict[str, Any], per_token: bool) -> dict[str, Any]:
    overrides = {**options.get("config_overrides", {}), "calculate_per_token_loss": per_token}
    return {**options, "config_overrides": overrides}


def at_different_times() -> bytes:
    """Runs on a rank: the second one makes its first call when the first one's has ended."""
    from torch.distributed.distributed_c10d import _get_default_store

    program = Program({})
    schedule = step.StepSchedule(program.model.chunks, program.model.optimizer)
    schedule.prepare()
    if dist.get_rank():
        _get_default_store().wait(["called"])
    program.call(schedule, program.batches(0))
    if not dist.get_rank():
        _get_default_store().set("called", "")
    assert schedule.finish().updated
    return program.outcome()


def test_ranks_that_are_prepared_make_their_first_calls_at_different_times(megatron_ranks):
    first, second = megatron_ranks(2, at_different_times)
    assert first == second


def in_two_calls(options: dict[str, Any], values: int = 2) -> bool:
    """Runs on a rank: a mean over each of two calls adds up to twice that over one call.

    With a count of tokens it is the mean over the tokens of both calls.
    """

    gradients = []
    for calls in (1, 2):
        program = Program(options, values=values)
        model = program.model
        schedule = step.StepSchedule(model.chunks, model.optimizer)
        batches = program.batches(0)
        for start in range(0, NUMBER, NUMBER // calls):
            program.call(schedule, batches[start : start + NUMBER // calls])
        result = schedule.finish()
        if values == 3:
            assert 0 < result.metrics["num_tokens"] < 2 * NUMBER * batches[0].numel()
        gradients.append(model.gradients() * (2 // calls if values == 2 else 1))
    return torch.equal(*gradients)


def test_calls_of_one_step_add_up(megatron_ranks):
    large = {"optimizer_overrides": {"clip_grad": 1e9}}
    for options in ({}, MOE):
        assert megatron_ranks(2, in_two_calls, {**options, **large}) == [True, True]
    assert megatron_ranks(2, in_two_calls, with_tokens(large, True), 3) == [True, True]


@on_ranks(2)
def test_auxiliary_losses_count_as_the_caller_says() -> None:
    """MoE's loss counts as the caller says."""

    gradients = []
    for coefficient, weight in ((1.0, None), (2.0, lambda _: 1 / (2 * NUMBER))):
        program = Program({**MOE, "config_overrides": {"moe_aux_loss_coeff": coefficient}})
        model = program.model
        schedule = step.StepSchedule(model.chunks, model.optimizer, auxiliary_weight=weight)
        program.call(schedule, program.batches(0))
        schedule.finish()
        gradients.append(model.gradients())
    assert torch.equal(*gradients)


@on_ranks(2)
def test_what_it_cannot_do_is_refused_and_an_evaluation_changes_nothing() -> None:
    """A forward-only call leaves an open step alone."""

    program, other = Program({}), Program({})
    model = program.model
    schedule = step.StepSchedule(model.chunks, model.optimizer)
    batches = program.batches(0)
    program.call(schedule, batches)
    before = model.gradients().clone()
    reported = program.call(schedule, batches, forward_only=True)
    assert reported == [{"first": int(each[0, 0])} for each in batches]
    assert before.equal(model.gradients())
    with pytest.raises(ValueError, match="not the 1 that it was made with"):
        other.call(schedule, batches)
    schedule.abort()
    assert schedule.step.open_step_id is None
