"""The commands that decide without importing Megatron, run as users run them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkouts import info_of
from starts import shown_at_80_columns, started

from megatron_idempotent.cli.doctor import notes
from megatron_idempotent.cli.explain import case_text
from megatron_idempotent.cli.findings import WORDS, recorded
from megatron_idempotent.cli.main import main
from megatron_idempotent.patching.api import apply
from megatron_idempotent.patching.catalog import hazards, patches
from megatron_idempotent.patching.overview import overview
from megatron_idempotent.patching.releases import installed
from megatron_idempotent.patching.report import Report
from megatron_idempotent.patching.rows import Row
from megatron_idempotent.patching.source import locate

PROBE = (
    "import sys; from megatron_idempotent.cli.main import main; code = main(sys.argv[1:]); "
    "loaded = {'torch', 'megatron', 'numpy'} & set(sys.modules); "
    "sys.exit(f'imported {loaded}' if loaded else code)"
)
MEGATRON = installed("megatron-core")
FRAMEWORKS = {patch.distribution for patch in patches().values()} - {"megatron-core"}
OFF = sum(not patch.default for patch in patches().values())


def run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    given = {} if path is None else {"PYTHONPATH": path}
    return started(sys.executable, "-c", PROBE, *arguments, COLUMNS=80, **given)


def copied(module: str, root: Path) -> Path:
    """A copy of a file of the installed Megatron, in a checkout that hides the installed one."""
    source = locate(module)
    assert source is not None
    copy = root / Path(*module.split(".")).with_suffix(".py")
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, copy)
    for folder in copy.relative_to(root).parents[:-1]:
        (root / folder / "__init__.py").touch()
    return copy


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a few files of the installed Megatron, hiding the installed one."""
    for name in ("megatron.core.package_info", "megatron.core.tensor_parallel.random"):
        copied(name, tmp_path)
    return tmp_path


def test_doctor_answers_in_its_first_line_and_a_pipe_gets_a_line_per_patch():
    result = run("doctor")
    assert result.returncode == 0, result.stderr
    first, *rest = result.stdout.splitlines()
    landing = rest[2 : rest.index("", 2)]
    assert MEGATRON is not None
    assert first.startswith(f"{len(landing)} of {len(landing)} would land on megatron-core ")
    assert f" {MEGATRON.text}; {OFF} off by default; " in first
    assert first.endswith(f"; {len(FRAMEWORKS)} frameworks not installed")
    assert "\x1b" not in result.stdout
    assert rest[-1].startswith("Not installed: ")
    folded = {patch.id for patch in patches().values() if patch.distribution in FRAMEWORKS}
    shown = [line.split()[0] for line in rest if line.startswith("  ")]
    assert sorted(shown) == sorted(patches().keys() - folded)
    assert all("; lands when megatron." in line for line in landing), "the whole reason"


def test_doctor_and_a_printed_report_fit_a_terminal():
    doctors = shown_at_80_columns("-m", "megatron_idempotent", "doctor")
    report = apply(dry_run=True)

    def laid_out(width):
        return overview(report, report.incomplete, width, dry_run=True, notes=notes()).splitlines()

    assert doctors == laid_out(80)
    program = "import megatron_idempotent; print(megatron_idempotent.apply())"
    first, *printed = shown_at_80_columns("-c", program)
    # Of those that wait nobody has read yet that upstream has repaired them.
    waiting = int(doctors[0].split()[0]) + sum(row.status == "fixed_upstream" for row in report)
    assert first.startswith(f"{waiting} of {waiting} wait for the import of ")
    assert max(map(len, printed)) <= 80
    names = {target for row in report for each in row.targets for target in each.split(":")[:1]}
    told = {word.rstrip(",") for line in printed for word in line.split() if "megatron." in word}
    assert told <= names, "no module's name is broken"
    for width in (80, 200):
        lines = laid_out(width)
        assert width // 2 < max(len(line) for line in lines if len(line.split()) > 1) <= width
    assert len(lines) < len(doctors)


STATUSES = (
    *("applied", "already_applied", "pending_import", "disabled", "not_installed", "failed"),
    *("unsupported_version", "missing_target", "fixed_upstream", "drifted", "conflict"),
)


