"""Distributions, scenarios that are read from TOML, and stories that are drawn."""

from __future__ import annotations

import itertools
import random
import statistics
import sys
from pathlib import Path

import pytest
from random_story import some_story, tell
from starts import started

from megatron_idempotent.rl.simulator.__main__ import SHIPPED, main
from megatron_idempotent.rl.simulator.faults import Fault
from megatron_idempotent.rl.simulator.latency import Constant, Empirical, LogNormal, uniform
from megatron_idempotent.rl.simulator.scenario import Scenario, ScenarioError, load_scenario
from megatron_idempotent.rl.simulator.serving import EngineCosts


def draws(of: object, count: int = 20000) -> list[float]:
    return sorted(of.quantile(uniform(7, i)) for i in range(count))  # type: ignore[attr-defined]


def test_uniforms_are_spread_evenly_and_depend_on_every_seed() -> None:
    found = [uniform(0, i) for i in range(20000)]
    assert 0 < min(found) < 0.001 < 0.999 < max(found) < 1
    assert statistics.mean(found) == pytest.approx(0.5, abs=0.01)
    assert statistics.correlation(found[1:], found[:-1]) == pytest.approx(0, abs=0.03)
    assert uniform(0, 1) != uniform(1, 0) != uniform(1, 1)
    assert uniform(5, 2**70) == uniform(5, 2**70)


def test_draws_have_the_shape_that_was_asked_for() -> None:
    tail = draws(LogNormal(median=800, p99=8000))
    assert tail[10000] == pytest.approx(800, rel=0.05)
    assert tail[19800] == pytest.approx(8000, rel=0.15)
    assert set(draws(Empirical(values=(3, 1, 2)))) == {1, 2, 3}


def test_a_distribution_is_a_number_a_table_or_your_own() -> None:
    class Mine:
        def quantile(self, share: float) -> float:
            return share

    mine = Mine()
    assert Scenario(length=mine).length is mine
    assert load_scenario(None, ["length=3"]).length == Constant(value=3)
    measured = load_scenario(None, ["length={kind = 'empirical', values = [6, 5]}"])
    assert measured.length == Empirical(values=(5, 6))


def test_more_requests_on_an_engine_are_never_slower_together() -> None:
    costs = EngineCosts(slots=16, step_s=0.02, request_s=0.001)
    rates = [costs.tokens_per_s(n / 4) for n in range(1, 80)]
    assert rates == sorted(rates)
    assert costs.tokens_per_s(100) == costs.tokens_per_s(16) == pytest.approx(16 / 0.036)
    gains = [after - before for before, after in itertools.pairwise(rates)]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(gains))


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_scenarios_can_be_read(path: Path) -> None:
    assert load_scenario(path).name == path.stem


