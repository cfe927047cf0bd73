"""Programs of schedule calls and reductions: what stock gets right stays right, to the same bits.

What stock gets right is found by running it, so that this holds on every release. The programs, in
`reduction_programs.py`, are what a framework does that defers `finalize_model_grads`, holds calls
in `no_sync`, or reduces by hand, and what lies beside: the hazards of a chunk's reductions.
"""

from __future__ import annotations

from collections import Counter

import pytest
from reduction_programs import LAYOUTS, STEPS, Program, Setting, drawn, judge, programs_of, settings
from reductions import run

from megatron_idempotent.patching.source import locate

pytestmark = pytest.mark.full

BUFFER = locate("megatron.core.distributed.param_and_grad_buffer")
assert BUFFER is not None, "the tests need a Megatron"
#: Bucket groups learn how many gradients a step registers, as from 0.16 on; commits may not.
LEARNS = "is_first_batch" in BUFFER.read_text(encoding="utf-8")
EXHAUSTIVE = pytest.mark.exhaustive


def judged(
    megatron_ranks, ranks: int, programs: list[Program], applied: str = "forwards"
) -> Counter[tuple[str, str]]:
    """Count how often stock and patched were right; fail with the programs that the patches
    broke."""
    limit_s = 120 + 10 * len(programs)
    by_rank = megatron_ranks(ranks, run, programs, applied=(None, applied), timeout_s=limit_s)
    stock, patched = zip(*by_rank, strict=True)
    verdicts = [
        (program, judge(program, [rank[i] for rank in stock], [rank[i] for rank in patched]))
        for i, program in enumerate(programs)
    ]
    broken = [
        f"{program.name}: {verdict.complaint}; stock: {verdict.stock}; {program.ops}"
        for program, verdict in verdicts
        if verdict.complaint
    ]
    assert not broken, "\n".join([f"{len(broken)} of {len(programs)} programs", *broken[:5]])
    return Counter((verdict.stock, verdict.patched) for _, verdict in verdicts)


def test_two_calls_a_step_with_finalizing_deferred_are_right_and_stay_so(megatron_ranks):
    deferred = Setting(overlap=True, distributed=True, wired=True)
    programs = programs_of(deferred, {"2+2": STEPS["2+2"]}, ("last", "finalize", "finish"))
    held_none = [program for program in programs if program.name.endswith("held none")]
    found = judged(megatron_ranks, 2, held_none)
    if LEARNS:
        assert found == {("right", "right"): 3}
    else:
        assert set(found) == {("AssertionError: Cannot set grad twice",) * 2}


def test_what_stock_gets_right_stays_right(megatron_ranks):
    programs = [p for setting in settings() for p in programs_of(setting)]
    found = judged(megatron_ranks, 2, [*programs[::131], *map(drawn, range(16))])
    assert found["right", "right"] > 20, found
    assert found["silently wrong", "right"] > 2, found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_stock_gets_right_stays_right_in_other_layouts(layout, megatron_ranks):
    programs = _of_layout(layout)
    found = judged(megatron_ranks, LAYOUTS[layout][0], programs[:: len(programs) // 12])
    assert found["right", "right"] > 2, found


def test_several_optimizer_instances_have_no_handle_and_no_false_alarm(megatron_ranks):
    programs = _of_instances()
    found = judged(megatron_ranks, 4, programs[::31])
    assert found["right", "right"] > 5, found


def _of_layout(layout: str) -> list[Program]:
    # With sequence parallelism finish_grad_sync alone leaves layer norms unreduced.
    by_hand = () if layout == "tp2-sp" else ("finish", "start+finish")
    reductions = ("each", "last", "finalize", *by_hand)
    steps = {name: STEPS[name] for name in ("2", "2+2", "2 to 6", "6 to 2")}
    chosen = settings((layout,))
    if layout == "vpp2-align" or ("pp" in layout and not LEARNS):
        # What raises on stock in a backward does so on one stage, while the other waits: a second
        # call of a step where the schedule dispatches at the end of each, and before 0.16 a second
        # gradient of a parameter.
        steps = {"2": STEPS["2"], "2,4,2": [(2,), (4,), (2,)]}
    if "pp" in layout and not LEARNS:
        chosen = [setting for setting in chosen if setting.wired or not setting.overlap]
    return [p for setting in chosen for p in programs_of(setting, steps, reductions)]


def _of_instances() -> list[Program]:
    # Without expert parameters, which upstream reduces otherwise in some releases.
    several = [s._replace(instances=2) for s in settings(("dense", "twice")) if s.distributed]
    return [p for setting in several for p in programs_of(setting)]


@EXHAUSTIVE
@pytest.mark.parametrize("net", ["dense", "experts", "twice"])
def test_every_combination(net, megatron_ranks):
    programs = [p for setting in settings((net,)) for p in programs_of(setting)]
    for start in range(0, len(programs), 400):
        judged(megatron_ranks, 2, programs[start : start + 400])


@EXHAUSTIVE
def test_every_combination_of_several_instances(megatron_ranks):
    programs = _of_instances()
    for start in range(0, len(programs), 200):
        judged(megatron_ranks, 4, programs[start : start + 200])


@EXHAUSTIVE
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_combination_of_a_layout(layout, megatron_ranks):
    programs = _of_layout(layout)
    for start in range(0, len(programs), 60):
        judged(megatron_ranks, LAYOUTS[layout][0], programs[start : start + 60])


@EXHAUSTIVE
@pytest.mark.parametrize("applied", ["forwards", "backwards", "checked"])
def test_random_programs(applied, megatron_ranks):
    judged(megatron_ranks, 2, [drawn(seed) for seed in range(100, 600)], applied)


@EXHAUSTIVE
@pytest.mark.parametrize("applied", ["backwards", "checked"])
def test_neither_the_order_of_patches_nor_debug_mode_raises_false_alarms(applied, megatron_ranks):
    programs = [p for setting in settings() for p in programs_of(setting)]
    judged(megatron_ranks, 2, programs[::7], applied)