def test_a_report_has_a_group_for_each_status_and_breaks_no_word():
    told: dict[str, list[str]] = {status: [] for status in STATUSES}
    for number, each in enumerate(patches()):
        told[STATUSES[number % len(STATUSES)]].append(each)
    report = rows(**{each.replace("-", "_"): name for name, ids in told.items() for each in ids})
    text = overview(report, report.incomplete, 80)
    assert max(map(len, text.splitlines())) <= 80
    in_place = len(told["applied"]) + len(told["already_applied"])
    waiting = len(told["pending_import"])
    concerned = in_place + waiting + len(report.problems)
    assert text.startswith(f"{in_place} of {concerned} in place on megatron-core 0.19.2")
    for ids in (told[name] for name in told if name != "not_installed"):
        assert all(re.search(rf"^  {each}(\s|$)", text, re.MULTILINE) for each in ids)
    whole = overview(report, report.incomplete, None).replace(":", ": ").split()
    assert text.replace(":", ": ").split() == whole
    assert str(report) == overview(report, report.incomplete, None), "a pipe gets a line per patch"
    assert repr(report).startswith(f"<Report {len(told['already_applied'])} already_applied, ")


def rows(**statuses: str) -> Report:
    """A report in which patches named by identifier have a status, and the rest are disabled."""
    return Report(
        Row(
            id=each,
            status=statuses.get(each.replace("-", "_"), "disabled"),
            reason="why it is so, in words that do not fit in a line of any terminal of 80 columns "
            "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
            version="0.19.2",
            targets=(),
        )
        for each in patches()
    )


def test_doctor_puts_problems_first_and_names_no_release_where_nothing_would_land():
    report = rows(grad_scale_func="drifted", unscaled_twice="pending_import")
    found = overview(report, report.incomplete, None, dry_run=True)
    first, hint, group, _, heading, problem, *_ = found.splitlines()
    assert group.startswith("group loss-scale is not whole")
    assert hint == "`megatron-idempotent drift --diff` shows what is new in a body that drifted."
    assert first.startswith(
        "1 of 2 would land on megatron-core 0.19.2; 1 DRIFTED: grad-scale-func; "
    )
    assert heading == "Problems: the hazard is here, and its patch is refused (1)"
    assert problem.split()[:2] == ["grad-scale-func", "drifted"]
    assert patches()["grad-scale-func"].summary in problem
    absent = rows(**{each.replace("-", "_"): "not_installed" for each in patches()})
    first, _, last = overview(absent, absent.incomplete, None, dry_run=True).splitlines()
    assert first.startswith("none would land; why it is so")
    assert f"(asked with {sys.executable}); {len(FRAMEWORKS)} frameworks not installed" in first
    assert "megatron-core (" in last
    assert max(map(len, overview(rows(), (), 80).splitlines())) <= 80


