"""Contents of a batch besides tensors: lists are cut with the rows, packs are refused."""

from __future__ import annotations


def lists() -> None:
    """Runs on a rank: rank 0's rows come with images and names, and rank 1 has no data."""
    import torch
    from fsdp_bench import build, step_of
    from scenario import ROWS, TokenLoss, data

    seen = []

    def forward(model, microbatch):
        seen.append({n: v for n, v in microbatch.items() if n not in data(1, 1, 0)})
        images = torch.stack([image.mean() for image in microbatch["images"]])
        assert len(images) == len(microbatch["input_ids"]) == len(microbatch["names"])
        return model(microbatch["input_ids"]) + images[:, None]

    rank = torch.distributed.get_rank()
    step = step_of(*build(), forward=forward, shared=("table", "sizes"))
    step_id = step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)
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
    step.microbatch(step_id, batch if rank == 0 else None)
    step.finish(step_id)
    assert [len(each["images"]) for each in seen] == [2, 2, 1]
    sizes = [tuple(map(len, each["images"])) for each in seen]
    # What a rank without data runs instead looks like the first of its kind.
    assert sizes == ([(1, 2), (3, 4), (5,)] if rank == 0 else [(1, 2), (1, 2), (5,)])
    assert all(bool(each["images"][0].any()) is (rank == 0) for each in seen)
    assert all(bool(each["crops"][0]["pixels"].any()) is (rank == 0) for each in seen)
    assert [each["crops"][-1]["at"] for each in seen][::2] == [(0, 2), (0, 5)]
    second = ("c", "d") if rank == 0 else ("a", "b")
    assert [each["names"] for each in seen] == [("a", "b"), second, ("e",)]
    for each in seen:
        assert each["table"]["any"].shape == (3,)
        assert each["sizes"].shape == (7,)
        assert (each["temperature"], each["attention_mask"]) == (0.5, None)


def test_lists_are_cut_with_the_rows(megatron_ranks):
    megatron_ranks(2, lists)


def what_has_no_rows() -> list[str]:
    """Runs on a rank: what each is told that has no rows, or counts wrongly; the step goes on."""
    import numpy
    import torch
    from scenario import TokenLoss, build, data, forward, raised_by

    from megatron_idempotent import TrainStep
    from megatron_idempotent.fp8 import Pack, token_alignment

    model, scheduler, _ = build()
    step = TrainStep(model.chunks, model.optimizer, scheduler, forward=forward, shared=("rope",))
    step_id = step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=2)
    batch = data(1, 4, 0)
    pack = Pack.of([9, 6, 3], token_alignment(None, tp=1, cp=1, sequence_parallel=False))
    told = []
    for wrong in (
        {"images": [torch.ones(2)] * 3},
        {"images": numpy.ones((4, 2))},
        {"meta": {"a": torch.ones(4)}},
        {"rows": range(4)},
        {"pack": pack},
        {"rope": pack},
        {"packs": [pack] * 4},
    ):
        told.append(raised_by(step.microbatch, step_id, {**batch, **wrong}))
        assert isinstance(told[-1], ValueError), told[-1]
    for shared, text in (
        ("rope", "'rope'"),
        ((1,), "(1,)"),
        (("rope", "token_mask"), "shared names ['token_mask']"),
    ):
        error = raised_by(TrainStep, model.chunks, model.optimizer, shared=shared)
        assert text in str(error)
    step.microbatch(step_id, batch)
    assert step.finish(step_id).updated
    return [str(each) for each in told]


def test_what_has_no_rows_is_named_and_packs_are_refused(megatron_ranks):
    (told,) = megatron_ranks(1, what_has_no_rows)
    kinds = ("a list of 3 items, for 4 rows", "a ndarray", "a dict", "a range")
    for text, kind in zip(told, kinds, strict=False):
        assert kind in text
        assert "shared=(" in text
    for text in told[4:]:
        assert "a Pack of 3 sequences and 18 tokens" in text
