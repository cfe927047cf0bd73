"""`prove` on the installed Megatron, on real ranks."""

from __future__ import annotations

import json

import pytest

from megatron_idempotent import proof
from megatron_idempotent.cli import main
from megatron_idempotent.proof import Finding


def test_prove_shows_a_hazard_on_stock_and_its_absence_when_patched(capsys):
    assert main(["prove", "pipeline-seed-offset", "--json"]) == 0
    (finding,) = json.loads(capsys.readouterr().out)
    assert finding["verdict"] == "proven"
    assert finding["stock"] == "RuntimeError: pipeline stages 0 and 1 draw the same weights"
    assert finding["patched"] == "ok"
    assert finding["seconds"] > 0


@pytest.mark.parametrize(
    ("stock", "patched", "verdict"),
    [
        ("ok", "ok", "stock_runs"),
        ("ValueError: something else", "ok", "other_error"),
        ("RuntimeError: pipeline stages 0 and 1 draw the same weights", "no", "not_repaired"),
    ],
)
def test_prove_fails_where_release_and_case_file_disagree(
    stock, patched, verdict, capsys, mocker, megatron_rank_pool
):
    class Shared:
        """The session's ranks, which outlive the command."""

        run = staticmethod(megatron_rank_pool.run)

        def close(self):
            pass

    def outcome(run, patch_id, *, applied, repaired=False):
        return patched if list(applied) else stock

    mocker.patch.object(proof, "outcome", outcome)
    mocker.patch.object(proof, "RankPool", return_value=Shared())
    assert main(["prove", "pipeline-seed-offset", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)
    assert finding["verdict"] == verdict


def test_a_finding_that_does_not_concern_the_release_is_no_failure():
    finding = Finding(id="x", verdict="not_applicable", stock="-", patched="-", seconds=0.0)
    assert not finding.failed