def test_doctor_json_names_the_files_that_it_read(capsys):
    assert main(["doctor", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in rows] == list(patches())
    (row,) = (row for row in rows if row["id"] == "pipeline-seed-offset")
    assert row["files"] == {target: str(locate(target.split(":")[0])) for target in row["targets"]}
    assert row["status"] == "pending_import"


def test_doctor_exits_with_1_where_a_body_drifted(checkout):
    altered = checkout / "megatron/core/tensor_parallel/random.py"
    altered.write_text(altered.read_text().replace("offset = seed + 2718", "offset = seed + 1"))
    result = run("doctor", "--json", path=checkout)
    (row,) = (r for r in json.loads(result.stdout) if r["id"] == "pipeline-seed-offset")
    assert row["status"] == "drifted"
    assert "no longer contains `offset = seed + 2718`" in row["reason"]
    assert result.returncode == 1


def test_a_megatron_that_gets_not_one_patch_is_no_success(checkout, tmp_path_factory):
    archive = tmp_path_factory.mktemp("archive") / "megatron"
    zipped = Path(shutil.make_archive(str(archive), "zip", checkout))
    (checkout / "megatron/core/package_info.py").write_text(info_of("0.11.0"))
    for path in (zipped, checkout):
        result = run("doctor", path=path)
        assert result.returncode == 1, (path, result.stdout, result.stderr)
        assert f"not one patch is for the Megatron at {path}" in result.stdout
        told = "import megatron_idempotent as m; m.apply(); m.apply(strict=True)"
        said = started(sys.executable, "-c", told, PYTHONPATH=path).stderr
        warned, _, raised = said.partition("Traceback")
        assert warned.count("not one patch is for the Megatron at") == 1, said
        assert "PatchError: not one patch is for the Megatron at" in raised


STRIPPED = """
import sys
import megatron_idempotent.proof.cpu.pytest_plugin
from megatron_idempotent.cli.main import main
megatron_idempotent.apply()
problems = megatron_idempotent.apply(dry_run=True).problems  # no assert: it would be stripped too
sys.exit(str(problems) if problems else main(["explain", "no_sync_func_reentry.py"]))
"""


def test_explain_prints_every_section_of_the_case_file_also_without_docstrings(capsys):
    """`python -OO` strips docstrings, and a case file is one."""
    command = [sys.executable, "-OO", "-c", STRIPPED]
    stripped = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert main(["explain", "no-sync-func-reentry"]) == 0
    assert stripped == capsys.readouterr().out
    for part in ("Symptom:", "Cause:", "Affects:", "Upstream:", "Remove when:", "Targets:"):
        assert part in stripped
    assert "\nSilent or loud:\n    loud: a run ends in an error" in stripped
    assert "\nAnswer:\n    patch, on by default\n" in stripped
    assert "    train() can be called again, and k calls are as one long call\n" in stripped
    assert "megatron-idempotent prove no-sync-func-reentry" in stripped
    assert main(["explain"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert listed == list(hazards())


def test_explain_prints_what_was_seen_on_each_release_and_each_pinned_commit():
    text = case_text(hazards()["mtp-without-transformer-engine"])
    seen = " ".join(text.partition("\nWhere it was seen:\n")[2].partition("\n\n")[0].split())
    verdicts = {name: row["mtp-without-transformer-engine"] for name, row in recorded().items()}
    assert len(set(verdicts.values())) > 1
    for word in set(verdicts.values()):
        names = [name for name, verdict in verdicts.items() if verdict == word]
        assert f"{WORDS[word].sentence}: {', '.join(names)}" in seen
    of_framework = case_text(hazards()["bridge-train-reentry"])
    assert "\nWhere it was seen:\n" not in of_framework, "a framework's releases are not among them"
    assert max(map(len, case_text(hazards()["unscaled-twice"]).splitlines())) <= 100


@pytest.mark.parametrize(
    ("hazard_id", "answer"),
    [
        ("weights-written-beside-optimizer", "call `ensure_main_params_synced`"),
        ("module-wrapped-twice", "documented limit: nothing here repairs it"),
    ],
)
def test_explain_says_what_to_do_without_a_patch(hazard_id, answer):
    assert f"\nAnswer:\n    {answer}\n" in case_text(hazards()[hazard_id])


def test_explain_says_how_to_switch_on_what_is_off():
    for patch in patches().values():
        name_it = f'    patch, off by default: name it, `apply(only=["{patch.id}"])`'
        assert (name_it in case_text(patch)) == (not patch.default)
        check = ", or set MEGATRON_IDEMPOTENT_CHECK=1\n"
        assert (check in case_text(patch)) == patch.debug


@pytest.mark.parametrize(
    ("hazard_id", "says"),
    [
        ("no-sync-func-reentry", "# fix: accept the no_sync_func of an earlier train() call"),
        ("no_sync_func_reentry.py", "config.no_sync_func in ("),
        ("resiliency-save-shares-host-tensors", "merged in NVIDIA/nvidia-resiliency-ext#376"),
        ("offloaded-optimizer-loads-wrong", "The repair of adam-step-shared ends it, too"),
        ("param-groups-collide", "There is nothing to send (Megatron's main: upstream has"),
        ("frozen-tied-embedding", "(Megatron's main: does not have the hazard)."),
        ("skyrl-checkpoint-hangs", "Nobody has written upstream's repair yet"),
        ("pipeline-abort", "It is by design: there is no repair to send."),
        ("pipeline-seed-offset", "It is by design: there is no repair to send."),
        ("pipeline-abort", "Remove when: the schedules end a window on all ranks"),
    ],
)
def test_explain_upstream_prints_the_repair_or_says_who_has_it(hazard_id, says, capsys):
    assert main(["explain", hazard_id, "--upstream"]) == 0
    assert says in capsys.readouterr().out


def test_an_installed_package_says_where_repairs_are(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("megatron_idempotent.cli.upstream.FOLDER", tmp_path / "upstream")
    assert main(["explain", "no-sync-func-reentry", "--upstream"]) == 0
    said = capsys.readouterr().out
    assert "/tree/main/upstream/no-sync-func-reentry, if there is one." in said
    assert main(["explain", "--upstream"]) == 2
    assert "name its id" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "prove"])
@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("no-sync-reentry", " Did you mean 'no-sync-func-reentry'"),
        ("Rope", " Did you mean 'rope-table-from-inference' or 'rope-tables-kept'?"),
        ("No_sync_reentry.py", " Did you mean 'no-sync-func-reentry'"),
        ("xyzzy", ""),
    ],
)
def test_an_unknown_id_is_refused_with_the_nearest_ones_and_where_the_list_is(
    command, asked, near, capsys
):
    assert main([command, asked]) == 2
    said = capsys.readouterr().err
    named = f"{command} names '{asked}', which is none of the {len(hazards())} "
    assert f"{named}ids.{near}" in said
    assert said.endswith("`megatron-idempotent explain` lists them\n")
    assert len(said) < 300


