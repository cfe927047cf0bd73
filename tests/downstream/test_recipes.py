"""Each recipe's patch applies to its commit, and ends the framework's hazards there.

A variable names each source, as for the other tests here. No test applies this project's patches:
the recipe's own lines have to.
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

from megatron_idempotent.patching.catalog import MEGATRON, hazards
from megatron_idempotent.patching.source import locate
from megatron_idempotent.proof.cpu import RankError

FOLDER = Path(__file__).parents[2] / "docs" / "recipes"


@dataclass
class Recipe:
    """Says where a framework's source is, and what its commit has on stock."""

    variable: str
    package: str
    """The folder that the patch changes, in the repository."""
    first: tuple[str, ...]
    """Names modules to import before the reproductions, last the one with the recipe's lines; none
    if the reproductions import that by themselves."""
    hazards: tuple[str, ...]
    source: str = "."
    """The folder of the repository that the variable names."""
    absent: tuple[str, ...] = ()
    """Packages that `first` imports, and that a machine without a GPU lacks."""


SLIME = "backends.megatron_utils"
SKYRL = "skyrl.backends.skyrl_train.workers.megatron"
RECIPES = {
    "slime": Recipe("SLIME_SOURCE", "slime", (f"slime.{SLIME}",), ("slime-train-reentry",)),
    "miles": Recipe("MILES_SOURCE", "miles", (f"miles.{SLIME}",), ("miles-train-reentry",)),
    "verl": Recipe(
        "VERL_SOURCE",
        "verl",
        ("verl.workers.engine",),
        ("verl-wiring-reentry",),
    ),
    "nemo-rl": Recipe(
        "NEMO_RL_SOURCE",
        "nemo_rl",
        (),
        (
            "nemo-rl-method-not-undone",
            "nemo-rl-reference-left-in-policy",
            "nemo-rl-refit-before-gather",
        ),
    ),
    "skyrl": Recipe(
        "SKYRL_SOURCE",
        "skyrl",
        (f"{SKYRL}.megatron_model_wrapper", f"{SKYRL}.megatron_worker"),
        ("skyrl-failed-window-kept", "skyrl-refit-before-gather"),
        absent=(
            "megatron.bridge",
            "transformers",
            "omegaconf",
            "loguru",
            "huggingface_hub",
            "peft",
        ),
    ),
    "megatron-bridge": Recipe(
        "MEGATRON_BRIDGE_SOURCE",
        "src/megatron/bridge",
        ("megatron.bridge.training",),
        (
            "bridge-setup-reentry",
            "bridge-train-reentry",
            "bridge-step-after-exception",
            "bridge-evaluate-not-undone",
        ),
        source="src",
        absent=("modelopt",),
    ),
    "ms-swift": Recipe(
        "MS_SWIFT_SOURCE",
        "swift",
        ("swift.megatron.init",),
        ("swift-setup-reentry",),
        absent=("mcore_bridge", "modelscope", "transformers", "tqdm"),
    ),
    "roll": Recipe(
        "ROLL_SOURCE",
        "roll",
        ("roll.distributed.strategy",),
        ("roll-failed-window-kept",),
    ),
}
CASES = [(name, hazard) for name, recipe in RECIPES.items() for hazard in recipe.hazards]


