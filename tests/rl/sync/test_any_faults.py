"""Whatever fails, in whatever order: an engine serves one version that is known, or is named."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from memory_engine import FAULTS, MemoryEngine, Source, limits

from benchmarks._virtual_clock import run as run_virtually
from megatron_idempotent.rl.engines import Request
from megatron_idempotent.rl.sync import SyncFailed, SyncReport, WeightSync

pytestmark = pytest.mark.full

QUICK = limits(0.005)
METHODS = ("stage", "pause", "commit", "rollback", "resume")
faults = st.dictionaries(
    st.sampled_from(METHODS), st.lists(st.sampled_from(FAULTS), max_size=5), max_size=4
)
updates = st.lists(
    st.tuples(st.tuples(faults, faults, faults), st.booleans()), min_size=1, max_size=4
)


@settings(deadline=None, max_examples=150)
@given(updates)
def test_every_engine_serves_one_known_version_or_is_quarantined_by_name(program) -> None:
    engines = [MemoryEngine(name) for name in "abc"]
    sync = WeightSync(engines, settings=QUICK)

    async def scenario() -> None:
        for version, (new_faults, deltas) in enumerate(program, start=1):
            for engine, these in zip(engines, new_faults, strict=True):
                engine.faults = {method: list(listed) for method, listed in these.items()}
                engine.dead = False  # somebody starts it again, as it was
            try:
                report = await sync.update(Source(version), version, deltas=deltas)
            except SyncFailed as failed:
                report = failed.report
            await check(engines, sync, report, version)

    run_virtually(scenario())


async def check(
    engines: list[MemoryEngine], sync: WeightSync, report: SyncReport, version: int
) -> None:
    """The report says what the engines are, and none is both half-written and serving."""
    assert set(report.engines) == {"a", "b", "c"}
    for engine in engines:
        found = report.engines[engine.name]
        if found.outcome == "quarantined":
            assert engine.name in sync.quarantined
            assert not engine.dirty or engine.paused or engine.dead
            continue
        assert engine.name not in sync.quarantined
        request = Request(id="r", prompt=(1,), max_tokens=1)
        sample = await engine.generate(request)
        assert sample.versions == sample.logprobs == (found.version,)
        assert (found.outcome == "committed") == (found.version == version)
