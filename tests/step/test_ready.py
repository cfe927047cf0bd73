"""Microbatches that exist already run in one schedule call, whatever their shapes."""

from __future__ import annotations

import re
from typing import Any

import pytest

#: Rows and positions of the microbatches of a step; the model has room for 32 positions.
SHAPES = ((2, 32), (1, 20), (3, 8), (2, 24))


def made(replica: int, shapes: Any = SHAPES, seed: int = 0) -> list[dict[str, Any]]:
    """Microbatches of these shapes, about half of whose tokens are valid."""
    import torch

    generator = torch.Generator().manual_seed(100 * seed + replica)
    found = []
    for rows, positions in shapes:
        batch = {
            "input_ids": torch.randint(0, 128, (rows, positions), generator=generator),
            "token_mask": (torch.rand(rows, positions, generator=generator) < 0.5).float(),
            "sample_mask": (torch.rand(rows, generator=generator) < 0.8).float(),
        }
        found.append({name: value.cuda() for name, value in batch.items()})
    return found


def compared(options: dict[str, Any], shapes: Any, kind: str = "token") -> list[str]:
    """Runs on a rank; returns what differs between one list and a call for each microbatch."""
    import torch
    from scenario import DEADLINE_S, SequenceLoss, TokenLoss, build, forward, parameters

    from megatron_idempotent import TrainStep

    loss = TokenLoss() if kind == "token" else SequenceLoss()

    def run(how: str) -> list[Any]:
        model, scheduler, replica = build(**options)
        step = TrainStep(
            model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=DEADLINE_S
        )
        seen: list[Any] = []
        for seed in (1, 2):
            batches = made(replica, shapes, seed)
            if how == "one by one":
                step_id = step.begin(loss, global_batch_size=8, micro_batch_size=4)
                for each in batches:
                    step.microbatch(step_id, each)
            else:
                step_id = step.begin(loss, global_batch_size=8)
                cut = len(batches) // 2 if how == "two lists" else 0
                if cut:
                    step.microbatch(step_id, microbatches=batches[:cut])
                step.microbatch(step_id, microbatches=batches[cut:], last=how == "one last list")
            result = step.finish(step_id)
            assert result.microbatches == len(shapes) * (model_replicas())
            norm = torch.tensor(float(result.grad_norm))
            seen += [norm, result.rows, model.gradients(), parameters(model)]
        return seen

    def model_replicas() -> int:
        from megatron.core import parallel_state

        return int(parallel_state.get_data_parallel_world_size())

    want = run("one by one")
    assert want[2].abs().max() > 0
    differing = []
    for how in ("one list", "one last list", "two lists"):
        for number, (got, wanted) in enumerate(zip(run(how), want, strict=True)):
            same = torch.equal(got, wanted) if isinstance(got, torch.Tensor) else got == wanted
            if not same:
                differing.append(f"{how}: {number}")
    return differing


