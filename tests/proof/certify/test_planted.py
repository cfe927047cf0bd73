"""Each check catches the bugs that were planted for it; right adapters pass all of them."""

import importlib.util
import itertools
import random
import re

import pytest
from bugs import MORE, OF_CHECKS, OWN, RIGHT, RIGHT_IN_ALL
from ranks import RELEASE

from megatron_idempotent.proof.certify import CHECKS, LAYOUTS, STATE_CHECKS, certify, layout, run
from megatron_idempotent.proof.certify.state_checks import EVERY

pytestmark = pytest.mark.full

WEEKLY = pytest.mark.exhaustive
#: A bug that shows on stock Megatron alone: the patches gather what is pending in a window.
ON_STOCK = "planted:HooksStayOff"
#: The checks of steps that catch a bug too.
ALSO = {
    "planted:FirstStepsDivisor": {"uneven-replicas", "replica-without-rows"},
    "planted:MeanOfReplicas": {"replica-without-rows"},
}
#: Steps of many sizes, which many bugs show in.
DRAWN = {"drawn-sizes", "nothing-valid", "unwatched-steps", "sizes-change", "rows-left-over"}
KINDS = {"steps": CHECKS, "state": STATE_CHECKS}


def weekly(*row, **how):
    return pytest.param(*row, marks=WEEKLY, **how)


def lacking(adapter, check):
    """Return what the installed packages lack for a check of an adapter, or None."""
    of_state = check == "state" or check in STATE_CHECKS
    if RELEASE < (0, 16) and (of_state or "offload" in check or "TellsOfPadding" in adapter):
        return "Megatron from 0.16 on: it saves torch's Adam of today, and frees gradient buffers"
    if of_state and importlib.util.find_spec("psutil") is None:
        return "psutil, which megatron.core.dist_checkpointing needs, undeclared"
    if re.search(r"checkpoints:(Training|Legacy)", adapter) and RELEASE < (0, 17):
        return "megatron.training, which wheels have from 0.17 on"
    return None


def rows(*tables):
    """Make parameters of tables in `bugs.py`: adapter, check, layout, and what is said of it."""
    made = []
    for (check, where, *said), names in itertools.chain(*(table.items() for table in tables)):
        for name in names.split():
            adapter = name.removeprefix("+")
            if ":" not in adapter:
                adapter = f"planted:{adapter}"
            marks = [] if name.startswith("+") else [WEEKLY]
            if (reason := lacking(adapter, check)) is not None:
                marks.append(pytest.mark.skip(reason=reason))
            made.append(pytest.param(adapter, check, where, *said, marks=marks))
    return made


def fault_of(pool, adapter, check, where, **how):
    return run.outcome_of(pool, adapter, EVERY[check], layout(where), run.Options(**how))[0]


def failed(pool, adapter, checks, where, **how):
    """The checks that an adapter fails on a layout; not all fail."""
    found = list(certify(adapter, checks=checks, layouts=[where], pool=pool, **how))
    assert any(each.verdict in ("passed", "not judged") for each in found)
    return {each.check: each.fault for each in found if each.verdict == "failed"}


@pytest.fixture(autouse=True)
def importable(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))


def test_every_check_has_a_bug_that_it_catches():
    assert [*dict.fromkeys(check for check, *_ in OF_CHECKS)] == [*EVERY]


@pytest.mark.parametrize(("bug", "check", "where", "said"), rows(OF_CHECKS, MORE))
def test_a_check_catches_its_bug(megatron_rank_pool, bug, check, where, said):
    """Whatever the seed."""
    how = {"stock": bug == ON_STOCK, "seed": random.randrange(10**6)}
    fault = fault_of(megatron_rank_pool, bug, check, where, **how)
    assert fault, how
    assert said in fault, how


@pytest.mark.exhaustive
@pytest.mark.parametrize(("bug", "check", "where", "said"), rows(OF_CHECKS))
def test_no_other_check_catches_it(megatron_rank_pool, bug, check, where, said):
    """Run all checks of the kind, those of steps with two replicas, which some need."""
    checks = CHECKS if check in CHECKS else STATE_CHECKS
    where = where.replace("dp1", "dp2")
    found = failed(megatron_rank_pool, bug, checks, where, stock=bug == ON_STOCK)
    assert {*found} - (DRAWN - {check}) == {check} | ALSO.get(bug, set()), found


