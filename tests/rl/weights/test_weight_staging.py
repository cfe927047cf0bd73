"""Staging: what it refuses, and that a refusal changes nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_idempotent.rl.weights import (
    Bucket,
    Staging,
    TensorInfo,
    UpdateDamaged,
    UpdateMismatch,
    WeightUpdate,
)

WEIGHTS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.ones(4, dtype=torch.bfloat16),
    "c": torch.zeros(2),
}
FULL = WeightUpdate(id="run/3", version=3)


def staging(update: WeightUpdate = FULL) -> Staging:
    return Staging(update, expected=[TensorInfo.of(*item) for item in WEIGHTS.items()])


def bucket(index: int, *names: str, **changed: torch.Tensor) -> Bucket:
    return Bucket.of(index, {**{name: WEIGHTS[name] for name in names}, **changed})


def test_all_tensors_in_any_order_of_buckets_are_given_as_they_came() -> None:
    staged = staging()
    staged.add(bucket(0, "c", "a"))
    staged.add(bucket(1))
    staged.add(bucket(2, "b"))
    complete = staged.complete()
    assert complete.keys() == WEIGHTS.keys()
    assert all(complete[name] is WEIGHTS[name] for name in WEIGHTS)


BAD: list[tuple[Bucket, type[Exception], str]] = [
    (bucket(0, "b"), UpdateDamaged, "bucket 0 arrived, and bucket 1 is next"),
    (bucket(2, "b"), UpdateDamaged, "bucket 2 arrived, and bucket 1 is next"),
    (bucket(1, "b", "a"), UpdateDamaged, "a arrived twice"),
    (bucket(1, "b", d=torch.ones(1)), UpdateMismatch, "d: the model has no such tensor"),
    (bucket(1, "c", b=WEIGHTS["b"][1:]), UpdateMismatch, r"b: bfloat16 \[3\].*bfloat16 \[4\]"),
    (bucket(1, "c", b=torch.ones(4)), UpdateMismatch, r"b: float32 \[4\].*bfloat16 \[4\]"),
    (
        bucket(1, b=torch.ones(4), d=torch.ones(1)),
        UpdateMismatch,
        r"b: float32 \[4\].*; d: the model has no such",
    ),
    (
        dataclasses.replace(bucket(1, "c", "b"), checksums={"b": 1, "c": 0}),
        UpdateDamaged,
        "c arrived with checksum [0-9a-f]{16}, it was sent with 0000000000000000",
    ),
    (
        dataclasses.replace(bucket(1, "c", "b"), checksums=bucket(1, "c").checksums),
        UpdateDamaged,
        "b has no checksum",
    ),
]


@pytest.mark.parametrize(("bad", "error", "message"), BAD, ids=[case[2][:30] for case in BAD])
def test_a_bucket_that_fails_leaves_nothing_of_itself_behind(
    bad: Bucket, error: type[Exception], message: str
) -> None:
    staged = staging()
    staged.add(bucket(0, "a"))
    with pytest.raises(error, match=f"update run/3.*{message}"):
        staged.add(bad)
    with pytest.raises(UpdateDamaged, match="2 of 3 tensors are missing: b, c;"):
        staged.complete()
    staged.add(bucket(1, "b", "c"))  # the same place, and the same tensors, are still to come
    assert staged.complete().keys() == WEIGHTS.keys()


def test_an_update_that_builds_on_another_may_leave_tensors_out() -> None:
    staged = staging(WeightUpdate(id="run/3", version=3, base_version=2))
    staged.add(bucket(0, "b"))
    assert list(staged.complete()) == ["b"]


def test_what_is_missing_is_listed_up_to_twenty_names() -> None:
    infos = [TensorInfo(name=f"n{i:02}", shape=(1,), dtype=torch.float32) for i in range(23)]
    for number, names in ((23, "n00, .*n19, and 3 more;"), (20, "n00, .*n19;")):
        with pytest.raises(UpdateDamaged, match=f"{number} of {number} tensors .*: {names}"):
            Staging(FULL, expected=infos[:number]).complete()