def test_sections_distributions_and_faults_come_out_of_toml(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        "engines = 3\nlength = 50\n[engine]\nslots = 4\n"
        '[[faults]]\ntarget = "engine"\nkind = "dies"\nindex = 2\nat_s = 7\n'
    )
    scenario = load_scenario(path, ["train.finish_s=3", "sampler=first_ready", "seed=4"])
    assert (scenario.engines, scenario.engine.slots, scenario.length.quantile(0.5)) == (3, 4, 50)
    assert scenario.faults == (Fault(target="engine", kind="dies", index=2, at_s=7.0),)
    assert (scenario.train.finish_s, scenario.sampler, scenario.seed) == (3.0, "first_ready", 4)
    assert (scenario.make_sampler().name, scenario.name) == ("first_ready", "mine")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.slot=3", "unknown key engine.slot (value 3); did you mean engine.slots?"),
        ("xyz=3", "unknown key xyz (value 3); known: name, seed"),
        ("engines=2.5", "engines is 2.5; give a whole number, 1 or more"),
        ("engines=0", "engines is 0; allowed: 1 or more"),
        ("engines=true", "engines is True; give a whole number, 1 or more"),
        ("filtered=1", "filtered is 1; allowed: 0 or more, below 1"),
        ("engine=3", "engine is 3; write it as a table, [engine]"),
        ("faults={target='engine'}", "or each as a table, [[faults]]"),
        ("faults=[{target='moon', kind='falls'}]", "faults[0].target is 'moon'; allowed: engine"),
        ("faults=[{target='engine', kind='explodes'}]", "faults[0]: fault.kind is 'explodes'"),
        ("faults=[{target='policy', kind='raises'}]", "faults[0]: fault.call is ''; allowed for"),
        ("faults=[{target='engine', kind='dies', index=8}]", "engine 8; allowed: 0 to 7"),
        ("logprobs=all", "logprobs is 'all'; allowed: policy"),
        ("sampler=psychic", "sampler is 'psychic'"),
        ("capacity=3", "capacity is 3; allowed: 32 or more"),
        (
            "min_groups_per_call=2",
            "min_groups_per_call is 2; allowed: up to groups_per_call, which",
        ),
        ("limits.step_attempts=0", "step_attempts is 0; allowed: 1 or more"),
        ("engine.step_s=-1", "engine.step_s is -1; allowed: 0 or more"),
        ("tokens_per_entry=40000", "tokens_per_entry is 40000; allowed: up to most_tokens"),
        ("length=fast", "length: 'fast' is no distribution; give a number, or a table"),
        ("length={kind='gauss'}", "allowed: a table with kind = one of constant, "),
        ("length={kind='lognormal', median=5, p99=3}", "length: p99 is 3; allowed: the median"),
        ("length={kind='lognormal', median=5}", "length.p99 is missing; give a number"),
        ("length={kind='empirical', value=[1]}", "did you mean length.values?"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused(override: str, message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(None, [override])
    assert message in str(caught.value)


def test_a_scenario_needs_neither_torch_nor_megatron_and_help_not_even_pydantic() -> None:
    program = (
        "import sys\n"
        "for name in sys.argv[1].split(','): sys.modules[name] = None\n"
        "from megatron_idempotent.cli.main import main\n"
        "sys.exit(main(sys.argv[2:]))\n"
    )

    def run(without: str, *arguments: str) -> tuple[int, str]:
        done = started(sys.executable, "-c", program, without, *arguments)
        return done.returncode, done.stdout + done.stderr

    code, told = run("torch,megatron", "simulate", "balanced", "--set", "steps=2")
    assert code == 0, told
    assert "conserved" in told
    code, told = run("torch,megatron,pydantic", "simulate", "--help")
    assert (code, "--sweep" in told) == (0, True), told
    code, told = run("torch,megatron,pydantic", "simulate", "balanced")
    assert (code, told.count("\n")) == (2, 1), told
    assert "pip install 'megatron-idempotent[controller]'" in told


def test_the_command_prints_a_column_per_run(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--set", "steps=2", "--set", "groups_per_step=4", "--set", "engines=2"]
    assert main(["balanced", *small, "--sweep", "staleness=0,1"]) == 0
    out = capsys.readouterr().out
    assert "staleness=0  staleness=1" in out.splitlines()[0]
    assert any(line.startswith("overlap efficiency") for line in out.splitlines())
    assert main(["balanced", *small, "--json"]) == 0
    assert '"overlap_efficiency": ' in capsys.readouterr().out


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["balanced", "--set", "engine.slot=3"]) == 2
    assert "unknown key engine.slot" in capsys.readouterr().err
    assert main(["nowhere.toml"]) == 2
    assert "nowhere.toml: No such file" in capsys.readouterr().err
    assert main(["balanced", "--sweep", "staleness"]) == 2
    assert "write key=a,b" in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(45))
def test_runs_that_are_cut_short_and_go_on_keep_what_holds_for_one_run(seed: int) -> None:
    tell(some_story(random.Random(seed)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(1000, 6000, 100))
def test_a_hundred_more_of_them(first: int) -> None:
    for seed in range(first, first + 100):
        try:
            tell(some_story(random.Random(seed)))
        except BaseException as error:
            error.add_note(f"of the story with seed {seed}")
            raise
