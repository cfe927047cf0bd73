"""A vLLM worker's account of updates, without vLLM: real buckets over a real transport.

And scales of key-value caches in the layers of a model that keeps them as vLLM does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_idempotent.rl.engines import EngineError, EngineUnsupported
from megatron_idempotent.rl.engines.vllm_inbox import CacheScales, Inbox
from megatron_idempotent.rl.engines.vllm_updates import WorkersState
from megatron_idempotent.rl.weights import (
    Bucket,
    TensorInfo,
    UpdateDamaged,
    UpdateMismatch,
    WeightUpdate,
)
from megatron_idempotent.rl.weights.safetensors_io import expected_tensors
from megatron_idempotent.rl.weights.transports import BucketSender, DiskSender, Sender

pytestmark = pytest.mark.full

OLD = {name: torch.full((8,), value) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0))}
NEW = {name: tensor + 10 for name, tensor in OLD.items()}


class Worker:
    """An inbox, and what vLLM and a trainer do with it."""

    def __init__(self, directory: Path, sender: Sender | None = None, bucket: str = "") -> None:
        self.sender = sender or DiskSender(directory)
        infos = [TensorInfo.of(name, tensor) for name, tensor in OLD.items()]
        self.checked: list[Any] = []
        self.inbox = Inbox(
            rank=0,
            expected=lambda: infos,
            checkpoint=lambda: OLD,
            check_scales=self.checked.append,
            bucket=bucket,
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
            self.tell("bucket", id=update.id, announced=dict(announced))
            self.state_once(lambda state, sent=index: state["received"] > sent or state["failed"])
        asyncio.run(self.sender.close())
        return self.tell("complete", id=update.id, buckets=len(tensors))

    def state_once(self, reached: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Ask for the state again and again until it is the one that is waited for."""
        deadline = time.monotonic() + 30
        while not reached(state := self.tell("state")):
            assert time.monotonic() < deadline
        return state

    def commit(self, update_id: str = "u", *, fails: bool = False) -> dict[str, float]:
        """Do what vLLM does at a commit, which fails or not; return what it loads."""
        self.inbox.began()
        loaded = self.inbox.to_load(update_id, restore=False)
        if fails:
            self.inbox.failed(RuntimeError("out of memory"))
        else:
            self.inbox.finished()
        return {name: float(tensor[0]) for name, tensor in loaded.items()}

    def is_at(self, version: int | None, *, dirty: str = "", **more: Any) -> None:
        """Check the state that it tells."""
        state = self.tell("state")
        assert state["version"] == version
        assert dirty in state["dirty"]
        assert bool(state["dirty"]) == bool(dirty)
        assert {name: state[name] for name in more} == more


FIRST = WeightUpdate(id="u", version=1)
ALL_NEW = {"a": 11.0, "b": 12.0, "c": 13.0}


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(tmp_path)
    yield worker
    worker.inbox.forget()
    asyncio.run(worker.sender.close())


