"""Each recipe's door ends the framework's hazards at the commit that its page names.

A variable names each source, as for the other tests here.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_idempotent.patching.base import MEGATRON
from megatron_idempotent.patching.catalog import hazards
from megatron_idempotent.patching.source import locate
from megatron_idempotent.proof.cpu import RankError

pytestmark = pytest.mark.full

FOLDER = Path(__file__).parents[2] / "docs" / "recipes"


@dataclass
class Recipe:
    """Says where a framework's source is, and what its commit has on stock."""

    variable: str
    first: tuple[str, ...]
    """Names modules to import before the reproductions; none if these do so by themselves."""
    hazards: tuple[str, ...]
    absent: tuple[str, ...] = ()
    """Packages that `first` imports, and that a machine without a GPU lacks."""
    alone: tuple[str, ...] = ()
    """Hazards whose reproductions import their modules by themselves: those of `first` would put
    stand-ins in their places."""


SLIME = "backends.megatron_utils"
SKYRL = "skyrl.backends.skyrl_train.workers.megatron"
RECIPES = {
    "slime": Recipe(
        "SLIME_SOURCE",
        (f"slime.{SLIME}",),
        (
            "slime-train-reentry",
            "slime-load-hangs",
            "slime-load-options-left-set",
            "slime-reference-left-in-actor",
        ),
    ),
    "miles": Recipe(
        "MILES_SOURCE",
        (f"miles.{SLIME}",),
        ("miles-train-reentry", "miles-reference-left-in-actor"),
    ),
    "verl": Recipe(
        "VERL_SOURCE",
        ("verl.workers.engine",),
        ("verl-wiring-reentry", "verl-load-half-done", "verl-load-loses-shards"),
    ),
    "nemo-rl": Recipe(
        "NEMO_RL_SOURCE",
        (),
        (
            "nemo-rl-method-not-undone",
            "nemo-rl-reference-left-in-policy",
            "nemo-rl-refit-before-gather",
        ),
    ),
    "skyrl": Recipe(
        "SKYRL_SOURCE",
        (f"{SKYRL}.megatron_model_wrapper", f"{SKYRL}.megatron_worker"),
        ("skyrl-failed-window-kept", "skyrl-refit-before-gather", "skyrl-checkpoint-hangs"),
        absent=(
            "megatron.bridge",
            "transformers",
            "omegaconf",
            "loguru",
            "huggingface_hub",
            "peft",
        ),
        alone=("skyrl-checkpoint-hangs",),
    ),
    "megatron-bridge": Recipe(
        "MEGATRON_BRIDGE_SOURCE",
        ("megatron.bridge.training",),
        (
            "bridge-setup-reentry",
            "bridge-train-reentry",
            "bridge-step-after-exception",
            "bridge-evaluate-not-undone",
            "bridge-shared-adapter-drifts",
            "bridge-shared-outer-counted-again",
            "bridge-dora-norm-per-rank",
            "bridge-dora-scales-bias",
            "bridge-dora-drops-otherwise",
            "bridge-dropout-repeated",
            "bridge-dora-exported-as-lora",
            "bridge-expert-adapter-exported-mixed",
            "bridge-expert-adapters-of-first-rank",
            "bridge-dora-magnitudes-resharded",
            "bridge-expert-adapter-unsummed",
            "bridge-per-expert-adapter-detached",
            "bridge-replicated-layer-adapter-mixed",
            "bridge-multi-lora-unsummed",
            "bridge-multi-lora-stale",
        ),
        absent=("modelopt",),
    ),
    "ms-swift": Recipe(
        "MS_SWIFT_SOURCE",
        ("swift.megatron.init",),
        ("swift-setup-reentry", "swift-logprob-gradient-lost"),
        absent=("mcore_bridge", "modelscope", "transformers", "tqdm"),
    ),
    "roll": Recipe("ROLL_SOURCE", ("roll.distributed.strategy",), ("roll-failed-window-kept",)),
}
CASES = [(name, hazard) for name, recipe in RECIPES.items() for hazard in recipe.hazards]


