"""Wrong arguments and wrong environments: the message tells, and nothing is changed."""

from __future__ import annotations

import json
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from forks import FEW

from megatron_idempotent import PatchError, UnknownPatchError, apply, report, revert
from megatron_idempotent.patching import Helper, Limit, Patch, Target, api, settings
from megatron_idempotent.patching.base import untried
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.decide import review
from megatron_idempotent.patching.source import parse_body

SEED = "pipeline-seed-offset"
SWITCH = "MEGATRON_IDEMPOTENT"


@pytest.mark.parametrize("source", ["only", "exclude", "_ONLY", "_DISABLE"])
def test_an_unknown_id_is_refused_with_the_nearest_one(source, monkeypatch):
    arguments = {}
    before = list(report())
    if source.startswith("_"):
        monkeypatch.setenv(f"{SWITCH}{source}", f"{SEED},pipelin-seed-ofset")
    else:
        arguments[source] = [SEED, "pipelin-seed-ofset"]
    with pytest.raises(UnknownPatchError) as caught:
        apply(**arguments)
    name = f"{SWITCH}{source}" if source.startswith("_") else f"{source}="
    said = str(caught.value)
    assert said.startswith(f"{name} names 'pipelin-seed-ofset'")
    assert f"Did you mean '{SEED}'?" in said
    assert list(report()) == before


NO_IDS: list[Any] = [[3], [None], [SEED.encode()], SEED.encode(), [[SEED]], SEED, 3]
#: Arguments, what the environment sets beside them, and the error, which has the names of both.
REFUSED = [
    ({"only": ["x"]}, {}, UnknownPatchError),
    ({"only": ["pipeline-abort"]}, {}, UnknownPatchError),
    *(({"only": ids}, {}, TypeError) for ids in NO_IDS),
    *(({"exclude": ids}, {}, TypeError) for ids in (SEED, None)),
    ({"strict": "yes"}, {}, TypeError),
    ({"dry_run": 1}, {}, TypeError),
    ({"only": [SEED], "exclude": [SEED]}, {}, ValueError),
    *(
        ({}, {f"{SWITCH}{name}": value}, ValueError)
        for name in ("", "_STRICT")
        for value in ("2", "enabled", "-")
    ),
    *(({}, {f"{SWITCH}_ONLY": value}, ValueError) for value in (",", " , ,")),
    *(
        ({}, {f"{SWITCH}_REBIND": value}, ValueError)
        for value in ("slime;miles", "slime miles", "a..b", "./slime", "slime,3")
    ),
]


@pytest.mark.parametrize(("arguments", "environ", "error"), REFUSED)
def test_what_makes_no_sense_is_refused_by_its_name(arguments, environ, error, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error) as caught:
        apply(**arguments)
    names = [f"{name}=" for name in arguments] + [f"{k}='{value}'" for k, value in environ.items()]
    assert [name for name in names if name not in str(caught.value)] == []


def test_a_report_names_the_id_that_it_has_no_row_for():
    with pytest.raises(KeyError, match=f"'pipelin-seed-ofset'.*'{SEED}'"):
        report()["pipelin-seed-ofset"]
    with pytest.raises(TypeError, match="got 0"):
        report()[0]


@pytest.mark.parametrize(("value", "on"), [("1", True), ("Yes", True), ("OFF", False), ("", True)])
def test_a_switch_takes_the_usual_words(value, on):
    assert settings.read((), {SWITCH: value}).enabled is on


def test_lists_in_the_environment_may_have_spaces_and_gaps():
    environ = {f"{SWITCH}_DISABLE": " a ,, b,", f"{SWITCH}_ONLY": ",b ", f"{SWITCH}_REBIND": "c.d,"}
    read = settings.read(("a", "b"), environ)
    assert (read.disable, read.only, read.rebind) == ({"a", "b"}, {"b"}, {"c.d"})