BALANCED = {
    "experts": 4,
    "config_overrides": {"moe_aux_loss_coeff": 1.0, "calculate_per_token_loss": False},
}
PER_TOKEN = {"config_overrides": {"moe_aux_loss_coeff": 1.0, "calculate_per_token_loss": True}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "pp2": (2, {"pp": 2}),
    "pp2 dp2, gathers": (4, {"pp": 2, "overlap_param_gather": True}),
    "pp2, fp16": (2, {"pp": 2, "dtype": "fp16", "loss_scale": 256.0}),
    # Auxiliary losses are weighed in backwards, of which each is of another microbatch's size.
    "pp2, experts": (2, {"pp": 2, **BALANCED}),
    "pp2, experts, per token": (2, {"pp": 2, **BALANCED, **PER_TOKEN}),
    "tp2": (2, {"tp": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_microbatches_of_any_shapes_in_one_call_are_those_of_a_call_each(megatron_ranks, layout):
    ranks, options = LAYOUTS[layout]
    assert megatron_ranks(ranks, compared, options, SHAPES) == [[]] * ranks


def test_a_loss_of_sequences_weighs_auxiliary_losses_by_its_own(megatron_ranks):
    for options in (BALANCED, {**BALANCED, **PER_TOKEN}):
        assert megatron_ranks(2, compared, {"pp": 2, **options}, SHAPES, "sequence") == [[]] * 2


def interleaved(options: dict[str, Any]) -> list[bool]:
    """Runs on a rank: a list for an interleaved pipeline, against the same rows as one batch."""
    import torch
    from scenario import DEADLINE_S, TokenLoss, build, cut, data, forward, parameters

    from megatron_idempotent import TrainStep, WindowAborted

    def run(ready: bool) -> list[Any]:
        model, scheduler, replica = build(**options)
        step = TrainStep(
            model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=DEADLINE_S
        )
        batch = data(1, 8, replica)
        step_id = step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=2)
        if ready:
            batches = list(cut(batch, [1] * 4))
            with pytest.raises(WindowAborted, match=r"3 microbatches .* multiples of 2"):
                step.microbatch(step_id, microbatches=batches[:3])
            step.microbatch(step_id, microbatches=batches)
        else:
            step.microbatch(step_id, batch)
        step.finish(step_id)
        return [model.gradients(), parameters(model)]

    return [torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True)]


def test_an_interleaved_pipeline_takes_lists(megatron_ranks):
    options = {"pp": 2, "vpp": 2, "layers_per_stage": 1}
    assert all(all(each) for each in megatron_ranks(2, interleaved, options))


def stopped(where: int) -> tuple[str, list[bool]]:
    """Runs on a rank of a pipeline: one microbatch raises; the step is made again from there."""
    import torch
    from megatron.core import parallel_state
    from scenario import DEADLINE_S, TokenLoss, build, forward, parameters

    from megatron_idempotent import TrainStep, WindowAborted

    failing = [False]

    def may_fail(model: Any, microbatch: Any) -> Any:
        stage = parallel_state.get_pipeline_model_parallel_rank()
        if failing[0] and stage == where and microbatch["input_ids"].shape == (3, 8):
            raise LookupError("a bad sample")
        return forward(model, microbatch)

    def run(fails: bool) -> tuple[str, list[Any]]:
        model, scheduler, replica = build(pp=2)
        step = TrainStep(
            model.chunks, model.optimizer, scheduler, forward=may_fail, deadline_s=DEADLINE_S
        )
        told = ""
        if fails:
            failing[0] = True
            step_id = step.begin(TokenLoss(), global_batch_size=8)
            try:
                step.microbatch(step_id, microbatches=made(replica))
            except WindowAborted as error:
                told = str(error)
            failing[0] = False
            step.abort(step_id)
        step_id = step.begin(TokenLoss(), global_batch_size=8)
        step.microbatch(step_id, microbatches=made(replica))
        step.finish(step_id)
        return told, [model.gradients(), parameters(model)]

    told, got = run(True)
    return told, [torch.equal(a, b) for a, b in zip(got, run(False)[1], strict=True)]


@pytest.mark.parametrize("where", [0, 1])
def test_a_failure_in_the_middle_of_a_list_is_told_once_and_undone(megatron_ranks, where):
    for told, same in megatron_ranks(2, stopped, where):
        assert "a bad sample" in told
        assert told.count("rank") == 1 or f"rank {1 - where}:" not in told
        assert all(same)


def uneven(counts: list[int]) -> list[Any]:
    """Runs on a rank with shared experts: replicas with lists of other lengths and shapes."""
    import torch
    from scenario import DEADLINE_S, TokenLoss, build, forward, parameters

    from megatron_idempotent import TrainStep

    model, scheduler, replica = build(experts=4, ep=2)
    step = TrainStep(
        model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=DEADLINE_S
    )
    batches = [made(each, SHAPES[: counts[each]]) for each in (0, 1)]
    step_id = step.begin(TokenLoss(), global_batch_size=8)
    step.microbatch(step_id, microbatches=batches[replica], last=True)
    result = step.finish(step_id)
    valid = sum(
        float((each["token_mask"][:, 1:] * each["sample_mask"][:, None]).sum())
        for share in batches
        for each in share
    )
    assert result.global_valid_tokens == valid
    assert result.microbatches == sum(counts)
    assert torch.isfinite(parameters(model)).all()
    return [result.metrics["nll"], result.grad_norm]


@pytest.mark.parametrize("counts", [[4, 2], [0, 3]])
def test_replicas_that_share_experts_take_lists_of_other_lengths(megatron_ranks, counts):
    first, second = megatron_ranks(2, uneven, counts)
    assert first == second


def of_any_type() -> None:
    """Runs on a rank: dataclasses, with a shape and counts that the step is told."""
    import dataclasses

    import torch
    from scenario import DEADLINE_S, TokenLoss, build, forward

    from megatron_idempotent import TrainStep

    @dataclasses.dataclass
    class Sequence:
        ids: Any
        weight: Any

    def call(model: Any, microbatch: Any) -> Any:
        return forward(model, {"input_ids": microbatch.ids})

    class Loss(TokenLoss):
        def __call__(self, output: Any, microbatch: Any) -> Any:
            return (output.float() * microbatch.weight).sum(), {}

    def run(given: str) -> tuple[float, Any]:
        model, scheduler, _ = build()
        options: dict[str, Any] = {}
        items: list[Any] = [Sequence(each["input_ids"], each["token_mask"]) for each in made(0)]
        if given == "asked":
            options["counts"] = lambda item: torch.stack(
                (torch.tensor(float(len(item.ids))), item.weight.double().sum())
            )
        step = TrainStep(
            model.chunks,
            model.optimizer,
            scheduler,
            forward=call if given == "asked" else forward,
            shape=(lambda item: tuple(item.ids.shape)) if given == "asked" else None,
            deadline_s=DEADLINE_S,
            **options,
        )
        loss: Any = Loss()
        if given == "in the microbatch":
            loss = type("Weighed", (TokenLoss,), {
                "__call__": lambda self, output, m: ((output.float() * m["token_mask"]).sum(), {})
            })()  # fmt: skip
            items = [
                {**each, "counts": (len(each["input_ids"]), float(each["token_mask"].sum()))}
                for each in made(0)
            ]
        step_id = step.begin(loss, global_batch_size=8)
        receipt = step.microbatch(step_id, microbatches=items)
        assert (receipt.rows, receipt.microbatches) == (8, 4)
        result = step.finish(step_id)
        return result.global_valid_tokens, model.gradients()

    (tokens, want), (others, got) = run("asked"), run("in the microbatch")
    assert tokens == others > 0
    assert torch.equal(want, got)


def test_microbatches_may_be_of_any_type_and_counted_by_the_caller(megatron_ranks):
    megatron_ranks(1, of_any_type)


def of_jagged_rows() -> None:
    """Runs on a rank: TensorDicts of jagged rows, against the same rows in padded ones."""
    import torch
    from scenario import DEADLINE_S, TokenLoss, build, forward, parameters
    from tensordict import TensorDict

    from megatron_idempotent import TrainStep

    lengths = ([9, 32, 17], [5, 30])
    generator = torch.Generator().manual_seed(5)
    rows = [[torch.randint(0, 128, (n,), generator=generator) for n in each] for each in lengths]

    def padded(microbatch: Any) -> dict[str, Any]:
        tokens = microbatch["input_ids"]
        if not tokens.is_nested:
            return dict(microbatch)
        sizes = torch.tensor([len(each) for each in tokens.unbind()])
        mask_BT = (torch.arange(int(sizes.max())) < sizes[:, None]).float()
        if "token_mask" in microbatch.keys():  # noqa: SIM118  a TensorDict asks its rows
            mask_BT = torch.nested.to_padded_tensor(microbatch["token_mask"], 0)
        return {
            "input_ids": torch.nested.to_padded_tensor(tokens, 0),
            "token_mask": mask_BT.cuda(),
            "sample_mask": torch.ones(len(sizes)).cuda(),
        }

    class Loss(TokenLoss):
        def __call__(self, output: Any, microbatch: Any) -> Any:
            return super().__call__(output, padded(microbatch))

    def run(jagged: bool) -> list[Any]:
        model, scheduler, _ = build()
        step = TrainStep(
            model.chunks,
            model.optimizer,
            scheduler,
            forward=lambda chunk, microbatch: forward(chunk, padded(microbatch)),
            deadline_s=DEADLINE_S,
        )
        found: list[Any] = []
        for each in rows:
            nested = torch.nested.nested_tensor(each, layout=torch.jagged).cuda()
            item = TensorDict({"input_ids": nested}, batch_size=[len(each)])
            plain = padded(item)
            if len(found) == 1:
                masks = [(row % 3 > 0).float() for row in each]
                item["token_mask"] = torch.nested.nested_tensor(masks, layout=torch.jagged).cuda()
                plain["token_mask"] = torch.nested.to_padded_tensor(item["token_mask"], 0)
            found.append(item if jagged else plain)
        step_id = step.begin(Loss(), global_batch_size=5)
        step.microbatch(step_id, microbatches=found)
        result = step.finish(step_id)
        # The first token of a row is not predicted, jagged or not.
        valid = sum(n - 1 for n in lengths[0])
        valid += sum(int((row[1:] % 3 > 0).sum()) for row in rows[1])
        assert result.global_valid_tokens == valid
        return [result.metrics, model.gradients(), parameters(model)]

    want, got = run(False), run(True)
    assert want[0] == got[0]
    assert all(torch.equal(a, b) for a, b in zip(want[1:], got[1:], strict=True))


def test_jagged_rows_in_a_tensordict_count_as_padded_ones(megatron_ranks):
    megatron_ranks(1, of_jagged_rows)


def refused() -> dict[str, str]:
    """Runs on two ranks of a pipeline; returns what is said of each bad list, and then a step."""
    import torch
    from scenario import DEADLINE_S, TokenLoss, build, forward

    from megatron_idempotent import TrainStep

    model, scheduler, replica = build(pp=2)
    step = TrainStep(
        model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=DEADLINE_S
    )
    good = made(replica)
    bad = {
        "not a list": {"microbatches": good[0]},
        "both": {"batch": good[0], "microbatches": good},
        "no tokens": {"microbatches": [*good[:1], {"ids": good[0]["input_ids"]}]},
        "no counts": {"microbatches": [object()]},
        "negative": {"microbatches": [{**good[0], "counts": (-1, 2)}]},
        "falls": {"microbatches": [{**good[0], "cu_seqlens": torch.tensor([0, 9, 5])}]},
        "ends": {"microbatches": [{**good[0], "cu_seqlens": torch.tensor([0, 9, 50])}]},
        "masks": {
            "microbatches": [
                {**good[0], "cu_seqlens": torch.tensor([0, 9, 64]), "sample_mask": torch.ones(3)}
            ]
        },
        "no size": {"batch": good[0]},
    }
    step_id = step.begin(TokenLoss(), global_batch_size=8)
    told = {}
    for name, arguments in bad.items():
        try:
            step.microbatch(step_id, **arguments)
        except Exception as error:  # noqa: BLE001  it is what is asked for
            told[name] = str(error)
    stage_0 = torch.distributed.get_rank() == 0
    shapes = SHAPES if stage_0 else SHAPES[::-1]
    try:
        step.microbatch(step_id, microbatches=made(replica, shapes))
    except Exception as error:  # noqa: BLE001  it is what is asked for
        told["differ"] = str(error)
    step.microbatch(step_id, microbatches=good)
    assert step.finish(step_id).microbatches == 4
    return told


def test_bad_lists_are_refused_on_all_ranks_and_the_step_is_as_it_was(megatron_ranks):
    said = {
        "not a list": "got a dict as microbatches: pass a list",
        "both": "got a batch and microbatches",
        "no tokens": r"microbatches\[1\], a dict whose 'input_ids' is not there",
        "no counts": r"microbatches\[0\], a object whose 'input_ids' is not there",
        "negative": r"microbatches\[0\], whose counts are \(-1, 2\)",
        "falls": "whose cu_seqlens fall from 9 to 5 in sequence 1",
        "ends": "whose cu_seqlens end at 50, and which has 64 tokens",
        "masks": "whose 'sample_mask' has 3 entries for 2 sequences",
        "no size": r"got 2 rows, and begin\(\) no micro_batch_size",
        "differ": "4 microbatches of up to 3 x 32",
    }
    for told in megatron_ranks(2, refused):
        assert set(told) == set(said)
        for name, words in said.items():
            assert re.search(words, told[name]), (name, told[name])
