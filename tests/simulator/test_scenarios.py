"""Distributions, and scenarios that are read from TOML."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest

from megatron_idempotent.simulator.__main__ import SHIPPED, main
from megatron_idempotent.simulator.costs import EngineCosts
from megatron_idempotent.simulator.faults import Fault
from megatron_idempotent.simulator.latency import (
    Constant,
    Empirical,
    LogNormal,
    Mixture,
    Pareto,
    distribution,
    uniform,
)
from megatron_idempotent.simulator.load import ScenarioError, build_scenario, load_scenario


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
    heavy = draws(Pareto(least=100, alpha=1.5, most=5000))
    assert heavy[0] == pytest.approx(100, rel=0.01)
    assert heavy[-1] == 5000
    assert heavy[10000] == pytest.approx(100 * 2 ** (1 / 1.5), rel=0.05)
    assert set(draws(Empirical(values=(3, 1, 2)))) == {1, 2, 3}
    mixed = draws(Mixture(parts=((0.9, Constant(value=1)), (0.1, Constant(value=9)))))
    assert mixed.count(9) == pytest.approx(2000, rel=0.1)


def test_a_distribution_is_a_number_or_a_table() -> None:
    assert distribution(3, "length") == Constant(value=3)
    table = {
        "kind": "mixture",
        "parts": [
            {"share": 0.9, "kind": "lognormal", "median": 1, "p99": 3},
            {"share": 0.1, "kind": "empirical", "values": [5, 6]},
        ],
    }
    assert distribution(table, "length") == Mixture(
        parts=((0.9, LogNormal(median=1, p99=3)), (0.1, Empirical(values=(5, 6))))
    )


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("fast", "length is 'fast'; a number, or a table"),
        ({"kind": "gauss"}, "one of constant, lognormal"),
        ({"kind": "lognormal", "median": 5, "p99": 3}, "p99 is 3; 5 or more"),
        ({"kind": "lognormal", "median": 5}, "length is .*p99"),
        ({"kind": "pareto", "least": 1, "alpha": 1, "beta": 2}, "beta"),
        ({"kind": "mixture", "parts": [{"share": 0.5, "kind": "constant", "value": 1}]}, "sum to"),
    ],
)
def test_a_distribution_that_is_none_is_refused(given: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        distribution(given, "length")


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
    ("table", "match"),
    [
        ({"engine": {"slot": 3}}, "unknown key engine.slot; did you mean engine.slots?"),
        ({"xyz": 3}, "unknown key xyz; known: name, seed"),
        ({"engines": 2.5}, "engines is 2.5; give a whole number"),
        ({"engines": 0}, "engines is 0; allowed: 1 or more"),
        ({"engines": True}, "engines is True; give a whole number"),
        ({"engine": 3}, "write it as a table"),
        ({"faults": {"target": "engine"}}, "write each as a table"),
        ({"faults": [{"target": "moon", "kind": "falls"}]}, "target is 'moon'; allowed: engine"),
        ({"faults": [{"target": "engine", "kind": "explodes"}]}, "allowed for engine: dies"),
        ({"faults": [{"target": "policy", "kind": "raises"}]}, "fault.call is ''"),
        ({"faults": [{"target": "engine", "kind": "dies", "index": 8}]}, "engine 8; allowed"),
        ({"logprobs": "all"}, "logprobs is 'all'; allowed: policy"),
        ({"sampler": "psychic"}, "sampler is 'psychic'"),
        ({"capacity": 3}, "capacity is 3; allowed: 32 or more"),
        ({"engine": {"step_s": -1}}, "engine.step_s"),
        ({"train": {"finish_s": -1}}, "train.finish_s is -1"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused(table: dict[str, object], match: str) -> None:
    with pytest.raises(ScenarioError, match=match):
        build_scenario(table)


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