@pytest.mark.parametrize(("adapter", "check", "where"), rows(RIGHT))
def test_what_is_right_is_not_accused(megatron_rank_pool, adapter, check, where):
    assert not fault_of(megatron_rank_pool, adapter, check, where)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("adapter", "kind", "where"), rows(RIGHT_IN_ALL))
def test_a_right_adapter_passes_all_checks(megatron_rank_pool, adapter, kind, where):
    assert not failed(megatron_rank_pool, adapter, KINDS[kind], where)


def test_a_run_that_skips_its_steps_shows_nothing(megatron_rank_pool):
    fault = fault_of(megatron_rank_pool, "planted:Overflows", "rollback", "fp16-distopt")
    assert fault == "the step was skipped, and shows nothing: a gradient is not finite"


@pytest.mark.parametrize(
    ("adapter", "check", "where", "stock", "patched"),
    [
        # Stock Megatron drops gradients of an open step, and the patch refuses.
        (
            *("planted:InParts", "offload-in-mid-step", "dp2-nooverlap"),
            *("the step has moved no parameter", ""),
        ),
        weekly(
            *("planted:ZeroesBeforeLogprobs", "logprobs-while-offloaded", "dp2"),
            *("died with signal SIGSEGV", ""),
        ),
        *(
            weekly(f"{OWN}:Megatron", "offload-between-steps", where, "", None)
            for where in ("dp2", "dp2-distopt", "dp2-bf16")
        ),
        weekly("planted:InParts", "split-step", "dp2-nooverlap", "", None),
    ],
)
def test_stock_megatron_is_judged_without_the_patches(
    megatron_rank_pool, adapter, check, where, stock, patched
):
    if RELEASE < (0, 16):
        pytest.skip("gradient buffers can be offloaded from 0.16 on")
    for on_stock, said in ((True, stock), (False, patched)):
        if said is None:
            continue
        fault = fault_of(megatron_rank_pool, adapter, check, where, stock=on_stock)
        assert said in fault
        assert bool(fault) == bool(said), fault


def test_a_rank_that_raises_is_named_where_the_others_wait(megatron_rank_pool, monkeypatch):
    monkeypatch.setattr(run, "DEADLINE_S", 3.0)
    assert re.fullmatch(
        r"rank 1 did not end within 3 s; on rank 0: RuntimeError in .*: the first rank .* begin; "
        r"rank 1 is waiting in new_group\(\), called in .*/agreement\.py:\d+ \(\w+\)",
        fault_of(megatron_rank_pool, "planted:OneRankRaises", "whole-step", "dp2"),
    )


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        ("AsyncFinish", ".finish is an async function, which certify does not await: run the "),
        ("KeepsAString", ".keeps is 'scheduler': it takes a tuple of names, some of 'scheduler', "),
        ("KeepsASchedule", r".keeps is \('schedule',\): it takes .* of 'scheduler', 'random', "),
        ("ReshardsData", r".reshards is \('data',\): it takes .* of 'dp', 'tp', 'pp', 'ep', 'cp'"),
    ],
)
def test_what_an_adapter_says_and_cannot_say_is_named(megatron_rank_pool, bug, said):
    with pytest.raises(ValueError, match=said):
        list(certify(f"planted:{bug}", layouts=["dp1"], pool=megatron_rank_pool))


def test_a_fault_is_placed_by_what_came_before_the_step_and_by_ranks(megatron_rank_pool):
    fault = fault_of(megatron_rank_pool, "planted:FrozenByFailure", "failure-on-one-rank", "dp1")
    assert fault.startswith("the step after one in which the ")
    fault = fault_of(megatron_rank_pool, "planted:NeverGathers", "unwatched-steps", "dp2-distopt")
    assert re.search(r"rank \d \(replica \d\) has other bits in .* replica, rank \d \(", fault)


def test_a_rank_that_dies_is_named_with_the_signal(megatron_rank_pool):
    found = fault_of(megatron_rank_pool, "planted:OneRankDies", "whole-step", "dp2")
    assert found == "rank 1 died with signal SIGKILL"