def test_a_misspelt_variable_is_warned_of_once_and_raises_in_strict_mode(monkeypatch, caplog):
    monkeypatch.setattr(api, "_said", set())
    monkeypatch.setenv(f"{SWITCH}_DISBLE", SEED)
    for _ in range(2):
        apply(dry_run=True)
    (said,) = caplog.messages
    assert said.startswith(f"{SWITCH}_DISBLE ")
    assert f"{SWITCH}_DISABLE" in said
    with pytest.raises(ValueError, match=f"{SWITCH}_DISBLE"):
        apply(dry_run=True, strict=True)
    assert settings.read((), {f"{SWITCH}_QQ": "1"}).unknown[0].endswith(f"{SWITCH}_VERIFY")


def test_every_variable_in_the_project_is_in_the_table_of_them():
    root = Path(settings.__file__).parents[2]
    if not (root / "pyproject.toml").exists():
        pytest.skip("not in the repository")
    files = [root / "Makefile", *(root / "megatron_idempotent").rglob("*.py")]
    files += [*(root / "tests").rglob("*.py"), *(root / "benchmarks").rglob("*.py")]
    found = {
        name
        for file in files
        if file.name != Path(__file__).name
        for name in re.findall(rf"\b{SWITCH}(?:_[A-Z_]+)?\b", file.read_text())
    }
    assert found - settings._ELSEWHERE == set(settings.VARIABLES)


def test_a_named_patch_that_cannot_be_applied_raises_and_changes_nothing(cold):
    result = cold.run("scenarios.outcomes", bare=True, only=[SEED])
    assert result["raised"] == "PatchError"
    assert result["message"].startswith(
        f"{SEED}: not_installed: megatron-core is not installed; drop it from only="
    )
    assert set(result["left"].values()) == {"disabled"}


def test_a_failed_call_keeps_what_an_earlier_one_asked_for(cold, drifted):
    first = [{"only": ["grad-scale-func"]}]
    result = cold.run("scenarios.outcomes", among=FEW, path=drifted, first=first, strict=True)
    assert f"{SEED}: drifted" in result["message"]
    assert result["message"].endswith("exclude= it, or see `megatron-idempotent doctor`")
    assert result["left"]["grad-scale-func"] == "pending_import"
    assert result["left"][SEED] == "disabled"


def test_the_strict_switch_is_the_strict_argument(cold, drifted):
    given = {"among": FEW, "path": drifted, "environ": {f"{SWITCH}_STRICT": "1"}}
    assert "raised" in cold.run("scenarios.outcomes", **given)
    assert cold.run("scenarios.outcomes", **given, strict=False)[SEED]["status"] == "pending_import"


def test_the_report_is_written_whole_and_follows_what_happens(toys, tmp_path, monkeypatch):
    path = tmp_path / "report-3.json"
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv(f"{SWITCH}_REPORT", str(tmp_path / "report-{rank}.json"))
    toys.greet()

    def written() -> str:
        rows = {row["id"]: row for row in json.loads(path.read_text())}
        assert set(rows) == set(patches())
        assert set(rows["toy-a"]) == {"id", "status", "reason", "version", "targets"}
        return str(rows["toy-a"]["status"])

    toys.apply()
    assert written() == "pending_import"
    import toy_up.greet  # noqa: F401

    assert written() == "applied"
    path.unlink()
    toys.apply()
    assert written() == "already_applied"
    revert()
    assert written() == "disabled"
    assert os.listdir(path.parent).count("report-3.json") == 1
    assert not [name for name in os.listdir(path.parent) if name.startswith("report-3.json.")]


@pytest.mark.parametrize("folder", ["missing", "report"])
def test_a_report_that_cannot_be_written_warns_and_leaves_no_trace(
    toys, tmp_path, monkeypatch, caplog, folder
):
    path = tmp_path / "missing" / "report.json" if folder == "missing" else tmp_path / folder
    if folder == "report":
        path.mkdir()  # a folder stands where the file should go
    monkeypatch.setenv(f"{SWITCH}_REPORT", str(path))
    toys.greet()
    assert toys.apply()["toy-a"].status == "pending_import"
    assert f"cannot write {SWITCH}_REPORT={path}: " in caplog.text
    assert not [entry for entry in tmp_path.rglob("*.json*") if entry.is_file()]