def test_a_worker_reads_objects_where_its_operator_has_named_a_url(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    place = str(tmp_path / "run")
    for bucket in ("", f"{place}2"):
        worker = Worker(tmp_path, BucketSender(place), bucket)
        failed = worker.stage(FIRST, NEW)["error"]
        assert failed["kind"] == "TransportError"
        for words in (place, f"opens {bucket or 'no URL'}", "MEGATRON_IDEMPOTENT_BUCKET"):
            assert words in failed["message"]
    worker = Worker(tmp_path, BucketSender(place), str(tmp_path))
    worker.stage(FIRST, NEW)
    assert worker.commit() == ALL_NEW
    # What does not fit the model is refused before its bytes are read.
    worker = Worker(tmp_path, BucketSender(place), str(tmp_path))
    worker.open(FIRST)
    entry = {"name": "a", "shape": [1 << 40], "dtype": "float32", "offset": 0}
    announced = {"update": "u", "index": 0, "nbytes": 1 << 42, "tensors": [entry]}
    worker.tell("bucket", id="u", announced=announced)
    failed = worker.state_once(lambda state: state["failed"])["failed"]
    assert failed["kind"] == "UpdateMismatch"
    assert "a: float32 [1099511627776]" in failed["message"]
    asyncio.run(worker.sender.close())
    for wrong, named in (("reference://::data:,{}", "reference"), ("s3://key:secret@b", "BUCKET")):
        with pytest.raises(ValueError, match=named):
            Worker(tmp_path, bucket=wrong)


def test_a_worker_is_dirty_from_a_commits_begin_to_its_end(worker: Worker) -> None:
    assert worker.stage(FIRST, NEW)["holds"] == {"u": 1}
    worker.inbox.began()
    worker.is_at(None, dirty="under way", updating=True)
    worker.inbox.to_load("u", restore=False)
    worker.is_at(None, dirty="under way", updating=True)
    worker.inbox.finished()
    worker.is_at(1, committed="u", holds={"u": 1}, updating=False)
    # The same again, for another worker that has failed.
    assert worker.commit() == ALL_NEW
    worker.is_at(1, half="")
    worker.inbox.began()
    worker.is_at(1, dirty="under way", half="", updating=True)
    worker.inbox.finished()
    worker.is_at(1)


def test_a_commit_that_was_begun_again_before_it_ended_may_have_loaded_weights(
    worker: Worker,
) -> None:
    worker.stage(FIRST, NEW)
    worker.inbox.began()
    worker.inbox.to_load("u", restore=False)
    worker.inbox.began()
    worker.inbox.finished()
    worker.is_at(None, dirty="neither ended nor failed", half="u")
    assert worker.commit() == ALL_NEW
    worker.is_at(1)


def test_an_attempt_that_loads_nothing_does_not_clean_a_half_loaded_model(worker: Worker) -> None:
    worker.stage(FIRST, NEW)
    worker.commit(fails=True)
    worker.inbox.finished()  # vLLM's own end of it
    worker.is_at(None, dirty="out of memory", half="u", holds={"u": 1})
    worker.inbox.began()
    worker.inbox.finished()
    worker.is_at(None, dirty="out of memory", half="u")
    assert worker.commit() == ALL_NEW
    worker.is_at(1, half="")


def test_a_half_loaded_model_gets_back_what_it_served(worker: Worker) -> None:
    assert worker.inbox.to_load("", restore=True) is OLD
    worker.stage(FIRST, NEW)
    worker.commit()
    worker.stage(WeightUpdate(id="second", version=2), OLD)
    worker.commit("second", fails=True)
    worker.inbox.began()
    restored = worker.inbox.to_load("", restore=True)
    worker.inbox.finished()
    assert {name: float(tensor[0]) for name, tensor in restored.items()} == ALL_NEW
    worker.is_at(1, half="")


def test_an_update_with_a_base_is_loaded_with_the_rest_of_it(worker: Worker) -> None:
    parts = [{"b": NEW["b"]}, {"c": NEW["c"]}, {}]
    loaded = [(1.0, 12.0, 3.0), (1.0, 12.0, 13.0), (1.0, 12.0, 13.0)]
    for base, (part, expected) in enumerate(zip(parts, loaded, strict=True)):
        update = WeightUpdate(id=f"on {base}", version=base + 1, base_version=base)
        worker.stage(update, part)
        assert tuple(worker.commit(update.id).values()) == expected
        worker.is_at(base + 1)


@pytest.mark.parametrize(
    ("base", "dirty", "keep", "message"),
    [
        (0, False, True, "builds on version 0"),
        (1, True, True, "no version is served"),
        (1, False, False, "keep_copy"),
    ],
)
def test_an_update_with_a_base_that_is_not_there_is_refused(
    worker: Worker, base: int, dirty: bool, keep: bool, message: str
) -> None:
    worker.stage(FIRST, NEW, keep=keep)
    worker.commit()
    if dirty:
        worker.inbox.began()
        worker.inbox.failed(RuntimeError("out of memory"))
    answer = worker.stage(WeightUpdate(id="v", version=2, base_version=base), {"b": OLD["b"]})
    assert answer["error"]["kind"] == "UpdateRefused"
    assert message in answer["error"]["message"]
    assert "v" not in answer["holds"]


def refused(answer: dict[str, Any], message: str) -> dict[str, Any]:
    assert message in answer["error"]["message"]
    return answer


def test_an_update_is_above_what_is_served_and_alone_and_complete(worker: Worker) -> None:
    third = WeightUpdate(id="u", version=3)
    answer = worker.stage(third, NEW, serving=3)
    refused(answer, "worker 0: update u of version 3")
    worker.open(third, serving=2)
    asyncio.run(worker.sender.close())
    other = worker.open(WeightUpdate(id="v", version=5), serving=2)
    assert refused(other, "while u is")["staging"] == "u"
    answer = refused(worker.tell("complete", id="u", buckets=2), "0 of 2 buckets")
    assert answer["holds"] == {}
    worker.tell("drop", id="another")
    assert worker.tell("state")["staging"] == "u"
    assert worker.tell("drop", id="u")["staging"] == ""
    answer = refused(worker.tell("bucket", id="u", announced={}), "update u")
    assert answer["error"]["kind"] == "UpdateRefused"
    refused(worker.tell("sing"), "'sing'")


def test_an_update_that_goes_silent_fails_and_makes_room(worker: Worker) -> None:
    worker.open(FIRST, silence_s=0.01)
    asyncio.run(worker.sender.close())
    state = worker.state_once(lambda state: state["failed"])
    assert state["failed"]["kind"] == "UpdateDamaged"
    assert state["staging"] == ""
    assert worker.tell("complete", id="u", buckets=0)["error"] == state["failed"]
    assert worker.stage(WeightUpdate(id="v", version=1), NEW)["holds"] == {"v": 1}


def test_workers_that_have_committed_different_versions_are_dirty_together(worker: Worker) -> None:
    same = {**worker.tell("state"), "version": 2, "committed": "u", "holds": {"u": 2, "v": 3}}
    other = {**same, "version": 1, "committed": "t", "holds": {"t": 1, "u": 2}}
    state = WorkersState.of([same, other], engine="e")
    assert state.disagree
    assert "[1, 2]" in state.dirty
    assert (state.version, state.committed, state.holds) == (None, "", {"u": 2})
    failed = {**same, "failed": {"kind": "UpdateDamaged", "message": "cut"}}
    WorkersState.of([same, failed], engine="e")
    with pytest.raises(UpdateDamaged, match="engine e: cut"):
        WorkersState.of([same, failed], engine="e", receiving=True)
    failed["error"] = {"kind": "MemoryError", "message": "none"}
    with pytest.raises(EngineError, match="engine e: MemoryError in a worker: none"):
        WorkersState.of([same, failed], engine="e")


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


def test_scales_are_checked_when_an_update_opens_and_given_out_until_it_is_served(
    worker: Worker,
) -> None:
    scales = {"layers.0.k_scale": 0.5}
    worker.stage(WeightUpdate(id="u", version=1, kv_scales=scales), NEW)
    assert (worker.checked, worker.inbox.loaded_scales) == ([scales], None)
    worker.inbox.began()
    worker.inbox.to_load("u", restore=False)
    assert worker.inbox.loaded_scales == scales
    worker.inbox.failed(RuntimeError("out of memory"))
    assert worker.inbox.loaded_scales is None
    worker.commit()
    assert worker.inbox.loaded_scales is None
    worker.stage(WeightUpdate(id="v", version=2), OLD)
    worker.inbox.began()
    worker.inbox.to_load("v", restore=False)
    assert (worker.checked, worker.inbox.loaded_scales) == ([scales], None)


class Attention(torch.nn.Module):
    """The buffers and numbers of vLLM's layer, `make test-vllm` has the layer itself."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.kv_cache_dtype = dtype
        self.calculate_kv_scales = True
        for which in "kvq":
            self.register_buffer(f"_{which}_scale", torch.tensor(1.0))
            setattr(self, f"_{which}_scale_float", 1.0)
        self._k_scale_cpu, self._v_scale_cpu = torch.tensor(1.0), torch.tensor(1.0)


class Layer(torch.nn.Module):
    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.self_attn = torch.nn.Module()
        self.self_attn.attn = Attention(dtype)
        self.self_attn.qkv_proj = torch.nn.Linear(2, 2)


def model(*dtypes: str) -> torch.nn.Module:
    whole = torch.nn.Module()
    whole.model = torch.nn.Module()
    whole.model.layers = torch.nn.ModuleList([Layer(dtype) for dtype in dtypes])
    return whole


def given(layer: int, **scales: float) -> dict[str, float]:
    names = {"k": "k_scale", "v": "v_scale", "q": "attn.q_scale"}
    return {f"model.layers.{layer}.self_attn.{names[w]}": v for w, v in scales.items()}


PLACE = "model.layers.{}.self_attn.attn"


def test_scales_are_written_in_place_as_float32_rounds_them_to_all_that_reads_them() -> None:
    whole = model("fp8", "fp8_e4m3")
    scales = CacheScales(whole)
    attention = whole.model.layers[0].self_attn.attn
    buffer = attention._k_scale
    told = {**given(0, k=0.1, v=0.2, q=0.3), **given(1, k=0.4, v=0.5)}
    scales.check(told)
    scales.write(scales.read(), told)
    rounded = [float(torch.tensor(value)) for value in (0.1, 0.2, 0.3)]
    assert rounded[0] != 0.1
    assert attention._k_scale is buffer
    assert list(scales.read()[PLACE.format(0)].values()) == rounded
    assert [getattr(attention, f"_{which}_scale_float") for which in "kvq"] == rounded
    assert [float(attention._k_scale_cpu), float(attention._v_scale_cpu)] == rounded[:2]
    assert not attention.calculate_kv_scales
    # Of queries there need not be any: what was there stays.
    assert scales.read()[PLACE.format(1)]["q"] == 1.0


def test_a_reload_that_resets_them_leaves_those_of_before() -> None:
    whole = model("fp8")
    scales = CacheScales(whole, doubled=True)
    # Names may be those of vLLM itself.
    told = {f"{PLACE.format(0)}.k_scale": 0.5, f"{PLACE.format(0)}.v_scale": 0.25}
    scales.check(told)
    scales.write(scales.read(), told)
    before = scales.read()
    assert before[PLACE.format(0)] == {"k": 1.0, "v": 0.5, "q": 1.0}
    attention = whole.model.layers[0].self_attn.attn
    for which in "kvq":
        getattr(attention, f"_{which}_scale").fill_(1.0)
        setattr(attention, f"_{which}_scale_float", 1.0)
    scales.write(before, None)
    assert scales.read() == before
    assert attention._v_scale_float == 0.5


@pytest.mark.parametrize("dtypes", [(), ("auto",), ("fp8_per_token_head",), ("bfloat16", "auto")])
def test_a_model_without_such_a_cache_refuses_scales(dtypes: tuple[str, ...]) -> None:
    with pytest.raises(EngineUnsupported, match="kv_scales"):
        CacheScales(model(*dtypes)).check(given(0, k=0.5, v=0.5))


def test_scales_have_to_be_those_of_all_layers_and_of_no_other() -> None:
    whole = model("fp8", "fp8", "auto")
    both = {**given(0, k=1.5, v=1.5), **given(1, k=1.5, v=1.5)}
    CacheScales(whole).check(both)
    for scales, named in (
        (given(0, k=1.5, v=1.5), "layers.1.self_attn.attn.k_scale, .*v_scale"),
        ({**both, **given(2, k=1.5)}, "layers.2"),
        ({**both, **given(7, k=1.5)}, "layers.7"),
    ):
        with pytest.raises(UpdateMismatch, match=named):
            CacheScales(whole).check(scales)
    # A stage of a pipeline has some of the layers only.
    CacheScales(whole, whole=False).check({**both, **given(7, k=1.5, v=1.5)})