def judged(pool, adapter, check, *layouts, **options):
    """The results of a check, by layout."""
    found = certify(adapter, checks=[check], layouts=layouts, pool=pool, **options)
    return {each.layout: each for each in found if each.check == check}


def test_what_an_adapter_declares_is_not_run_unless_asked_for(megatron_rank_pool):
    adapter = "planted:DeclaresNaN"
    found = judged(megatron_rank_pool, adapter, "nan", "dp2")["dp2"]
    assert (found.verdict, found.fault) == ("declared", "nobody looks at the norm")
    found = judged(megatron_rank_pool, adapter, "nan", "dp2", declared=True)["dp2"]
    assert found.verdict == "declared"
    assert re.fullmatch(
        r"nobody looks at the norm \(a (loss|gradient) .*, in call \d of \d, and the step .*\)",
        found.fault,
    )


def test_what_an_adapter_declares_of_a_word_holds_for_layouts_with_it(megatron_rank_pool):
    found = judged(megatron_rank_pool, "planted:DeclaresNaNOfExperts", "nan", "dp1", "moe")
    assert {name: each.verdict for name, each in found.items()} == {
        "dp1": "failed",
        "moe": "declared",
    }
    with pytest.raises(ValueError, match=r"names \['nan/experts'\], which are none of whole-step"):
        judged(megatron_rank_pool, "planted:DeclaresAnUnknownWord", "nan", "dp1")


def test_a_layout_whose_whole_step_fails_is_judged_no_further(megatron_rank_pool):
    found = judged(megatron_rank_pool, "planted:TwiceTheLoss", "nan", "dp1")
    assert found["dp1"].verdict == "not judged"


@pytest.mark.parametrize(
    ("adapter", "check", "where", "said"),
    [
        (f"{OWN}:FSDPSplitStep", "nan", "dp2", "fsdp2 = True"),
        (f"{OWN}:SplitStep", "nan", "dp2-fsdp2", "fsdp2 = False"),
        ("planted:NoPacks", "nan", "dp2-packs", "no packs = True"),
        ("planted:NoPacks", "nan", "dp2-sequences", "no sequences = True"),
        ("planted:NoPacks", "packed-lengths", "dp1", "no packs"),
        (f"{OWN}:FSDPSplitStep", "low-rank-adapters", "dp2-fsdp2", "no adapters on FSDP2"),
        (f"{OWN}:OrderStable", "same-bits", "packs", "which sequences share a pack is the "),
        (f"{OWN}:SplitStep", "same-bits", "dp1", "no order_stable = True"),
    ],
)
def test_an_adapter_is_judged_on_what_it_offers(megatron_rank_pool, adapter, check, where, said):
    (found,) = judged(megatron_rank_pool, adapter, check, where).values()
    assert found.verdict == "not offered"
    assert found.fault.startswith(said)


#: A check of each kind, where there is the most to go wrong; all of them, and in all layouts, with
#: -m exhaustive.
USUAL = {
    "dp2-distopt": (
        *("whole-step", "split-step", "uneven-replicas", "logprobs-in-mid-step", "abort-and-retry"),
        *("failure-on-one-rank", "nan", "resume", "offload-between-steps"),
    ),
    "tp2-bf16-distopt": ("low-rank-adapters",),
}
#: The other models, each way of sharing them, and all of them together; batches; precisions.
NAMED = (
    *("moe", "dp2-moe", "ep2", "ep2-pp2", "ep2-distopt", "tp2-ep2", "tp2-ep2-etp1", "etp2"),
    *("dp4-ep2", "dp2-tied-pp2", "tied-vpp2", "tp2-tied", "tp2-mtp", "mtp", "mtp-pp2"),
    *("moe-vpp2", "ep2-mtp-tied-pp2", "tp2-ep2-mtp-tied-distopt"),
    *("pp2-packs", "vpp2-packs", "tp2-packs"),
    *("cp2", "cp2-packs", "dp2-cp2", "cp2-pp2", "cp2-tp2-packs"),
    *("cp2-ep2", "cp2-moe-pp2", "dp2-cp2-ep4", "cp2-tp2-ep4-etp1", "cp2-moe-etp2"),
    *("moe-bf16", "ep2-mtp-bf16", "ep2-fp16-distopt", "cp2-moe-bf16", "pp2-mtp-fp16"),
    *("fp16", "dp2-fp16-distopt", "pp2-fp16", "tp2-fp16", "dp2-fp16-packs"),
    *("dp2-fp32", "dp2-bf16", "dp2-bf16-distopt", "pp2-bf16", "tp2-bf16", "tp2-bf16-distopt"),
    "dp2-bf16-packs",
    *("dp2-fsdp2", "dp3-fsdp2", "dp2-fsdp2-sequences"),
    *("dp2-sequences", "pp2-sequences", "dp2-moe-sequences", "ep2-sequences", "mtp-sequences"),
    *("dp2-distopt-sequences", "dp2-packs-sequences", "cp2-sequences", "cp2-packs-sequences"),
    "dp2-bf16-sequences",
    *("dp2-moe-packs", "ep2-packs-sequences", "tp2-ep2-mtp-packs-distopt", "pp2-mtp-packs"),
    *("cp2-mtp", "cp2-mtp-packs-sequences", "cp2-moe-mtp-packs", "vpp2-moe-packs-bf16"),
)


