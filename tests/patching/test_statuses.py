"""The decision order and its outcomes, on the installed Megatron and on changed copies of it."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
from checkouts import info_of
from editable import proven_on_a_commit
from forks import FEW

from megatron_idempotent.patching import OPEN, UNTRIED
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.releases import installed, release_named, supported

SEED = "pipeline-seed-offset"
HOOKS = "forward-pre-hook-reentry"
RANDOM = "megatron/core/tensor_parallel/random.py"
DDP = "megatron/core/distributed/distributed_data_parallel.py"
INFO = "megatron/core/package_info.py"
SWITCH = "MEGATRON_IDEMPOTENT"
#: A hazard that the installed release no longer has.
GROUPS = "param-groups-collide"
INSTALLED = getattr(installed("megatron-core"), "text", "")
DRY = {"dry_run": True}


@pytest.mark.parametrize(
    ("arguments", "environ", "reason"),
    [
        ({"exclude": [SEED]}, {}, "named in exclude="),
        ({"only": [HOOKS]}, {}, "not in only="),
        ({}, {SWITCH: "0"}, "MEGATRON_IDEMPOTENT=0"),
        ({}, {f"{SWITCH}_DISABLE": f"{HOOKS}, {SEED}"}, "named in MEGATRON_IDEMPOTENT_DISABLE"),
        ({}, {f"{SWITCH}_ONLY": HOOKS}, "not in MEGATRON_IDEMPOTENT_ONLY"),
        ({"only": [SEED]}, {f"{SWITCH}_DISABLE": SEED}, "named in MEGATRON_IDEMPOTENT_DISABLE"),
        ({"only": [SEED]}, {f"{SWITCH}_ONLY": HOOKS}, "not in MEGATRON_IDEMPOTENT_ONLY"),
        ({"only": [SEED], "strict": True}, {SWITCH: "off"}, "MEGATRON_IDEMPOTENT=0"),
    ],
)
def test_arguments_disable_and_the_environment_wins_over_them(cold, arguments, environ, reason):
    row = cold.run("scenarios.outcomes", environ=environ, **arguments)[SEED]
    assert (row["status"], row["reason"]) == ("disabled", reason)


def test_blank_variables_mean_what_unset_ones_mean(cold):
    blank = {f"{SWITCH}{name}": " " for name in ("", "_ONLY", "_DISABLE", "_STRICT", "_REBIND")}
    plain = cold.run("scenarios.outcomes")
    assert cold.run("scenarios.outcomes", environ=blank) == plain


class Case(NamedTuple):
    """A change of a copy of Megatron, and the outcome of a patch of it."""

    status: str
    reason: str
    """A regular expression; {path} is the copy's folder."""
    alter: tuple[str, str, str] | None = None
    """A file, what it has, and what takes its place."""
    write: tuple[str, str | None] | None = None
    """A file and its whole text; None takes it away."""
    arguments: dict[str, Any] = DRY
    patch: str = SEED
    version: str | None = ""


