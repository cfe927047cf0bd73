"""Microbatches that exist already run in one schedule call, whatever their shapes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from fsdp_bench import bench
from ranks import VIRTUAL, on_ranks, tiered
from scenario import Bench, SequenceLoss, TokenLoss, cut, data, forward, raised_by

from megatron_idempotent import WindowAborted

pytestmark = pytest.mark.full

#: Rows and positions of the microbatches of a step; the model has room for 32 positions.
SHAPES = ((2, 32), (1, 20), (3, 8), (2, 24))


def made(replica: int, shapes: Any = SHAPES, seed: int = 0) -> list[dict[str, Any]]:
    """Microbatches of these shapes, about half of whose tokens are valid."""
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


def compared(options: dict[str, Any], kind: str = "token") -> list[str]:
    """Runs on a rank; returns what differs between one list and a call for each microbatch."""
    from megatron.core import parallel_state

    ways: dict[str, tuple[Any, bool]] = {
        "one by one": (lambda made: made, False),
        "one list": (lambda made: [made], False),
        "one last list": (lambda made: [made], True),
        "two lists": (lambda made: [made[:2], made[2:]], False),
    }
    found = {}
    for way, (pieces_of, last) in ways.items():
        bench = Bench(loss=TokenLoss() if kind == "token" else SequenceLoss(), **options)
        found[way] = []
        for seed in (1, 2):
            given = pieces_of(made(bench.replica, seed=seed))
            result = bench.run(given, last=last, micro_batch_size=4)
            replicas = parallel_state.get_data_parallel_world_size()
            assert result.microbatches == len(SHAPES) * replicas
            found[way] += [result.rows, *bench.bits(result)]
    want = found.pop("one by one")
    assert want[2].abs().max() > 0
    return [
        f"{way}: {number}"
        for way, each in found.items()
        for number, (got, wanted) in enumerate(zip(each, want, strict=True))
        if not (torch.equal(got, wanted) if number % 4 else got == wanted)
    ]


BALANCED = {
    "experts": 4,
    "config_overrides": {"moe_aux_loss_coeff": 1.0, "calculate_per_token_loss": False},
}
PER_TOKEN = {"config_overrides": {"moe_aux_loss_coeff": 1.0, "calculate_per_token_loss": True}}
#: Layout → ranks, options of the model, kind of the loss.
LAYOUTS: dict[str, tuple[int, dict[str, Any], str]] = {
    "dp2": (2, {}, "token"),
    "pp2": (2, {"pp": 2}, "token"),
    "pp2 dp2, gathers": (4, {"pp": 2, "overlap_param_gather": True}, "token"),
    "pp2, fp16": (2, {"pp": 2, "dtype": "fp16", "loss_scale": 256.0}, "token"),
    # Auxiliary losses are weighed in backwards, of which each is of another microbatch's size.
    "pp2, experts": (2, {"pp": 2, **BALANCED}, "token"),
    "pp2, experts, per token": (2, {"pp": 2, **BALANCED, **PER_TOKEN}, "token"),
    "pp2, experts, by sequence": (2, {"pp": 2, **BALANCED}, "sequence"),
    "pp2, experts, by sequence, summed": (2, {"pp": 2, **BALANCED, **PER_TOKEN}, "sequence"),
    "tp2": (2, {"tp": 2}, "token"),
}
ALWAYS = ("pp2 dp2, gathers", "pp2, experts, by sequence, summed", "tp2")


@pytest.mark.parametrize("layout", tiered(LAYOUTS, ALWAYS))
def test_microbatches_of_any_shapes_in_one_call_are_those_of_a_call_each(megatron_ranks, layout):
    ranks, options, kind = LAYOUTS[layout]
    assert megatron_ranks(ranks, compared, options, kind) == [[]] * ranks


@on_ranks(2)
def test_an_interleaved_pipeline_takes_lists_of_a_multiple_of_its_stages() -> None:
    bench = Bench(**VIRTUAL)
    batches, step_id = list(cut(bench.batch(4), [1] * 4)), bench.begin()
    with pytest.raises(WindowAborted, match=r"3 microbatches .* multiples of 2"):
        bench.step.microbatch(step_id, microbatches=batches[:3])
    bench.step.microbatch(step_id, microbatches=batches)
    assert bench.step.finish(step_id).updated


@pytest.mark.parametrize("where", [0, 1])
@on_ranks(2)
def test_a_failure_in_the_middle_of_a_list_is_told_once_and_undone(where: int) -> None:
    """One microbatch raises; the step is made again from there."""
    from megatron.core import parallel_state

    failing = [False]

    def may_fail(model: Any, microbatch: Any) -> Any:
        stage = parallel_state.get_pipeline_model_parallel_rank()
        if failing[0] and stage == where and microbatch["input_ids"].shape == (3, 8):
            raise LookupError("a bad sample")
        return forward(model, microbatch)

    def run(fails: bool) -> tuple[str, list[Any]]:
        bench = Bench(pp=2, step={"forward": may_fail})
        failing[0] = fails
        told = raised_by(bench.run, [made(bench.replica)]) if fails else None
        failing[0] = False
        bench.step.abort()
        return str(told), bench.bits(bench.run([made(bench.replica)]))

    told, got = run(True)
    assert all(map(torch.equal, got, run(False)[1]))
    assert "a bad sample" in told
    assert told.count("rank") == 1 or f"rank {1 - where}:" not in told


def uneven(counts: list[int]) -> list[Any]:
    """Runs on a rank with shared experts: replicas with lists of other lengths and shapes."""
    bench = Bench(experts=4, ep=2)
    batches = [made(each, SHAPES[: counts[each]]) for each in (0, 1)]
    result = bench.run([batches[bench.replica]], last=True)
    valid = sum(
        float((each["token_mask"][:, 1:] * each["sample_mask"][:, None]).sum())
        for share in batches
        for each in share
    )
    assert result.global_valid_tokens == valid
    assert result.microbatches == sum(counts)
    assert torch.isfinite(bench.parameters()).all()
    return [result.metrics["nll"], result.grad_norm]


@pytest.mark.parametrize("counts", [[4, 2], [0, 3]])
def test_replicas_that_share_experts_take_lists_of_other_lengths(megatron_ranks, counts):
    first, second = megatron_ranks(2, uneven, counts)
    assert first == second


@on_ranks(1)
def test_microbatches_may_be_of_any_type_and_counted_by_the_caller() -> None:
    """Dataclasses, with a shape and counts that the step is told."""

    @dataclasses.dataclass
    class Sequence:
        ids: Any
        weight: Any

    class Weighed(TokenLoss):
        def __call__(self, output: Any, microbatch: Any) -> Any:
            known = isinstance(microbatch, Sequence)
            weight = microbatch.weight if known else microbatch["token_mask"]
            return (output.float() * weight).sum(), {}

    asked = {
        "forward": lambda model, microbatch: forward(model, {"input_ids": microbatch.ids}),
        "shape": lambda item: tuple(item.ids.shape),
        "counts": lambda item: torch.stack(
            (torch.tensor(float(len(item.ids))), item.weight.double().sum())
        ),
    }
    items = [Sequence(each["input_ids"], each["token_mask"]) for each in made(0)]
    named = [
        {**each, "counts": (len(each["input_ids"]), float(each["token_mask"].sum()))}
        for each in made(0)
    ]
    found = []
    for options, given in ((asked, items), ({}, named)):
        bench = Bench(loss=Weighed(), step=options)
        step_id = bench.begin()
        receipt = bench.step.microbatch(step_id, microbatches=given)
        assert (receipt.rows, receipt.microbatches) == (8, 4)
        tokens = bench.step.finish(step_id).global_valid_tokens
        found.append((tokens, bench.gradients()))
    assert found[0][0] == found[1][0] > 0
    assert torch.equal(found[0][1], found[1][1])


@on_ranks(1)
def test_jagged_rows_in_a_tensordict_count_as_padded_ones() -> None:
    """TensorDicts of jagged rows, against the same rows in padded ones."""
    from tensordict import TensorDict

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

    def nested(parts: list[Any]) -> Any:
        return torch.nested.nested_tensor(parts, layout=torch.jagged).cuda()

    items = [TensorDict({"input_ids": nested(each)}, batch_size=[len(each)]) for each in rows]
    plain = list(map(padded, items))
    items[1]["token_mask"] = nested([(row % 3 > 0).float() for row in rows[1]])
    plain[1]["token_mask"] = torch.nested.to_padded_tensor(items[1]["token_mask"], 0)
    # The first token of a row is not predicted, jagged or not.
    valid = sum(n - 1 for n in lengths[0])
    valid += sum(int((row[1:] % 3 > 0).sum()) for row in rows[1])
    found = []
    for given in (plain, items):
        bench = Bench(
            loss=Loss(), step={"forward": lambda chunk, batch: forward(chunk, padded(batch))}
        )
        result = bench.run([given])
        assert result.global_valid_tokens == valid
        found.append((result.metrics, bench.bits(result)))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


@on_ranks(2)
def test_lists_are_cut_with_the_rows() -> None:
    """Rank 0's rows come with images and names, and rank 1 has no data."""
    seen = []

    def forward(model, microbatch):
        seen.append({n: v for n, v in microbatch.items() if n not in data(1, 1, 0)})
        images = torch.stack([image.mean() for image in microbatch["images"]])
        assert len(images) == len(microbatch["input_ids"]) == len(microbatch["names"])
        return model(microbatch["input_ids"]) + images[:, None]

    made = bench(forward=forward, shared=("table", "sizes"))
    first, step_id = made.rank == 0, made.begin()
    batch = {
        **data(1, 5, 0),
        "images": [torch.full((size,), float(size)) for size in (1, 2, 3, 4, 5)],
        "crops": [{"pixels": torch.ones(size), "at": (0, size)} for size in (1, 2, 3, 4, 5)],
        "names": tuple("abcde"),
        "table": {"any": torch.ones(3)},
        "sizes": torch.ones(7),
        "temperature": 0.5,
        "attention_mask": None,
    }
    made.step.microbatch(step_id, batch if first else None)
    made.step.finish(step_id)
    sizes = [tuple(map(len, each["images"])) for each in seen]
    # What a rank without data runs instead looks like the first of its kind.
    assert sizes == [(1, 2), (3, 4) if first else (1, 2), (5,)]
    assert all(bool(each["images"][0].any()) is first for each in seen)
    assert all(bool(each["crops"][0]["pixels"].any()) is first for each in seen)
    assert [each["crops"][-1]["at"] for each in seen][::2] == [(0, 2), (0, 5)]
    second = ("c", "d") if first else ("a", "b")
    assert [each["names"] for each in seen] == [("a", "b"), second, ("e",)]
    for each in seen:
        assert each["table"]["any"].shape == (3,)
        assert each["sizes"].shape == (7,)
        assert (each["temperature"], each["attention_mask"]) == (0.5, None)
