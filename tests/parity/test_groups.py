"""A group of patches without one of its members: what the rest does, and what the report says."""

from __future__ import annotations

import itertools

import pytest

from megatron_idempotent.patching.catalog import hazards, patches
from megatron_idempotent.patching.record import GROUPS
from megatron_idempotent.patching.report import Report
from megatron_idempotent.patching.rows import Row
from megatron_idempotent.proof import prove

pytestmark = pytest.mark.full

AFFECTED = [each for each in prove.affected() if each in patches()]
BESIDE = [name for name in AFFECTED if hazards()[name].control is not None]
#: Of groups of two that every release has, by default.
SHORT = ("loss-scale", "offload")


def members(group: str) -> list[str]:
    return [name for name, patch in patches().items() if group in patch.groups]


def pairs() -> list:
    """A group, the member that is taken away, and another one."""
    found = []
    for group in GROUPS:
        marks = () if group in SHORT else (pytest.mark.exhaustive,)
        here = [name for name in members(group) if name in AFFECTED]
        for without, hazard in itertools.permutations(here, 2):
            found.append(pytest.param(without, hazard, id=f"{without}-{hazard}", marks=marks))
    return found


@pytest.mark.parametrize(("without", "hazard"), pairs())
def test_the_others_repair_their_hazards_without_it(without, hazard, megatron_ranks):
    rest = set(patches()) - {without}
    assert prove.outcome(megatron_ranks, hazard, applied=rest, helped=True) == "ok"


@pytest.mark.exhaustive
@pytest.mark.parametrize("without", [name for name in AFFECTED if patches()[name].groups])
def test_the_others_leave_right_programs_as_they_are_without_it(without, megatron_ranks):
    rest = tuple(set(patches()) - {without})
    mates = {name for group in patches()[without].groups for name in members(group)} - {without}
    for hazard in sorted(mates & set(BESIDE)):
        stock = prove.control_result(megatron_ranks, hazard, applied=())
        others = prove.control_result(megatron_ranks, hazard, applied=rest, helped=True)
        assert others == stock, hazard


def report_with(**statuses: tuple[str, str]) -> Report:
    """Every patch applied but for these, which have a status and a reason."""
    plain = ("applied", "body reviewed on 0.19.2")
    rows = []
    for each in patches():
        status, reason = statuses.get(each.replace("-", "_"), plain)
        rows.append(Row(id=each, status=status, reason=reason, version="0.19.2", targets=()))
    return Report(rows)


@pytest.mark.parametrize(
    ("status", "reason"), [("drifted", "a new body"), ("disabled", "named in exclude=")]
)
def test_the_report_says_which_groups_lack_a_member_and_what_that_means(status, reason):
    for without, patch in patches().items():
        said = report_with(**{without.replace("-", "_"): (status, reason)}).incomplete
        groups = [name for name in GROUPS if name in patch.groups]
        for sentence, group in zip(said, groups, strict=True):
            assert sentence == (
                f"group {group} is not whole ({GROUPS[group].promise}): {without} is {status} "
                f"({patch.summary}). Without it {GROUPS[group].instead}"
            )


def test_a_group_that_is_whole_or_not_there_or_not_asked_for_is_no_matter():
    assert report_with().incomplete == ()
    absent = {name.replace("-", "_"): ("drifted", "a new body") for name in members("layer-wise")}
    assert report_with(**absent).incomplete == ()
    for status, reason in (
        ("fixed_upstream", "upstream's own code no longer has the hazard"),
        ("disabled", "not in only="),
        ("missing_target", "there is no such function"),
    ):
        assert report_with(grad_scale_func=(status, reason)).incomplete == ()


def test_every_group_has_members_and_a_case_file_names_no_other():
    assert all(len(members(group)) > 1 for group in GROUPS)
    some = patches()["grad-scale-func"]
    with pytest.raises(ValueError, match="'overlaps'"):
        type(some)(**{**vars(some), "groups": ("overlaps",)})


def test_doctor_says_what_a_group_lacks(monkeypatch, capsys):
    from megatron_idempotent.cli.main import main

    monkeypatch.setenv("MEGATRON_IDEMPOTENT_DISABLE", "unscaled-twice")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (said,) = (line for line in lines if line.startswith("group "))
    assert said.startswith("group loss-scale is not whole")
    assert said.endswith("Without it train in bf16 or float32")
