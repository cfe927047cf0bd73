"""Weights on their way into an SGLang server, and what is left of them when that fails."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from sglang_cases import (
    ROUNDED,
    buckets_of,
    checkpoint,
    request,
    scenario,
    stage,
    true_logprobs,
    weights,
)
from sglang_server import FakeSglang

from megatron_idempotent.rl.engines import EngineError, EngineTimeout, EngineUnsupported
from megatron_idempotent.rl.engines.sglang import SglangEngine
from megatron_idempotent.rl.weights import UpdateMismatch, WeightUpdate

LOAD = "/update_weights_from_disk"


async def serves(engine: SglangEngine, seed: int, version: int) -> None:
    """Its next sample is of the weights of that checkpoint, under that version."""
    health = await engine.health()
    assert (health.status, health.version) == ("SERVING", version)
    sample = await engine.generate(request())
    assert sample.versions == (version,) * 20
    expected = true_logprobs(seed, (5, 6, 7), sample.tokens)
    assert sample.logprobs == pytest.approx(expected, abs=ROUNDED)


async def is_dirty(engine: SglangEngine, why: str) -> None:
    health = await engine.health()
    assert (health.status, health.version) == ("DIRTY", None)
    assert why in health.detail
    with pytest.raises(EngineError, match="must not serve"):
        await engine.resume()


def folders(directory: Path) -> list[str]:
    return sorted(each.name[:3] for each in (directory / "sgl").iterdir())


def test_the_server_is_told_of_an_update_at_its_commit_and_not_before(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, directory: Path) -> None:
        await engine.generate(request())
        before = len(server.calls)
        update = await stage(engine, 1)
        assert len(server.calls) == before
        await engine.pause()
        await engine.commit(update.id)
        (load,) = server.said(LOAD)
        assert load["weight_version"] == "1"
        # A flush as part of the load is what older servers die of.
        assert load["flush_cache"] is False
        assert server.said("/flush_cache")
        await engine.resume()
        await serves(engine, 1, 1)
        assert folders(directory) == ["v1-"]

    scenario(run, tmp_path)


def test_folders_of_versions_gone_by_are_removed(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, directory: Path) -> None:
        for version in (1, 2, 3):
            update = await stage(engine, version)
            await engine.pause()
            await engine.commit(update.id)
            await engine.resume()
        await stage(engine, 4)
        assert folders(directory) == ["v3-", "v4-"]

    scenario(run, tmp_path)
    assert folders(tmp_path) == ["v3-"]  # closed: what is served may be loaded again


def test_what_is_staged_goes_once_another_update_comes(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, directory: Path) -> None:
        await stage(engine, 1)
        await stage(engine, 2)
        assert folders(directory) == ["v2-"]
        third = buckets_of(weights(3), fails_behind=1)
        with pytest.raises(OSError, match="the trainer is gone"):
            await engine.stage(WeightUpdate(id="run/3", version=3), third)
        assert folders(directory) == []
        await engine.pause()
        for update_id in ("run/1", "run/2", "run/3"):
            with pytest.raises(EngineError, match="nothing is"):
                await engine.commit(update_id)

    scenario(run, tmp_path)


def test_a_server_that_has_a_version_keeps_it(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        await serves(engine, 0, 41)

    scenario(run, tmp_path, weight_version="41")
    scenario(run, tmp_path, settings={"initial_version": 41})


def test_folders_are_named_as_the_server_sees_them(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").symlink_to(tmp_path / "here")

    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        update = await stage(engine, 1)
        await engine.pause()
        await engine.commit(update.id)
        assert server.said(LOAD)[0]["model_path"].startswith(str(tmp_path / "there"))
        await engine.resume()
        await serves(engine, 1, 1)

    settings = {"directory": tmp_path / "here", "server_directory": str(tmp_path / "there")}
    scenario(run, tmp_path, settings=settings)


@pytest.mark.parametrize("how", ["cut short", "a file less", "no folder"])
def test_a_folder_that_lost_something_is_refused_before_the_server_is_told(
    tmp_path: Path, how: str
) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, directory: Path) -> None:
        update = await stage(engine, 1)
        (folder,) = (directory / "sgl").iterdir()
        file = folder / "model-00001.safetensors"
        if how == "cut short":
            file.write_bytes(file.read_bytes()[:-4])
        elif how == "a file less":
            file.unlink()
        else:
            shutil.rmtree(folder)
        await engine.pause()
        with pytest.raises(EngineError, match="stage the update again"):
            await engine.commit(update.id)
        assert not server.said(LOAD)
        await engine.resume()
        await serves(engine, 0, 0)
        await stage(engine, 1)
        await engine.pause()
        assert await engine.commit(update.id) == 1

    scenario(run, tmp_path)


def test_a_load_that_fails_half_way_leaves_it_dirty_until_it_is_committed(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        update = await stage(engine, 1)
        await engine.pause()
        server.do(lambda: setattr(server.scheduler, "fail_load", "reads fail"))
        with pytest.raises(EngineError, match="Rolling back"):
            await engine.commit(update.id)
        await is_dirty(engine, "Rolling back")
        assert await engine.commit(update.id) == 1
        await engine.resume()
        await serves(engine, 1, 1)

    scenario(run, tmp_path)


def test_a_load_that_fails_half_way_is_rolled_back_by_loading_what_was_served(
    tmp_path: Path,
) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, directory: Path) -> None:
        for version in (1, 2):
            await stage(engine, version)
            await engine.pause()
            server.hold(4)
            running = asyncio.ensure_future(engine.generate(request()))
            await engine.resume()
            await server.held()
            await engine.pause()
            server.do(lambda: setattr(server.scheduler, "fail_load", "reads fail"))
            with pytest.raises(EngineError):
                await engine.commit(f"run/{version}")
            # The server has loaded the new weights by now, and tells the old version.
            await engine.rollback(f"run/{version}")
            assert (await engine.health()).version == version - 1
            server.release()
            await engine.resume()
            # Its first tokens are of before, and the others of the same weights.
            sample = await running
            assert sample.versions == (version - 1,) * 20
            expected = true_logprobs(version - 1, (5, 6, 7), sample.tokens)
            assert sample.logprobs == pytest.approx(expected, abs=ROUNDED)
            await serves(engine, version - 1, version - 1)
            with pytest.raises(EngineError, match="not staged"):
                await commit_paused(engine, f"run/{version}")
            await engine.resume()
            await stage(engine, version)
            await commit_paused(engine, f"run/{version}")
            await engine.resume()
        assert folders(directory) == ["v2-"]

    async def commit_paused(engine: SglangEngine, update_id: str) -> None:
        await engine.pause()
        await engine.commit(update_id)

    scenario(run, tmp_path)


def test_a_load_whose_answer_is_lost_is_asked_about_and_not_sent_twice(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        update = await stage(engine, 1)
        await engine.pause()
        hold, loads = asyncio.Event(), server.scheduler
        answer = loads._update

        def slow(body: dict[str, object]) -> tuple[bool, str]:
            # Loads, and takes longer than the client waits.
            result = answer(body)
            hold_until(hold)
            return result

        loads._update = slow  # type: ignore[method-assign]
        with pytest.raises(EngineTimeout, match="has not answered"):
            await engine.commit(update.id)
        hold.set()
        assert await engine.commit(update.id) == 1
        assert len(server.said(LOAD)) == 1
        assert not server.died
        await engine.resume()
        await serves(engine, 1, 1)

    scenario(run, tmp_path, settings={"load_timeout_s": 0.3})


def hold_until(event: asyncio.Event) -> None:
    """Blocks the server's thread, as a load does."""
    import time

    deadline = time.monotonic() + 20
    while not event.is_set() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_load_that_hangs_stays_dirty_and_is_never_sent_twice(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        update = await stage(engine, 1)
        await engine.pause()
        server.do(lambda: setattr(server.scheduler, "fail_load", "hangs"))
        with pytest.raises(EngineTimeout):
            await engine.commit(update.id)
        with pytest.raises(EngineTimeout):  # the scheduler does not answer at all
            await engine.commit(update.id)
        with pytest.raises(EngineTimeout):
            await engine.resume()
        assert len(server.said(LOAD)) == 1
        assert (await engine.health()).status == "DEAD"

    settings = {"load_timeout_s": 0.2, "health_timeout_s": 0.3, "timeout_s": 5.0}
    scenario(run, tmp_path, settings=settings)


def test_health_finds_out_what_a_cancelled_commit_did(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        update = await stage(engine, 1)
        await engine.pause()
        server.hangs.add(LOAD)
        commit = asyncio.ensure_future(engine.commit(update.id))
        while not server.said(LOAD):
            await asyncio.sleep(0.01)
        commit.cancel()
        await asyncio.wait([commit])
        health = await engine.health()
        assert (health.status, health.version) == ("DIRTY", None)
        server.release()
        while server.do(lambda: server.scheduler.loads) == 0:
            await asyncio.sleep(0.01)
        assert await engine.commit(update.id) == 1
        health = await engine.health()
        assert (health.status, health.version) == ("PAUSED", 1)

    scenario(run, tmp_path)


def test_a_cache_that_cannot_be_flushed_is_found_out_before_the_weights_change(
    tmp_path: Path,
) -> None:
    """Up to 0.5.20, with requests that wait in a pause; a load would end such a server."""

    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        server.hold(4)
        running = asyncio.ensure_future(engine.generate(request()))
        await server.held()
        update = await stage(engine, 1)
        await engine.pause("keep")
        with pytest.raises(EngineError, match="cannot be flushed"):
            await engine.commit(update.id)
        assert not server.said(LOAD)
        await engine.rollback(update.id)
        server.release()
        await engine.resume()
        assert (await running).versions == (0,) * 20
        await serves(engine, 0, 0)
        await stage(engine, 1)
        await engine.pause("abort")
        assert await engine.commit(update.id) == 1

    scenario(run, tmp_path, flushes_waiting=False)


def test_only_what_has_changed_is_sent_and_loaded(tmp_path: Path) -> None:
    changed = {name: tensor for name, tensor in weights(1).items() if "layers.1" in name}
    rest = {name: tensor for name, tensor in weights(1).items() if name not in changed}

    async def run(engine: SglangEngine, server: FakeSglang, directory: Path) -> None:
        for version, part in ((1, changed), (2, rest)):
            update = WeightUpdate(id=f"d/{version}", version=version, base_version=version - 1)
            await engine.stage(update, buckets_of(part))
            await engine.pause()
            assert await engine.commit(update.id) == version
            await engine.resume()
        assert len(server.said(LOAD)) == 2
        await serves(engine, 1, 2)
        # All of them make up what is served, so all of them are kept, until one has everything.
        assert folders(directory) == ["v1-", "v2-"]
        await stage(engine, 3)
        await engine.pause()
        await engine.commit("run/3")
        assert folders(directory) == ["v3-"]

    scenario(run, tmp_path)


def test_a_part_that_fails_is_loaded_with_everything_below_it(tmp_path: Path) -> None:
    changed = {name: tensor for name, tensor in weights(1).items() if "layers.1" in name}
    rest = {name: tensor for name, tensor in weights(1).items() if name not in changed}

    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        first = WeightUpdate(id="d/1", version=1, base_version=0)
        await engine.stage(first, buckets_of(changed))
        await engine.pause()
        await engine.commit(first.id)
        second = WeightUpdate(id="d/2", version=2, base_version=1)
        await engine.stage(second, buckets_of(rest))
        server.do(lambda: setattr(server.scheduler, "fail_load", "reads fail"))
        with pytest.raises(EngineError):
            await engine.commit(second.id)
        assert await engine.commit(second.id) == 2
        paths = [body["model_path"] for body in server.said(LOAD)]
        assert [Path(path).name[:3] for path in paths[2:]] == [checkpoint(0).name, "v1-", "v2-"]
        # Weights of two versions are given no name.
        assert [body["weight_version"] for body in server.said(LOAD)[2:]] == [None, None, "2"]
        await engine.resume()
        await serves(engine, 1, 2)

    scenario(run, tmp_path)


def test_parts_are_refused_where_the_server_packs_its_weights(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        with pytest.raises(EngineUnsupported, match="fp8"):
            await stage(engine, 1, base_version=0)
        await stage(engine, 1)

    scenario(run, tmp_path, quantization="fp8")


def test_a_load_that_the_server_does_not_show_is_not_believed(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        update = await stage(engine, 1)
        await engine.pause()
        server.lies = True
        with pytest.raises(EngineError, match="does not say that it has version 1"):
            await engine.commit(update.id)
        await is_dirty(engine, "version 1")
        server.lies = False
        assert await engine.commit(update.id) == 1

    scenario(run, tmp_path)


def test_what_an_earlier_client_left_is_no_hindrance(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, directory: Path) -> None:
        update = await stage(engine, 1)
        await engine.pause()
        await engine.commit(update.id)
        (folder,) = (directory / "sgl").iterdir()
        (directory / "sgl" / f".{folder.name}.partial").mkdir(exist_ok=True)

    scenario(run, tmp_path)
    scenario(run, tmp_path)


def test_weights_that_somebody_else_has_loaded_make_it_dirty(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        await engine.generate(request())
        server.do(lambda: setattr(server, "_weight_version", "other"))
        await engine.pause()
        await is_dirty(engine, "'other'")
        await stage(engine, 1)
        await engine.commit("run/1")
        await engine.resume()
        await serves(engine, 1, 1)

    scenario(run, tmp_path)


def test_what_an_update_must_bring_may_be_told(tmp_path: Path) -> None:
    """Acts as a trainer that sends another type than the checkpoint has."""
    from megatron_idempotent.rl.weights import TensorInfo

    halves = {name: tensor.bfloat16() for name, tensor in weights(1).items()}
    expected = [TensorInfo.of(name, tensor) for name, tensor in halves.items()]

    async def run(engine: SglangEngine, server: FakeSglang, directory: Path) -> None:
        with pytest.raises(UpdateMismatch):
            await stage(engine, 1)
        assert folders(directory) == []
        await engine.stage(WeightUpdate(id="h", version=1), buckets_of(halves))

    scenario(run, tmp_path, settings={"expected": expected})


def test_tensors_that_share_memory_arrive_each_as_it_is(tmp_path: Path) -> None:
    flat = {name: tensor.reshape(-1) for name, tensor in weights(1).items()}
    import torch

    whole = torch.cat(list(flat.values()))
    views, start = {}, 0
    for name, tensor in weights(1).items():
        views[name] = whole[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()
    norms = [name for name in views if name.endswith("layernorm.weight")]
    views[norms[1]] = views[norms[0]]  # as tied weights are

    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        await engine.stage(WeightUpdate(id="v", version=1), buckets_of(views, per_bucket=100))
        await engine.pause()
        await engine.commit("v")
        parameters = server.do(lambda: dict(server.scheduler.model.named_parameters()))
        for name, tensor in views.items():
            assert torch.equal(parameters[name], tensor), name

    scenario(run, tmp_path)