def test_each_patch_file_has_a_recipe():
    assert {path.stem for path in FOLDER.glob("*.patch")} == RECIPES.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_a_page_names_the_commit_of_its_patch_and_all_that_it_changes(name):
    text = (FOLDER / f"{name}.patch").read_text("utf-8")
    repository, commit = re.match(r"# (\S+/\S+) ([0-9a-f]{40})\n", text).groups()
    page = (FOLDER / f"{name}.md").read_text("utf-8")
    assert f"https://github.com/{repository}/tree/{commit}" in page
    assert f"({name}.patch)" in page
    changed = re.findall(r"^\+\+\+ b/(.+)$", text, re.MULTILINE)
    assert changed
    for path in changed:
        assert path.startswith(RECIPES[name].package)
        assert f"`{path}`" in page
    for hazard in RECIPES[name].hazards:
        assert f"../../HAZARDS.md#{hazard}" in page


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


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """Return the source of a framework with the recipe's patch applied, which is made once."""
    made = {}

    def of(name):
        recipe = RECIPES[name]
        given = os.environ.get(recipe.variable)
        if not given:
            pytest.skip(f"{recipe.variable} names no checkout")
        if locate("megatron.training.training") is None:
            pytest.skip("this release's wheel does not carry megatron.training")
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            package = Path(recipe.package)
            theirs = Path(given) / package.relative_to(recipe.source)
            shutil.copytree(theirs, root / package)
            apply = ["git", "apply", "--verbose", str(FOLDER / f"{name}.patch")]
            # Or git would look for a repository above, and apply nothing.
            alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)}
            done = subprocess.run(apply, cwd=root, env=alone, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            made[name] = str(root / recipe.source)
        return made[name]

    return of


def meet(recipe: Recipe, source: str, hazard: str, only: list[str] | None = None) -> str:
    """Runs on a rank: the hazard's own reproduction, on a source; returns its patch's status.

    With `only` these patches are applied before; without it none are but by the source's lines.
    """
    from megatron_idempotent.patches.frameworks import _standins

    import megatron_idempotent

    sys.path.insert(0, source)
    if only is not None:
        megatron_idempotent.apply(only=only)
    _standins.replace("ray")
    for module in recipe.first:
        _standins.import_alone(module, *recipe.absent)
    hazards()[hazard].reproduce()
    return megatron_idempotent.report()[hazard].status


@pytest.mark.parametrize(("name", "hazard"), CASES)
def test_the_recipes_lines_end_the_hazard(name, hazard, patched, megatron_ranks):
    ranks = hazards()[hazard].ranks
    found = megatron_ranks(ranks, meet, RECIPES[name], patched(name), hazard, timeout_s=120)
    # NeMo-RL's two workers have the lines each.
    assert set(found) <= {"applied", "already_applied"}


@pytest.mark.parametrize(("name", "hazard"), CASES)
def test_the_commit_has_the_hazard_without_them(name, hazard, patched, megatron_ranks):
    patched(name)
    case = hazards()[hazard]
    source = os.environ[RECIPES[name].variable]
    with pytest.raises(RankError) as caught:
        megatron_ranks(case.ranks, meet, RECIPES[name], source, hazard, timeout_s=120)
    said = f"{caught.value.exception_type}: {caught.value.message}"
    assert re.search(case.stock_error, said), said


@pytest.mark.parametrize(("name", "hazard"), CASES)
def test_the_pages_short_list_ends_the_hazard(name, hazard, patched, megatron_ranks):
    patched(name)
    ranks, source = hazards()[hazard].ranks, os.environ[RECIPES[name].variable]
    case = RECIPES[name], source, hazard, narrow(name)
    assert set(megatron_ranks(ranks, meet, *case, timeout_s=120)) == {"applied"}


def start_without_an_install(recipe: Recipe, source: str) -> str:
    """Runs on a rank: import what has the recipe's lines where this package is not installed."""
    from megatron_idempotent.patches.frameworks import _standins

    sys.path.insert(0, source)
    _standins.replace("ray")
    # The package of verl's Megatron engine is real too: verl imports it in a `try`.
    _standins._finder.real.add("verl.workers.engine.megatron")
    sys.modules["megatron_idempotent"] = None  # type: ignore[assignment]
    with pytest.raises(ModuleNotFoundError) as caught:
        _standins.import_alone(recipe.first[-1], *recipe.absent)
    return caught.value.name or ""


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.first])
def test_a_missing_install_ends_the_worker_and_is_named(name, patched, megatron_ranks):
    case = start_without_an_install, RECIPES[name], patched(name)
    assert megatron_ranks(1, *case, distributed=False) == ["megatron_idempotent"]


def unsorted(root: Path, files: list[str], settings: Path) -> str:
    command = [sys.executable, "-m", "ruff", "check", "--quiet", "--config", str(settings)]
    options = ["--select", "I", "--no-cache", "--output-format", "concise"]
    done = subprocess.run(
        [*command, *options, *files], cwd=root, capture_output=True, text=True, check=False
    )
    assert not done.stderr.startswith("error"), done.stderr
    return done.stdout


@pytest.mark.parametrize("name", RECIPES)
def test_a_patched_file_passes_the_frameworks_own_sort_of_imports(name, patched):
    pytest.importorskip("ruff")
    recipe, source = RECIPES[name], Path(patched(name))
    up = [".."] * len(Path(recipe.source).parts)
    root, theirs = (each.joinpath(*up) for each in (source, Path(os.environ[recipe.variable])))
    settings = theirs / "pyproject.toml"
    if not settings.is_file() or "[tool.ruff" not in settings.read_text("utf-8"):
        pytest.skip("it does not sort with ruff, or only the package is given")
    text = (FOLDER / f"{name}.patch").read_text("utf-8")
    files = re.findall(r"^\+\+\+ b/(.+)$", text, re.MULTILINE)
    assert unsorted(root, files, settings) == unsorted(theirs, files, settings)
