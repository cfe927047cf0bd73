"""`prove` on the installed Megatron, on real ranks."""

import json
import shutil
from pathlib import Path

import pytest
from starts import COMMAND, started

from megatron_idempotent.cli.main import main
from megatron_idempotent.proof import prove as proof
from megatron_idempotent.proof.cpu.errors import RankError, RankFailure
from megatron_idempotent.proof.prove import Finding

pytestmark = pytest.mark.full

DRAWN_TWICE = "Fault: pipeline stages 0 and 1 draw the same weights"


@pytest.fixture
def shared_ranks(megatron_rank_pool, mocker):
    """`prove` runs on the session's ranks, which outlive the command."""
    shared = mocker.Mock(run=megatron_rank_pool.run)
    mocker.patch.object(proof, "RankPool", return_value=shared)


def proved(capsys, *ids):
    """The exit code of `prove`, and its findings."""
    code = main(["prove", *ids, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_prove_shows_a_hazard_on_stock_and_its_absence_when_patched(capsys, shared_ranks):
    code, (finding,) = proved(capsys, "pipeline-seed-offset")
    assert code == 0
    assert finding["verdict"] == "proven"
    assert finding["stock"] == DRAWN_TWICE
    assert finding["patched"] == "ok"
    assert finding["seconds"] > 0


@pytest.mark.parametrize(
    ("stock", "patched", "control", "verdict"),
    [
        ("ok", "ok", "ok", "stock_runs"),
        ("ValueError: something else", "ok", "ok", "other_error"),
        (DRAWN_TWICE, "no", "ok", "not_repaired"),
        (DRAWN_TWICE, "ok", "stock: ValueError: no", "other_error"),
        (DRAWN_TWICE, "ok", "patched: other bits than stock's on ranks [1]", "false_alarm"),
    ],
)
def test_prove_fails_where_release_and_case_file_disagree(
    stock, patched, control, verdict, capsys, mocker, shared_ranks
):
    def outcome(run, patch_id, *, applied, helped=False):
        return patched if list(applied) else stock

    mocker.patch.object(proof, "outcome", outcome)
    mocker.patch.object(proof, "control_outcome", return_value=control)
    code, (finding,) = proved(capsys, "pipeline-seed-offset")
    assert (code, finding["verdict"]) == (1, verdict)


@pytest.mark.parametrize(
    ("stock", "patched", "code", "verdict"),
    [
        (DRAWN_TWICE, DRAWN_TWICE, 1, "unpatched"),
        (DRAWN_TWICE, "ok", 3, "not_applicable"),  # by another patch
        ("ok", "ok", 3, "not_applicable"),
        ("ImportError: no such program here", "ok", 3, "not_applicable"),
    ],
)
def test_a_hazard_that_is_there_and_whose_patch_is_left_out_is_a_failure(
    stock, patched, code, verdict, capsys, mocker, shared_ranks
):
    def outcome(run, patch_id, *, applied, helped=False):
        return patched if list(applied) else stock

    why = "fixed_upstream: upstream's own code no longer has the hazard"
    mocker.patch.object(proof, "outcome", outcome)
    mocker.patch.object(proof, "_left_out", return_value=why)
    ended, (finding,) = proved(capsys, "pipeline-seed-offset")
    assert (ended, finding["verdict"], finding["stock"]) == (code, verdict, why)


def test_a_finding_that_does_not_concern_the_release_is_no_failure():
    finding = Finding(id="x", verdict="not_applicable", stock="-", patched="-", seconds=0.0)
    assert not finding.failed


def test_a_hazard_whose_program_needs_a_package_says_so_without_it(mocker, capsys):
    found = proof.find_spec
    mocker.patch.object(proof, "find_spec", lambda name: None if name == "einops" else found(name))
    code, findings = proved(capsys, "fsdp-backward-aborted", "fsdp-no-sync-ends-early")
    assert code == 3
    for finding in findings:
        said = (finding["verdict"], finding["stock"])
        assert said == ("not_applicable", "not_installed: needs einops (pip install einops)")


#: The file, what is right there, what is wrong, and what is said of the control then.
FALSE_ALARMS = {
    # A first batch that has registered more than one gradient is refused.
    "gradient-after-reduction": (
        "patches/gradient_after_reduction.py",
        ' or getattr(group, "is_first_batch", False)',
        "",
        "has registered 2 gradients in this window",
    ),
    # A helper does not ask groups that somebody else has set up how large they are.
    "initialized-twice": (
        "megatron_idempotent/window/setup.py",
        "if key in known:",
        "if holder is held and key in known:",
        "patched: ValueError: ensure_initialized() got",
    ),
    # Gradients begin with a number of their own.
    "no-sync-ends-early": (
        "megatron_idempotent/megatron/ddp.py",
        "setattr(self, _ENTRIES, None)\n    original(self)\n",
        "original(self)\n    self.buffers[0].grad_data[0] = 1.0\n",
        "patched: other bits than stock's on ranks [0, 1]",
    ),
}


def test_the_right_program_beside_a_hazard_is_compared_by_bits_and_errors():
    def told(stock, patched):
        def run(ranks, function, hazard_id, applied, helped, **_):
            assert (bool(applied), helped) in ((False, False), (True, True))
            found = patched if applied else stock
            if isinstance(found, Exception):
                raise found
            return found

        return proof.control_outcome(run, "no-sync-ends-early")

    died = RankFailure(rank=0, exception_type="ValueError", message="no", traceback="")
    failed = RankError([died], {})
    assert told([b"a", b"b"], [b"a", b"b"]) == "ok"
    assert told([b"a", b"b"], [b"a", b"c"]) == "patched: other bits than stock's on ranks [1]"
    assert told([b"a", b"b"], failed) == "patched: ValueError: no"
    assert told(failed, []) == "stock: ValueError: no"
    killed = RankFailure(rank=1, exception_type="", message="", traceback="", exit_code=-9)
    assert told(RankError([killed], {}), []) == "stock: rank 1 died with signal SIGKILL"


@pytest.mark.exhaustive
def test_prove_tells_of_a_patch_or_helper_that_breaks_a_right_program(tmp_path):
    root = Path(proof.__file__).parents[2]
    for package in ("megatron_idempotent", "patches"):
        shutil.copytree(root / package, tmp_path / package)
    for name, right, wrong, _ in FALSE_ALARMS.values():
        source = (tmp_path / name).read_text()
        assert source.count(right) == 1
        (tmp_path / name).write_text(source.replace(right, wrong))
    done = started(*COMMAND, "prove", *FALSE_ALARMS, "--json", cwd=tmp_path, PYTHONPATH=tmp_path)
    findings = {each["id"]: each for each in json.loads(done.stdout)}
    assert done.returncode == 1
    assert {each["verdict"] for each in findings.values()} == {"false_alarm"}
    for name, (*_, said) in FALSE_ALARMS.items():
        assert said in findings[name]["control"]
