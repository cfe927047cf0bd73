"""`megatron-idempotent certify`: what it prints, and what it refuses."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from starts import shown_at_80_columns, started

from benchmarks import _checks, _grid
from megatron_idempotent.patching.catalog import hazards
from megatron_idempotent.proof.certify import CHECKS, LAYOUTS, Result, certify, layout
from megatron_idempotent.proof.certify import main as command
from megatron_idempotent.proof.certify.draws import CALLS, MICROBATCHES, Draw
from megatron_idempotent.proof.certify.layouts import GRID, RANKS, WORDS, resharded
from megatron_idempotent.proof.certify.main import as_json, as_table, suspects, words_unseen
from megatron_idempotent.proof.certify.state_checks import EVERY

pytestmark = pytest.mark.full

RESULTS = [
    Result(layout="dp2", seed=7, **each)
    for each in (
        {"check": "whole-step", "verdict": "passed", "seconds": 1.5},
        {"check": "second-run", "verdict": "failed", "seconds": 2.0, "fault": "KeyError in x"},
        {"check": "nan", "verdict": "declared", "fault": "nobody looks"},
        {"check": "resume", "verdict": "not offered", "fault": "no save(), load()"},
    )
]


#: Four ranks of one kind leave no room for another kind.
FOUR = {"dp4", "tp4", "pp4", "cp4", "ep4"}
#: Two words of which one says what the other does.
ALIKE = ({"fp32", "distopt"}, {"moe", "ep2"}, {"tp2", "etp2"}, {"pp2", "vpp2"})
SET_UP_TWICE = "(train): When overlap_grad_reduce is True, config.no_sync_func must be None; a"


def test_a_table_has_a_line_for_each_fault_with_the_hazards_that_it_may_be():
    text = as_table(RESULTS)
    assert "dp2, second-run, failed: KeyError in x" in text
    assert "`megatron-idempotent explain second-window-not-reduced`" in text
    assert "dp2, nan, declared: nobody looks" in text
    last = "1 passed, 1 failed, 1 declared, 1 not made, in 4 s; --seed 7 draws the same"
    assert text.endswith(last)


@pytest.mark.parametrize(
    ("check", "layout", "fault", "wanted"),
    [
        ("second-run", "dp2", "megatron/training/training.py", {"no-sync-func-reentry"}),
        ("whole-step", "dp2", "slime/backends/megatron_utils/model.py", {"slime-train-reentry"}),
        ("whole-step", "dp2", "megatron/bridge/training/setup.py", {"bridge-setup-reentry"}),
        ("nan", "dp2", "own/loop.py", {"no-sync-func-reentry"}),
    ],
)
def test_an_exception_has_the_hazards_whose_message_it_has(check, layout, fault, wanted):
    fault = f"rank 1 did not end; on rank 0: AssertionError in {fault}:598 {SET_UP_TWICE}"
    found = Result(check=check, layout=layout, verdict="failed", fault=fault)
    assert {*suspects(found)} == wanted


@pytest.mark.parametrize(
    ("check", "layout", "fault", "wanted"),
    [
        ("whole-step", "dp2", "the gradient is 2 times the right one", False),
        ("whole-step", "dp2-fp16", "the gradient is 0.0039 times the right one", True),
        ("whole-step", "dp2-moe", "the gradient is off by 3 % of its norm, everywhere", True),
        (
            "whole-step",
            "fp16",
            "ModuleNotFoundError in <frozen a>:1 (f): No module named 'x'",
            False,
        ),
        ("whole-step", "fp16", "KeyError in megatron/core/x.py:1 (f): 'x'", False),
        ("whole-step", "fp16", "AssertionError in megatron/core/x.py:1 (f): ", False),
    ],
)
def test_other_faults_have_the_silent_hazards_of_their_layout(check, layout, fault, wanted):
    found = Result(check=check, layout=layout, verdict="failed", fault=fault)
    assert ("grad-scale-func" in suspects(found)) == wanted
    assert wanted or " in " not in fault or not suspects(found)


def test_a_table_names_the_words_that_no_layout_had():
    results = [
        Result(check="whole-step", layout=name, verdict=verdict)
        for name, verdict in {
            "dp2-tp2": "passed",
            "ep2-fp16": "failed",
            "cp2": "not offered",
        }.items()
    ]
    assert "\nNo layout had pp, cp, vpp, etp, mtp, tied, nosp, " in as_table(results)
    plain = [Result(check="nan", layout="dp2-fsdp2", verdict="passed")]
    assert words_unseen(plain) == ["sequences"]
    assert words_unseen(RESULTS[2:]) == []


def test_a_run_in_which_nothing_is_judged_is_no_pass(monkeypatch, capsys):
    def certified(adapter, **_):
        yield Result(check="nan", layout="dp2", verdict="not offered", fault="fsdp2 = True")

    monkeypatch.setattr(command, "certify", certified)
    assert command.main(["mine:Adapter"]) == 2
    assert "nothing was judged (dp2: fsdp2 = True)" in capsys.readouterr().err


def test_json_has_verdicts_and_seeds():
    rows = json.loads(as_json(RESULTS))
    assert [row["verdict"] for row in rows] == [each.verdict for each in RESULTS]
    assert {row["seed"] for row in rows} == {7}


def test_checks_name_hazards_that_there_are():
    assert {name for check in EVERY.values() for name in check.hazards} <= {*hazards()}


def test_checks_and_layouts_are_listed(capsys):
    assert command.main(["--list"]) == 0
    checks, _, layouts = capsys.readouterr().out.partition("\n\n")
    assert [line.split(" ")[0] for line in checks.splitlines()] == [*EVERY]
    first, *words = layouts.splitlines()
    assert ", ".join(LAYOUTS) in first
    assert [line.split(" ")[0] for line in words] == [*WORDS]


def test_the_list_fits_a_terminal_of_80_columns():
    program = "from megatron_idempotent.proof.certify.main import main; main(['--list'])"
    lines = shown_at_80_columns("-c", program)
    assert len(lines) > len(EVERY) + len(WORDS)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("command", [("certify", "a.module:Adapter"), ("prove",)])
def test_without_torch_the_command_says_what_is_missing(command):
    program = (
        "import sys; sys.modules['torch'] = None; from megatron_idempotent.cli.main import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *command], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert re.fullmatch(
        r"megatron-idempotent: .* needs torch, which is not installed: install the torch that your "
        r"framework pins, or pip install 'megatron-idempotent\[trainer\]'\n",
        done.stderr,
    )


@pytest.mark.parametrize(
    ("adapter", "asked", "said"),
    [
        ("mine:Adapter", {"checks": ["nope"]}, "unknown check nope: one of whole-step, "),
        ("mine:Adapter", {"layouts": ["dp2-cross"]}, "'dp2-cross' has the unknown word 'cross'"),
        ("mine:Adapter", {"layouts": []}, "certify got no layouts"),
        (
            "mine:Adapter",
            {"checks": "nan"},
            r"names as checks, got the string 'nan': pass \['nan'\]",
        ),
        (
            "mine:Adapter",
            {"layouts": "dp2"},
            "names as layouts, got the string 'dp2': pass .*words dpN",
        ),
        ("mine", {}, "takes PACKAGE.MODULE:CLASS, got 'mine'"),
        ("no_such_package:Adapter", {}, "'no_such_package:Adapter' cannot be imported"),
        ("json:JSONDecoder", {}, "json:JSONDecoder has no build, begin, microbatch, finish, abort"),
    ],
)
def test_what_is_not_there_is_named(megatron_rank_pool, adapter, asked, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        list(certify(adapter, pool=megatron_rank_pool, **asked))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "unknown word ''"),
        ("dp", "unknown word 'dp'"),
        ("dp0", "unknown word 'dp0'"),
        ("dp2-dp1", "says 'dp' twice"),
        ("distopt-distopt", "says 'distopt' twice"),
        ("dp2-tp2-pp2", "takes 8 ranks; at most 4 run"),
        ("pp3", "has 3 stages, which do not share 4 layers"),
        ("fp32-bf16", "says bf16 and fp32: name one type"),
        ("bf16-fp16-dp2", "says bf16 and fp16: name one type"),
        ("dp2-tp2-fsdp2-bf16", "says bf16, tp of an FSDP2 model"),
        ("dp2-fsdp2-packs-sequences", "says packs of an FSDP2 model"),
        ("pp1-vpp2", "interleaves chunks of one stage"),
        ("dp1-ep2", r"over 2 ranks .* of the 1 of a stage"),
        ("dp3-ep3", "has 3 ranks for 4 experts"),
        ("tp2-moe-nosp", "experts without sequence parallelism"),
        ("ep2-etp2-pp2", "takes 8 ranks; at most 4 run"),
    ],
)
def test_a_layout_that_there_is_not_is_refused(name, said):
    with pytest.raises(ValueError, match=said):
        layout(name)


def test_the_words_of_a_layout_are_what_its_model_is_built_of():
    found = layout("dp2-vpp2-distopt-nooverlap")
    assert (found.ranks, found.replicas, found.stages, found.dtype) == (4, 2, 4, "fp32")
    assert found.options == {
        "tp": 1,
        "pp": 2,
        "cp": 1,
        "vpp": 2,
        "sequence_parallel": False,
        "overlap_grad_reduce": False,
        "distributed_optimizer": True,
        "overlap_param_gather": False,
        "layers_per_stage": 1,
        "ep": 1,
        "etp": None,
        "experts": 0,
        "tied": False,
        "dtype": "fp32",
        "exact_attention": None,
    }
    found = layout("tp2-ep2-tied")
    assert (found.ranks, found.replicas, found.experts, found.auxiliary) == (4, 2, 4, True)
    wanted = {"ep": 2, "etp": 2, "experts": 4, "tied": True}
    assert {name: found.options[name] for name in wanted} == wanted
    assert (layout("tp2-ep2-etp1").ranks, layout("mtp").auxiliary) == (2, True)
    found = layout("cp2-ep4")  # experts are shared by the ranks of a sequence, too
    assert (found.ranks, found.replicas, found.options["cp"]) == (4, 2, 2)
    kinds = [layout(name).loss_kind for name in ("dp2", "dp2-sequences", "dp2-fsdp2-sequences")]
    assert kinds == ["token", "sequence", "sequence"]
    assert layout("cp2-moe-mtp-packs").auxiliary
    assert layout("tp2").options["sequence_parallel"]
    assert not layout("tp2-nosp").options["sequence_parallel"]


@pytest.mark.parametrize(
    ("name", "word", "found"),
    [
        ("dp2-distopt", "dp", "dp4-distopt"),
        ("dp4", "dp", "dp2"),
        ("dp2-bf16", "tp", "dp1-tp2-bf16"),
        ("tp2-bf16", "tp", "tp1-dp2-bf16"),
        ("dp2-moe", "ep", "dp2-ep2-moe"),
        ("ep2", "ep", "ep4"),
        ("dp2-ep2", "ep", "dp2-ep1"),
        ("dp2", "ep", None),
    ],
)
def test_a_layout_is_resharded_by_one_word(name, word, found):
    made = resharded(layout(name), word)
    assert (made and made.name) == found


def test_the_command_without_an_adapter_says_what_it_takes(capsys):
    assert command.main([]) == 2
    assert "name an adapter, PACKAGE.MODULE:CLASS" in capsys.readouterr().err


def test_the_documentation_has_all_checks_and_words(capsys):
    grid = (Path(__file__).parents[3] / _checks.PATH).read_text("utf-8")
    assert grid == _grid.text(_checks.grid()), "run `python -m benchmarks._checks`"
    rows = {
        name: said for section in json.loads(grid) for name, said in section["blocks"][0]["rows"]
    }
    assert {f"`{check.name}`": check.summary for check in EVERY.values()}.items() <= rows.items()
    assert {f"`{word}`": said for word, said in WORDS.items()}.items() <= rows.items()
    assert command.main(["--list"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert not [said for said in rows.values() if said not in printed]


@pytest.mark.exhaustive
def test_pytest_runs_the_checks_of_an_adapter(tmp_path, request):
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    here = request.path.parent
    path = os.pathsep.join((str(here), str(here.parents[1])))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    command += ["--certify", "planted:RefusesNoRows", "-k", "dp2-replica-without-rows"]
    run = started(*command, cwd=tmp_path, timeout_s=600, PYTHONPATH=path)
    assert run.returncode == 1
    assert "IndexError in " in run.stdout
    assert f"1 failed, {len(CHECKS) * len(LAYOUTS)} deselected" in run.stdout, run.stdout


def fit(*words):
    with_tp = {*words, "tp2"} if "nosp" in words else words
    try:
        return {*words} not in ALIKE and layout("-".join(with_tp)).ranks <= RANKS
    except ValueError:
        return False


def test_the_grid_has_every_two_words_that_fit_together_and_each_without_the_other():
    layouts = [set(name.split("-")) for name in GRID]
    assert all(layout(name).ranks <= RANKS for name in GRID)
    words = set.union(*layouts)
    kind_of = {word: word if word in WORDS else word.rstrip("0123456789") + "N" for word in words}
    assert {*kind_of.values()} == {*WORDS} - {"fsdp2"}  # which no adapter takes that takes others
    for one, other in itertools.permutations(words, 2):
        if fit(one, other) and not {one, other} & FOUR:
            assert any({one, other} <= names for names in layouts), (one, other)
        # Without tp these two say nothing.
        if kind_of[other] not in (kind_of[one], {"nosp": "tpN", "etp1": "tpN"}.get(one)):
            without = [names for names in layouts if kind_of[other] not in map(kind_of.get, names)]
            assert any(one in names for names in without), f"{one} is never without {other}"


def test_a_table_of_many_layouts_has_a_line_for_each():
    results = [
        Result(check="whole-step", layout=name, verdict="passed", of_bound=0.25) for name in LAYOUTS
    ]
    # Before the words that none had, and the summary.
    assert [line.split() for line in as_table(results).splitlines()[1:-2]] == [
        [name, "ok", "0.25"] for name in LAYOUTS
    ]


def test_the_grid_is_certified_if_asked_for(monkeypatch, capsys):
    asked = []

    def certified(adapter, *, layouts, seed, thorough, **_):
        asked.extend(layouts)
        yield Result(check="whole-step", layout=layouts[0], verdict="passed", seed=seed)
        assert (seed == 7) == thorough

    monkeypatch.setattr(command, "certify", certified)
    assert command.main(["mine:Adapter", "--grid"]) == 0
    assert tuple(asked) == GRID
    assert "; --seed " in capsys.readouterr().out
    assert command.main(["mine:Adapter", "--grid", "--seed", "7", "--thorough"]) == 0
    assert "; --seed 7 draws the same" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["mine:Adapter", "--grid", "--layout", "dp2"])
    assert "not allowed with argument --grid" in capsys.readouterr().err


@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_a_long_step_has_the_most_calls_and_a_call_of_the_most_microbatches(multiple):
    for seed in range(50):
        sizes = Draw(seed, "dp2", "drawn-sizes").sizes(CALLS, multiple)
        assert len(sizes) == CALLS
        assert (max(sizes), min(sizes)) == (MICROBATCHES // multiple * multiple, multiple)
        assert not any(size % multiple for size in sizes)
    assert Draw(3, "a").sizes(CALLS) == Draw(3, "a").sizes(CALLS)
    assert any(Draw(3, "a").sizes(CALLS) != Draw(n, "a").sizes(CALLS) for n in range(5))
