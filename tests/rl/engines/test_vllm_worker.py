"""A vLLM worker's account of updates, without vLLM: real buckets over a real transport."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_idempotent.rl.engines.vllm.inbox import Inbox
from megatron_idempotent.rl.engines.vllm.updates import WorkersState
from megatron_idempotent.rl.weights import Bucket, TensorInfo, WeightsError, WeightUpdate
from megatron_idempotent.rl.weights.safetensors_io import Checkpoint, expected_tensors
from megatron_idempotent.rl.weights.transports import DiskSender

OLD = {name: torch.full((8,), value) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0))}
NEW = {name: tensor + 10 for name, tensor in OLD.items()}


class Worker:
    """An inbox, and what vLLM and a trainer do with it."""

    def __init__(self, directory: Path) -> None:
        self.sender = DiskSender(directory)
        infos = [TensorInfo.of(name, tensor) for name, tensor in OLD.items()]
        self.checked: list[Any] = []
        self.inbox = Inbox(
            rank=0,
            expected=lambda: infos,
            checkpoint=lambda: OLD,
            check_scales=self.checked.append,
        )

    def tell(self, do: str, **command: Any) -> dict[str, Any]:
        return self.inbox.answer({"do": do, **command})

    def open(self, update: WeightUpdate, **settings: Any) -> dict[str, Any]:
        opened = dict(asyncio.run(self.sender.open(update)))
        settings = {"serving": 0, "keep": True, "silence_s": 30.0, **settings}
        return self.tell("open", update=dataclasses.asdict(update), opened=opened, **settings)

    def stage(self, update: WeightUpdate, tensors: dict[str, torch.Tensor], **settings: Any) -> Any:
        if (answer := self.open(update, **settings)).get("error"):
            asyncio.run(self.sender.close())
            return answer
        for index, (name, tensor) in enumerate(tensors.items()):
            bucket = Bucket.of(index, {name: tensor})
            announced = asyncio.run(self.sender.announce(bucket))
            state = self.tell("bucket", id=update.id, announced=dict(announced))
            deadline = time.monotonic() + 30
            while state["received"] <= index and not state["failed"]:
                assert time.monotonic() < deadline
                state = self.tell("state")
        asyncio.run(self.sender.close())
        return self.tell("complete", id=update.id, buckets=len(tensors))

    def commit(self, update_id: str) -> dict[str, float]:
        self.inbox.began()
        loaded = self.inbox.to_load(update_id, restore=False)
        self.inbox.finished()
        return {name: float(tensor[0]) for name, tensor in loaded.items()}


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(tmp_path)
    yield worker
    worker.inbox.forget()
    asyncio.run(worker.sender.close())


def test_a_worker_is_dirty_from_a_commits_begin_to_its_end(worker: Worker) -> None:
    assert worker.stage(WeightUpdate(id="u", version=1), NEW)["holds"] == {"u": 1}
    worker.inbox.began()
    state = worker.tell("state")
    assert state["updating"]
    assert "under way" in state["dirty"]
    worker.inbox.to_load("u", restore=False)
    assert worker.tell("state")["dirty"]
    worker.inbox.finished()
    state = worker.tell("state")
    assert (state["version"], state["committed"], state["dirty"]) == (1, "u", "")
    assert state["holds"] == {"u": 1}
    assert not state["updating"]


def test_an_attempt_that_loads_nothing_does_not_clean_a_half_loaded_model(worker: Worker) -> None:
    worker.stage(WeightUpdate(id="u", version=1), NEW)
    worker.inbox.began()
    worker.inbox.to_load("u", restore=False)
    worker.inbox.failed(RuntimeError("out of memory"))
    worker.inbox.began()
    worker.inbox.finished()
    state = worker.tell("state")
    assert "out of memory" in state["dirty"]
    assert (state["half"], state["version"]) == ("u", None)
    assert worker.commit("u") == {"a": 11.0, "b": 12.0, "c": 13.0}
    assert worker.tell("state")["dirty"] == ""


def test_a_half_loaded_model_gets_back_what_it_served(worker: Worker) -> None:
    assert worker.inbox.to_load("", restore=True) is OLD
    worker.stage(WeightUpdate(id="first", version=1), NEW)
    worker.commit("first")
    worker.stage(WeightUpdate(id="second", version=2), OLD)
    worker.inbox.began()
    worker.inbox.to_load("second", restore=False)
    worker.inbox.failed(RuntimeError("out of memory"))
    worker.inbox.began()
    restored = worker.inbox.to_load("", restore=True)
    worker.inbox.finished()
    assert {name: float(tensor[0]) for name, tensor in restored.items()}["a"] == 11.0
    state = worker.tell("state")
    assert (state["version"], state["dirty"], state["half"]) == (1, "", "")


def test_an_update_with_a_base_is_loaded_with_the_rest_of_it(worker: Worker) -> None:
    part = {"b": NEW["b"]}
    worker.stage(WeightUpdate(id="on-checkpoint", version=1, base_version=0), part)
    assert worker.commit("on-checkpoint") == {"a": 1.0, "b": 12.0, "c": 3.0}
    part = {"c": NEW["c"]}
    worker.stage(WeightUpdate(id="on-update", version=2, base_version=1), part)
    assert worker.commit("on-update") == {"a": 1.0, "b": 12.0, "c": 13.0}


@pytest.mark.parametrize("why", ["another base", "dirty", "no copy"])
def test_an_update_with_a_base_that_is_not_there_is_refused(worker: Worker, why: str) -> None:
    worker.stage(WeightUpdate(id="u", version=1), NEW, keep=why != "no copy")
    worker.commit("u")
    if why == "dirty":
        worker.inbox.began()
        worker.inbox.failed(RuntimeError("out of memory"))
    base = 0 if why == "another base" else 1
    answer = worker.stage(WeightUpdate(id="v", version=2, base_version=base), {"b": OLD["b"]})
    assert answer["error"]["kind"] == "UpdateRefused"
    expected = {"another base": "builds on version 0", "dirty": "more than one"}
    assert expected.get(why, "keep_copy") in answer["error"]["message"]
    assert "v" not in answer["holds"]


def test_a_worker_that_has_committed_loads_the_same_again_for_one_that_failed(
    worker: Worker,
) -> None:
    worker.stage(WeightUpdate(id="u", version=1), NEW)
    worker.commit("u")
    assert worker.commit("u") == {"a": 11.0, "b": 12.0, "c": 13.0}
    assert worker.tell("state")["version"] == 1


def test_an_update_is_above_what_is_served_and_alone(worker: Worker) -> None:
    answer = worker.stage(WeightUpdate(id="u", version=3), NEW, serving=3)
    assert answer["error"]["message"].startswith("update u is version 3, and 3 is served")
    worker.open(WeightUpdate(id="u", version=4), serving=3)
    asyncio.run(worker.sender.close())
    answer = worker.open(WeightUpdate(id="v", version=5), serving=3)
    assert answer["error"]["message"].startswith("update u is being staged")
    assert answer["staging"] == "u"


def test_an_update_that_goes_silent_fails_and_makes_room(worker: Worker) -> None:
    worker.open(WeightUpdate(id="u", version=1), silence_s=0.01)
    asyncio.run(worker.sender.close())
    deadline = time.monotonic() + 30
    while not (state := worker.tell("state"))["failed"]:
        assert time.monotonic() < deadline
    assert "is the trainer still there" in state["failed"]["message"]
    assert state["staging"] == ""
    assert worker.tell("complete", id="u", buckets=0)["error"] == state["failed"]
    assert worker.stage(WeightUpdate(id="v", version=1), NEW)["holds"] == {"v": 1}


def test_an_update_is_complete_with_all_of_its_buckets(worker: Worker) -> None:
    worker.open(WeightUpdate(id="u", version=1))
    answer = worker.tell("complete", id="u", buckets=2)
    assert answer["error"]["message"].startswith("update u: 0 of 2 buckets arrived")
    assert answer["holds"] == {}


def test_a_commit_that_is_ended_for_another_worker_leaves_its_own_dirty(worker: Worker) -> None:
    worker.stage(WeightUpdate(id="u", version=1), NEW)
    worker.inbox.began()
    worker.inbox.to_load("u", restore=False)
    worker.inbox.failed(RuntimeError("another worker"))
    worker.inbox.finished()  # vLLM's own end of it
    state = worker.tell("state")
    assert "another worker" in state["dirty"]
    assert (state["version"], state["holds"]) == (None, {"u": 1})


def test_buckets_of_an_update_that_was_dropped_go_nowhere(worker: Worker) -> None:
    worker.open(WeightUpdate(id="u", version=1))
    worker.tell("drop", id="another")
    assert worker.tell("state")["staging"] == "u"
    assert worker.tell("drop", id="u")["staging"] == ""
    answer = worker.tell("bucket", id="u", announced={})
    assert answer["error"]["kind"] == "UpdateRefused"
    assert "stage it again" in answer["error"]["message"]


def test_workers_that_have_committed_different_versions_are_dirty_together() -> None:
    same = {
        "committed": "u",
        "holds": {"u": 2, "v": 3},
        "staging": "",
        "received": 0,
        "failed": None,
    }
    same |= {"dirty": "", "half": "", "updating": False}
    other = {**same, "committed": "t", "holds": {"t": 1, "u": 2}}
    state = WorkersState.whatever([{**same, "version": 2}, {**other, "version": 1}], engine="e")
    assert state.disagree
    assert "[1, 2]" in state.dirty
    assert (state.version, state.committed, state.holds) == (None, "", {"u": 2})


def test_an_update_brings_the_tensors_of_the_checkpoint_in_the_type_computed_in(
    tmp_path: Path,
) -> None:
    first = {
        "w": torch.ones(4, 2, dtype=torch.bfloat16),
        "lm_head.weight": torch.ones(3, 2, dtype=torch.bfloat16),
        "router.bias": torch.ones(4),
    }
    save_file(first, tmp_path / "model-1.safetensors")
    save_file({"count": torch.ones(1, dtype=torch.int64)}, tmp_path / "model-2.safetensors")
    save_file({"other": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    infos = {info.name: info for info in expected_tensors(tmp_path, dtype=torch.float16)}
    assert {name: info.dtype for name, info in infos.items()} == {
        "w": torch.float16,
        "lm_head.weight": torch.float16,
        "router.bias": torch.float32,
        "count": torch.int64,
    }
    assert infos["w"].shape == (4, 2)
    tied = expected_tensors(tmp_path, dtype=torch.float16, tied=True)
    assert {info.name for info in tied} == {"w", "router.bias", "count"}
    index = {"weight_map": dict.fromkeys(first, "model-1.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(Checkpoint(tmp_path)) == set(first)
    assert torch.equal(Checkpoint(tmp_path)["w"], first["w"])


def test_a_checkpoint_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has no \*\.safetensors"):
        expected_tensors(tmp_path, dtype=torch.float32)


def test_scales_are_checked_when_an_update_opens_and_given_out_until_it_is_served(
    worker: Worker,
) -> None:
    scales = {"layers.0.k_scale": 0.5}
    worker.stage(WeightUpdate(id="u", version=1, kv_scales=scales), NEW)
    assert worker.checked == [scales]
    assert worker.inbox.loaded_scales is None
    worker.inbox.began()
    worker.inbox.to_load("u", restore=False)
    assert worker.inbox.loaded_scales == scales
    worker.inbox.failed(RuntimeError("out of memory"))
    assert (worker.inbox.loaded_scales, bool(worker.inbox.dirty)) == (None, True)
    worker.commit("u")
    assert (worker.inbox.loaded_scales, worker.inbox.dirty) == (None, "")
    worker.stage(WeightUpdate(id="v", version=2), OLD)
    worker.inbox.began()
    worker.inbox.to_load("v", restore=False)
    assert worker.inbox.loaded_scales is None
    assert worker.checked == [scales]