@pytest.mark.parametrize("name", RECIPES)
def test_a_page_names_its_commit_and_all_that_its_patch_changes(name):
    page = (FOLDER / f"{name}.md").read_text("utf-8")
    (named,) = re.findall(r"Written for \[.*\]\(https://github.com/(\S+)/tree/(\w{40})\)", page)
    for hazard in RECIPES[name].hazards:
        assert f"../../HAZARDS.md#{hazard}" in page
    patch = FOLDER / f"{name}.patch"
    assert (f"({name}.patch)" in page) == patch.exists() == (name == "nemo-rl")
    if patch.exists():
        text = patch.read_text("utf-8")
        assert re.match(r"# (\S+/\S+) ([0-9a-f]{40})\n", text).groups() == named
        for path in re.findall(r"^\+\+\+ b/(.+)$", text, re.MULTILINE):
            assert f"`{path}`" in page


def narrow(name: str) -> list[str]:
    """Return the ids of a page's `only=`."""
    page = (FOLDER / f"{name}.md").read_text("utf-8")
    (call,) = re.findall(r"^megatron_idempotent\.apply\(\s*only=(\[.*?\])\s*\)$", page, re.M | re.S)
    found: list[str] = ast.literal_eval(call)
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_a_pages_short_list_has_the_hazards_of_its_framework_and_of_its_table(name):
    found = narrow(name)
    assert len(found) == len(set(found))
    assert set(RECIPES[name].hazards) <= set(found) <= hazards().keys()
    page = (FOLDER / f"{name}.md").read_text("utf-8")
    changes, _, _ = page.partition("## What changes")[2].partition("\n## ")
    for hazard in found:
        assert f"../../HAZARDS.md#{hazard}" in changes
    theirs = {hazards()[each].distribution for each in RECIPES[name].hazards}
    assert {hazards()[each].distribution for each in found} <= theirs | {MEGATRON}


def source_of(name: str) -> str:
    """Return the source that the variable names; skip the test if there is none."""
    given = os.environ.get(RECIPES[name].variable)
    if not given:
        pytest.skip(f"{RECIPES[name].variable} names no checkout")
    if locate("megatron.training.training") is None:
        pytest.skip("this release's wheel does not carry megatron.training")
    return given


def meet(recipe: Recipe, source: str, hazard: str, only: list[str] | None, door: bool) -> str:
    """Runs on a rank: the hazard's own reproduction, on a source; returns its patch's status.

    With `only` these patches are applied before, with `door` those that wait for the import of the
    framework.
    """
    from megatron_idempotent.patches.frameworks import _standins

    import megatron_idempotent
    from megatron_idempotent import hook

    sys.path.insert(0, source)
    if only is not None:
        megatron_idempotent.apply(only=only)
    if door:
        hook.watch()
    _standins.replace("ray")
    for module in () if hazard in recipe.alone else recipe.first:
        _standins.import_alone(module, *recipe.absent)
    hazards()[hazard].reproduce()
    return megatron_idempotent.report()[hazard].status


@pytest.mark.parametrize("by_door", [True, False], ids=["by its door", "by its short list"])
@pytest.mark.parametrize(("name", "hazard"), CASES)
def test_the_page_ends_the_hazard(name, hazard, by_door, megatron_ranks):
    only = None if by_door else narrow(name)
    case = RECIPES[name], source_of(name), hazard, only, by_door
    statuses = megatron_ranks(hazards()[hazard].ranks, meet, *case, timeout_s=120)
    assert set(statuses) == {"applied"}


@pytest.mark.parametrize(("name", "hazard"), CASES)
def test_the_commit_has_the_hazard_without_it(name, hazard, megatron_ranks):
    case = hazards()[hazard]
    given = RECIPES[name], source_of(name), hazard, None, False
    with pytest.raises(RankError) as caught:
        megatron_ranks(case.ranks, meet, *given, timeout_s=120)
    said = f"{caught.value.exception_type}: {caught.value.message}"
    assert re.search(case.stock_error, said), said


def test_the_patch_file_applies_to_its_commit(tmp_path):
    shutil.copytree(Path(source_of("nemo-rl")) / "nemo_rl", tmp_path / "nemo_rl")
    apply = ["git", "apply", "--verbose", str(FOLDER / "nemo-rl.patch")]
    # Or git would look for a repository above, and apply nothing.
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    done = subprocess.run(apply, cwd=tmp_path, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    file = tmp_path / "nemo_rl/models/policy/workers/megatron_policy_worker.py"
    changed = ast.parse(file.read_text("utf-8"))
    (abort,) = (
        node
        for node in ast.walk(changed)
        if isinstance(node, ast.FunctionDef) and node.name == "abort_train_step"
    )
    assert "megatron_idempotent.abort_window([self.model], self.optimizer)" in ast.unparse(abort)