@pytest.mark.parametrize(
    ("name", "checks"),
    [
        *USUAL.items(),
        *(weekly(each, tuple(CHECKS), id=each) for each in dict.fromkeys((*LAYOUTS, *NAMED))),
    ],
)
def test_our_own_step_passes(megatron_rank_pool, name, checks):
    place = layout(name)
    adapter = f"{OWN}:{'FSDPSplitStep' if place.fsdp2 else 'SplitStep'}"
    found = list(certify(adapter, checks=checks, layouts=[name], pool=megatron_rank_pool))
    assert not {each.fault for each in found if each.verdict == "failed"}
    assert all(0 < each.of_bound < 1 for each in found if each.check == "whole-step")
    assert {each.check for each in found if each.verdict == "passed"} == {
        name
        for name, check in CHECKS.items()
        if (name in checks or name == "whole-step")
        and place.lacks(check.where) is None
        and "order_stable" not in check.needs
    }


#: One of each kind that `USUAL` is not; the two other adapters have less to do with a layout: the
#: grid has them, and CI each week.
PROMPT = ("tp2-ep2-etp1", "dp2-bf16-distopt", "fp16", "cp2-packs")
OTHER = tuple(name for name in NAMED if name not in PROMPT and not layout(name).fsdp2)


@pytest.mark.parametrize(
    ("adapter", "name"),
    [
        *(("SplitStep", name) for name in PROMPT),
        *(weekly("SplitStep", name) for name in OTHER),
        *(
            weekly(adapter, name)
            for adapter in ("Megatron", "Window")
            for name in (*PROMPT, *OTHER)
        ),
    ],
)
def test_steps_of_other_layouts_are_those_of_their_definition(megatron_rank_pool, name, adapter):
    found = certify(
        f"{OWN}:{adapter}",
        checks=["counts", "auxiliary-losses", "packed-lengths"],
        layouts=[name],
        pool=megatron_rank_pool,
    )
    assert not {each.fault for each in found if each.verdict == "failed"}


@pytest.mark.parametrize(
    "names",
    [
        ["dp1-moe", "dp2-moe"],
        *(
            weekly([f"dp{n}-{each}" for n in sizes], id=each)
            for each, sizes in {
                "mtp": (1, 2, 4),
                "moe-mtp-tied-distopt": (1, 2, 3, 4),
                "bf16-distopt": (1, 4),
                "tp2-nosp": (1, 2),
                "vpp2-sequences": (1, 2),
                "cp2-moe": (1, 2),
            }.items()
        ),
    ],
)
def test_a_step_that_is_order_stable_has_the_same_bits_on_all_replicas(megatron_rank_pool, names):
    found = judged(megatron_rank_pool, f"{OWN}:OrderStable", "same-bits", *names).values()
    assert {each.verdict for each in found} == {"passed"}, found
    assert len({each.bits for each in found}) == 1


def test_bits_of_other_numbers_of_replicas_are_compared(megatron_rank_pool):
    found = judged(megatron_rank_pool, "planted:ScalesWithReplicas", "same-bits", "dp1", "dp2")
    assert found["dp2"].fault == "the same microbatches give other bits than in dp1"