RELEASES = {
    **{
        f"{version} is below the range": Case(
            "unsupported_version",
            rf"^affects megatron-core {re.escape(patches()[SEED].versions)}, found {version}$",
            write=(INFO, info_of(version)),
            arguments={},
            version=version,
        )
        for version in ("0.9.9", "0.11.0")
    },
    **{
        f"the files of a release are that release's, though they say {version}": Case(
            "pending_import",
            f"^its files are those of {INSTALLED}",
            write=(INFO, info_of(version)),
            version=version,
        )
        for version in ("0.12.0rc3", "0.19.7", "0.99.3rc1")
    },
    **{
        f"on a commit bodies decide, whether it says {version} or not: {patch}": Case(
            status,
            reason,
            alter=(DDP, "        assert self.use_forward_hook\n", ""),
            write=(INFO, info_of(version)),
            patch=patch,
            version=version,
        )
        for version in ("0.99.2", "0.20.0rc0", INSTALLED, "0.13.0")
        for patch, status, reason in (
            (SEED, "pending_import", "^body reviewed on "),
            (HOOKS, "drifted", "has body"),
            (GROUPS, "fixed_upstream", "no longer has the hazard"),
        )
    },
}
WAITS = r"^lands when megatron\.core\.tensor_parallel\.random is imported$"
LACKS = r"no longer contains `offset = seed \+ 2718`"
DRIFTED = (RANDOM, "offset = seed + 2718", "offset = seed + 2719")
OUTCOMES = RELEASES | {
    "patches wait for the import": Case("pending_import", WAITS, arguments={}),
    "without Megatron": Case(
        "not_installed",
        "^megatron-core is not installed$",
        arguments={"bare": True, "path": None},
        version=None,
    ),
    "a version that cannot be read": Case(
        "not_installed",
        rf"^no version of megatron-core can be read from {{path}}/{INFO}$",
        write=(INFO, "from somewhere import MAJOR, MINOR, PATCH\n"),
    ),
    "a module that is not there": Case(
        "missing_target",
        r"^megatron\.core\.tensor_parallel\.random is not on the path beside megatron-core$",
        write=(RANDOM, None),
        arguments={},
    ),
    "a function that is not there": Case(
        "missing_target",
        r"^megatron\.core\.tensor_parallel\.random defines no model_parallel_cuda_manual_seed$",
        alter=(RANDOM, "def model_parallel_cuda_manual_seed", "def manual_seed_renamed"),
    ),
    # Its body drifted as well, which does not matter any more.
    "a body that does by itself what the patch does": Case(
        "fixed_upstream",
        "^upstream's own code no longer has the hazard$",
        alter=(
            RANDOM,
            "    offset = seed + 2718\n",
            "    seed += 100 * get_pipeline_model_parallel_rank()\n    offset = seed + 2719\n",
        ),
    ),
    "a body without what the patch relies on": Case(
        "drifted",
        rf"model_parallel_cuda_manual_seed \(body .*{LACKS}.*name the patch in only= to accept it",
        alter=DRIFTED,
    ),
    "a drifted patch that is named": Case(
        "pending_import", f"{LACKS}.*accepted by name", alter=DRIFTED, arguments={"only": [SEED]}
    ),
    "a pinned body that differs in one token": Case(
        "drifted",
        r"DistributedDataParallel\.enable_forward_pre_hook has body .*reviewed are fea102deaf61",
        alter=(
            DDP,
            "def enable_forward_pre_hook(self):",
            "def enable_forward_pre_hook(self, a=1):",
        ),
        patch=HOOKS,
    ),
    "comments, docstrings and formatting": Case(
        "pending_import",
        "^body reviewed on ",
        alter=(
            DDP,
            "def enable_forward_pre_hook(self):\n",
            "def enable_forward_pre_hook(\n        self,  # a remark\n    ):\n",
        ),
        patch=HOOKS,
    ),
    "a file that cannot be parsed": Case(
        "failed",
        r"^cannot read megatron\.core\.tensor_parallel\.random: ",
        alter=(RANDOM, "offset = seed + 2718", "offset = seed +"),
    ),
    # The first reason in the order is the one that is given.
    "excluded, and Megatron is not there": Case(
        "disabled", "^named in exclude=$", arguments={"bare": True, "exclude": [SEED]}
    ),
    "drifted in a release below the range": Case(
        "unsupported_version", "", alter=DRIFTED, write=(INFO, info_of("0.11.0"))
    ),
    "one module is missing, another body drifted": Case(
        "missing_target", "", alter=DRIFTED, write=(DDP, None), patch=HOOKS
    ),
    "the same for the drifted one": Case("drifted", "", alter=DRIFTED, write=(DDP, None)),
}


@pytest.mark.parametrize("case", OUTCOMES.values(), ids=OUTCOMES)
def test_the_outcome_and_its_reason(cold, megatron_copy, case):
    if case.alter is not None:
        megatron_copy.alter(*case.alter)
    if case.write is not None:
        megatron_copy.change(case.write[0], to=case.write[1])
    given = {"path": megatron_copy.path, **case.arguments}
    row = cold.run("scenarios.outcomes", among=f"{FEW},{GROUPS}", **given)[case.patch]
    assert row["status"] == case.status
    assert re.search(case.reason.replace("{path}", re.escape(megatron_copy.path)), row["reason"])
    if case.version != "":
        assert row["version"] == case.version


@pytest.mark.parametrize("version", ["0.20.0", "0.12.0"])
def test_what_upstream_has_mended_stays_off_on_a_commit_whatever_it_says(
    cold, megatron_copy, version
):
    megatron_copy.change(INFO, to=info_of(version))
    megatron_copy.alter(RANDOM, "offset = seed + 2718", "offset = seed + 2718; 1")
    rows = cold.run("scenarios.outcomes", path=megatron_copy.path, dry_run=True)
    mended = [
        patch.id
        for patch in patches().values()
        if patch.before not in (UNTRIED, OPEN)
        and patch.distribution == "megatron-core"
        and not supported(release_named(INSTALLED), patch.since, patch.before)
    ]
    assert len(mended) >= 3
    assert {rows[patch_id]["status"] for patch_id in mended} <= {"fixed_upstream", "missing_target"}


def test_before_the_import_a_patch_outside_of_its_range_waits_for_the_files(cold):
    waiting, decided = cold.run("scenarios.outcomes"), cold.run("scenarios.outcomes", dry_run=True)
    reason = waiting[GROUPS]["reason"]
    assert reason.startswith(
        f"affects megatron-core {patches()[GROUPS].versions}, found {INSTALLED}: its files decide"
    )
    assert decided[GROUPS]["status"] == "unsupported_version"


def test_the_installed_megatron_needs_every_patch_that_it_has_the_code_for(cold):
    expected = {
        "pending_import": "",
        "missing_target": "is not on the path beside megatron-core",
        "unsupported_version": "affects megatron-core",
        "not_installed": "is not installed",
        "disabled": "off by default",
    }
    for row in cold.run("scenarios.outcomes", dry_run=True).values():
        if row["status"] == "fixed_upstream" and proven_on_a_commit(row["id"]):
            continue
        assert row["status"] in expected, row
        assert expected[row["status"]] in row["reason"], row