def declare(**fields: object) -> Patch:
    target = Target("a.b:c", print, "x")
    good: dict[str, object] = {
        "id": "some-symptom",
        "summary": "it hurts",
        "before": "0.20",
        "targets": (target,),
    }
    return Patch(**good | fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        *(({"id": name}, name) for name in ("Some-Symptom", "some_symptom", "some--symptom", "-")),
        ({"targets": ()}, "target"),
        ({"since": "0.12rc1"}, "'0.12rc1'"),
        ({"distribution": "verl"}, "'' is no release"),
        ({"before": "0..2"}, "'0..2'"),
        ({"loudness": "noisy"}, "loudness='noisy'"),
    ],
)
def test_a_patch_that_makes_no_sense_is_refused(fields, named):
    with pytest.raises(ValueError, match=named):
        declare(**fields)


@pytest.mark.parametrize("address", ["a.b.c", "a:", ":b", "a..b:c", "a:b:c", "a b:c", "1a:b"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ValueError, match=f"'{address}'"):
        Target(address, print, "x")


def test_a_body_of_a_function_that_nobody_has_read_is_refused():
    body = parse_body("def b():\n    return 1\n", "b")
    known, reason = review(Target("a:b", print), body)
    assert not known
    assert f"b has body {body.hash}, reviewed are none" in reason


def helped_is_a_local_name():
    helped = True
    return helped


@pytest.mark.parametrize("missing", ["reproduce", "control"])
@pytest.mark.parametrize("wrong", [None, lambda: None, helped_is_a_local_name])
def test_a_helper_is_shown_in_use_and_in_a_program_that_it_leaves_alone(
    missing, wrong, monkeypatch
):
    case = types.ModuleType("some_symptom")
    vars(case).update(dict.fromkeys(("reproduce", "control"), lambda *, helped: None))
    vars(case)[missing] = wrong
    monkeypatch.setitem(sys.modules, case.__name__, case)
    with pytest.raises(ValueError, match=missing):
        Helper(module=case.__name__, summary="it hurts", call="guarded_window")


def test_a_hazard_takes_from_its_module_what_it_does_not_say(monkeypatch):
    case = types.ModuleType("cases.some_symptom", "It hurts.\n\nUpstream:\n    somewhere")
    vars(case).update(reproduce=print, Limit=Limit)
    monkeypatch.setitem(sys.modules, case.__name__, case)
    exec("LIMIT = Limit(summary='it hurts')", vars(case))
    limit = case.LIMIT
    assert (limit.module, limit.id, limit.ranks) == (case.__name__, "some-symptom", 2)
    assert (limit.distribution, limit.versions) == ("megatron-core", f">=0.12,<{untried()}")
    assert (limit.reproduce, limit.control) == (print, None)
    with pytest.raises(ValueError, match="some-symptom"):
        _ = limit.upstream
    case.__doc__ += ", and https://example.com/x, `y`."
    assert limit.upstream == "https://example.com/x"


def test_records_are_frozen_and_know_their_fields():
    patch = declare()
    assert patch == declare()
    assert hash(declare().targets[0].wrapper) == hash(print)
    assert repr(patch).startswith("Patch(summary='it hurts', stock_error='Fault: ', loudness='si")
    with pytest.raises(AttributeError, match="set id"):
        patch.id = "other"  # type: ignore[misc]
    with pytest.raises(AttributeError, match="delete id"):
        del patch.id
    with pytest.raises(TypeError, match="summary="):
        Patch()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'ident'"):
        declare(ident="x")


def test_errors_are_what_users_expect_to_catch():
    assert issubclass(UnknownPatchError, ValueError)
    assert issubclass(PatchError, RuntimeError)