@pytest.mark.parametrize(
    ("message", "hazard"),
    [
        # As an error has it, as its reproduction raises it, as the case file has it in words.
        ("AssertionError: timer has already been started", "train-interval-timer"),
        ("timer has  already been started", "train-interval-timer"),
        ("File x.py, line 3\nAssertionError: tensor group is already initialized", "initialized-"),
        ("pipeline_stages with the same weights and dropout masks", "pipeline-seed-offset"),
    ],
)
def test_explain_finds_the_case_files_that_a_pasted_message_may_come_from(message, hazard, capsys):
    assert main(["explain", *message.split(" ")]) == 0
    first, _, _, *found = capsys.readouterr().out.splitlines()
    assert first.startswith(f"No hazard has the id {message!r}. ")
    assert 1 <= len(found) <= 5
    assert any(line.startswith(hazard) for line in found)


def test_explain_says_so_where_no_case_file_is_near_a_message(capsys):
    assert main(["explain", "the weather is_nice", "in Paris"]) == 2
    said = capsys.readouterr().err
    assert "no case file's title or symptom speaks of 'the weather is_nice in Paris': " in said


@pytest.mark.parametrize("command", ["doctor", "explain", "prove", "drift"])
def test_a_misspelt_option_shows_the_options_of_its_command(command, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([command, "--jsn"])
    said = capsys.readouterr().err
    assert said.startswith(f"usage: megatron-idempotent {command} [-h]")
    assert said.endswith(f"megatron-idempotent {command}: error: unrecognized arguments: --jsn\n")


def test_prove_says_that_a_release_without_the_code_is_not_applicable(checkout):
    result = run("prove", "train-interval-timer", "--json", path=checkout)
    (finding,) = json.loads(result.stdout)
    assert finding["verdict"] == "not_applicable"
    assert "megatron.training.training is not on the path" in finding["stock"]
    assert result.stderr == (
        "megatron-idempotent prove: nothing was proven: what is installed has none of these "
        "hazards\n"
    )
    assert result.returncode == 3


@pytest.mark.parametrize(
    "arguments", [("doctor", "--json"), ("train", "--help")], ids=lambda arguments: arguments[0]
)
def test_a_reader_that_leaves_ends_the_command_without_a_word(arguments):
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "megatron_idempotent", *arguments]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        done = subprocess.run(
            command, stdout=pipe, stderr=subprocess.PIPE, text=True, env=environ, timeout=60
        )
    assert done.stderr == ""
    assert done.returncode == 141, "128 + SIGPIPE, as shells report of other commands"


def test_another_broken_pipe_is_an_error_like_any(monkeypatch):
    def broken(**_):
        raise BrokenPipeError("a rank left")

    monkeypatch.setattr("megatron_idempotent.cli.doctor.doctor", broken)
    with pytest.raises(BrokenPipeError, match="a rank left"):
        main(["doctor"])
