"""`drift`: case files against Megatrons that are not installed."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from checkouts import info_of, zipped
from starts import started

from megatron_idempotent.cli.drift import Drift
from megatron_idempotent.cli.main import main
from megatron_idempotent.patching import Patch, Target
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.source import locate, read_body

pytestmark = pytest.mark.full

INFO = "megatron.core.package_info"
RANDOM = "megatron.core.tensor_parallel.random"
PATCH = "pipeline-seed-offset"


def rows(capsys: pytest.CaptureFixture[str], *paths: Path) -> tuple[int, list[dict]]:
    code = main(["drift", "--json", *map(str, paths)])
    return code, json.loads(capsys.readouterr().out)


def framework(root: Path, module: str, body: str, metadata: str | None = None) -> Path:
    """A checkout of a framework with one module, which defines `train`, or what a body says."""
    file = root / f"{module.replace('.', '/')}.py"
    file.parent.mkdir(parents=True)
    file.write_text(body)
    if module.split(".")[1] != "core":
        (root / module.split(".")[0] / "__init__.py").touch()
    if metadata is not None:
        (root / "it.dist-info").mkdir()
        (root / "it.dist-info" / "METADATA").write_text(metadata)
    return root


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_the_installed_release_is_reviewed_in_every_body(tree, capsys):
    code, found = rows(capsys, tree)
    assert code == 0
    assert {row["id"] for row in found} == {
        patch.id for patch in patches().values() if patch.distribution == "megatron-core"
    }
    assert {row["standing"] for row in found} <= {
        "reviewed",
        "missing",
        "fixed_upstream",
        "not_affected",
    }


def test_a_changed_body_drifts_and_the_diff_shows_the_change(tree, tmp_path, capsys):
    changed = tmp_path / "changed"
    shutil.copytree(tree, changed)
    edit(changed / f"{RANDOM.replace('.', '/')}.py", "offset = seed + 2718", "offset = seed + 3")
    code, found = rows(capsys, tree, changed)
    assert code == 1
    (row,) = (row for row in found if row["standing"] == "drifted")
    assert (row["id"], row["path"]) == (PATCH, str(changed))
    assert "-    offset = seed + 2718" in row["diff"]
    assert "+    offset = seed + 3" in row["diff"]
    assert main(["drift", str(changed)]) == 1
    printed = capsys.readouterr().out
    assert "DRIFT" in printed
    assert "seed + 2718" in printed, "the reason names the fragment that is gone"
    assert "+++" not in printed, "diffs are printed on request"


def test_a_new_body_that_holds_what_the_patch_relies_on_is_no_drift(tree, capsys):
    edit(tree / f"{RANDOM.replace('.', '/')}.py", "offset = seed + 2718", "offset = seed + 2718; 1")
    code, found = rows(capsys, tree)
    assert code == 0
    assert PATCH in [row["id"] for row in found if row["standing"] == "holds"]


def test_a_wheel_is_read_without_unpacking_it_and_is_the_release_that_it_says(
    tree, tmp_path, capsys
):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (info,) = tree.glob("megatron/core/package_info.py")
    info.write_text(re.sub(r"PRE_RELEASE = .*", "PRE_RELEASE = 'rc1'", info.read_text()))
    edit(tree / f"{RANDOM.replace('.', '/')}.py", "offset = seed + 2718", "offset = seed + 2718; 1")
    zipped(tree, wheels / "megatron_core-0-py3-none-any.whl")
    _, from_folder = rows(capsys, tree)
    _, from_wheel = rows(capsys, wheels)
    assert [r["standing"] for r in from_wheel] == [r["standing"] for r in from_folder]
    ranges = [row for row in from_wheel if row["reason"].startswith("affects ")]
    assert ranges == [], "a pre-release is none"


@pytest.mark.parametrize("version", ["0.99.0rc0", "0.18.0", "0.13.0"])
def test_the_number_that_a_commit_says_decides_nothing(tree, capsys, version):
    _, before = rows(capsys, tree)
    (tree / "megatron/core/package_info.py").write_text(info_of(version))
    _, after = rows(capsys, tree)
    assert {row["version"] for row in after} == {version}
    assert [row["standing"] for row in after] == [row["standing"] for row in before]
    assert {row["standing"] for row in after} >= {"reviewed", "fixed_upstream"}


def test_a_release_older_than_a_hazard_is_not_affected(tree, capsys):
    (tree / "megatron/core/package_info.py").write_text(info_of("0.1.0"))
    _, found = rows(capsys, tree)
    assert {row["standing"] for row in found} == {"not_affected"}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "is not there"),
        (lambda path: path.mkdir(), "holds none of"),
        (lambda path: path.write_text("no zip"), "is no wheel"),
        (lambda path: framework(path, "megatron.core.package_info", ""), "says no version"),
    ],
)
def test_what_holds_no_megatron_is_an_error_that_says_so(make, says, tmp_path, capsys):
    make(tmp_path / "given")
    assert main(["drift", str(tmp_path / "given")]) == 2
    assert says in capsys.readouterr().err


def test_drift_imports_neither_torch_nor_megatron(tree):
    probe = (
        "import sys; from megatron_idempotent.cli.main import main; main(sys.argv[1:]); "
        "sys.exit(str({'torch', 'megatron'} & set(sys.modules) or 0))"
    )
    result = started(sys.executable, "-c", probe, "drift", tree)
    assert result.stderr.strip() in ("", "0")


SLIME = "slime.backends.megatron_utils.model"
LOOP = """
def train(model):
    config = get_model_config(model[0])
    assert config.no_sync_func is None
    config.no_sync_func = [model_chunk.no_sync for model_chunk in model]
    config.param_sync_func = [model_chunk.start_param_sync for model_chunk in model]
    config.param_sync_func = None
"""


def test_a_checkout_of_a_framework_is_compared_with_the_patches_for_it_alone(tmp_path, capsys):
    code, found = rows(capsys, framework(tmp_path / "checkout", SLIME, LOOP))
    assert code == 0
    assert {(row["distribution"], row["version"]) for row in found} == {("slime", "unknown")}
    assert {(row["id"], row["standing"]) for row in found} == {
        ("slime-train-reentry", "holds"),
        ("slime-load-hangs", "missing"),
        ("slime-load-options-left-set", "missing"),
        ("slime-reference-left-in-actor", "missing"),
    }


def test_a_frameworks_checkout_that_lost_a_statement_drifts_from_one_that_holds_it(
    tmp_path, capsys
):
    fits = framework(tmp_path / "fits", SLIME, LOOP)
    lost = framework(tmp_path / "lost", SLIME, LOOP.replace("config.param_sync_func = None", "..."))
    code, found = rows(capsys, fits, lost)
    assert code == 1
    fitting, drifted = (row for row in found if row["standing"] != "missing")
    assert (fitting["standing"], drifted["standing"]) == ("holds", "drifted")
    assert "-    config.param_sync_func = None" in drifted["diff"]
    assert main(["drift", str(fits), str(lost)]) == 1
    printed = capsys.readouterr().out
    assert "slime fits" in printed
    assert "slime lost" in printed, "checkouts without a version go by their folder's name"


def test_a_frameworks_metadata_says_its_version_and_its_range_counts(tmp_path, capsys):
    said = "Metadata-Version: 2.1\nName: Slime\nVersion: 0.3.1\n"
    within = framework(tmp_path / "within", SLIME, LOOP, said)
    beyond = framework(tmp_path / "beyond", SLIME, LOOP, said.replace("0.3.1", "0.0.9"))
    other = framework(tmp_path / "other", SLIME, LOOP, said.replace("Slime", "snail"))
    _, found = rows(capsys, within, beyond, other)
    by_folder = {Path(row["path"]).name: (row["version"], row["standing"]) for row in found}
    assert by_folder == {
        "within": ("0.3.1", "holds"),
        "beyond": ("0.0.9", "not_affected"),
        "other": ("unknown", "holds"),
    }


def test_a_frameworks_wheel_says_its_version_too(tmp_path, capsys):
    said = "Metadata-Version: 2.1\nName: slime\nVersion: 0.3.1\n"
    unpacked = framework(tmp_path / "unpacked", SLIME, LOOP, said)
    _, found = rows(capsys, zipped(unpacked, tmp_path / "slime-0.3.1-py3-none-any.whl"))
    assert {(row["version"], row["standing"]) for row in found} == {
        ("0.3.1", "holds"),
        ("0.3.1", "missing"),
    }


def test_frameworks_and_megatron_share_a_grid_with_empty_cells(tree, tmp_path, capsys):
    slime = framework(tmp_path / "slime", SLIME, LOOP)
    _, found = rows(capsys, tree, slime)
    of_slime = [row for row in found if row["path"] == str(slime)]
    assert {row["id"] for row in of_slime} == {
        each.id for each in patches().values() if each.distribution == "slime"
    }
    assert len(found) > len(of_slime) + 1
    assert main(["drift", str(tree), str(slime)]) == 0
    assert "slime-train-reentry" in capsys.readouterr().out


def test_without_a_path_it_reads_what_is_installed(capsys):
    code, found = rows(capsys)
    assert code == 0
    assert {row["path"] for row in found} == {str(locate(INFO).parents[2])}


def test_a_body_that_drifted_is_compared_by_statements_where_no_tree_has_the_one_that_was_read(
    tree, capsys
):
    buffer = tree / "megatron/core/distributed/param_and_grad_buffer.py"
    edit(buffer, "    def start_grad_sync(self", "    async def start_grad_sync(self")
    code, found = rows(capsys, tree)
    assert code == 1
    (diff,) = {row["diff"] for row in found if row["standing"] == "drifted"}
    before, after, at, gone, new, *_ = diff.splitlines()
    assert "by its statements' hashes" in before
    assert "start_grad_sync in " in after
    assert (at, gone) == ("@@", "-(1 statement)")
    assert new.startswith("+async def start_grad_sync(self")


def test_a_body_of_before_the_hazard_is_not_called_new(tree, capsys, monkeypatch):
    (target,) = patches()[PATCH].targets
    body = read_body(tree / f"{target.module.replace('.', '/')}.py", target.qualname)
    old = Target(target.address, target.wrapper, reviewed={body.hash: "0.12.0 to 0.15.3"})
    patch = Patch(id="some-symptom", summary="it hurts", since="0.16", targets=(old,))
    monkeypatch.setattr("megatron_idempotent.cli.drift.patches", lambda: {patch.id: patch})
    code, (row,) = rows(capsys, tree)
    assert (code, row["standing"]) == (0, "not_affected")
    assert "the hazard came with 0.16" in row["reason"]


@pytest.mark.parametrize(("version", "can_go"), [("0.20.0", True), ("0.20.0rc0", False)])
def test_drift_names_the_repair_that_a_release_has(version, can_go, monkeypatch, capsys):
    row = Drift(
        id="no-sync-func-reentry",
        path="megatron_core.whl",
        distribution="megatron-core",
        version=version,
        standing="fixed_upstream",
        reason="",
        diff="",
    )
    monkeypatch.setattr("megatron_idempotent.cli.drift.compare", lambda _: [row])
    assert main(["drift"]) == 0
    sentence = f"upstream/no-sync-func-reentry can go: {version} has repaired the hazard"
    assert (sentence in capsys.readouterr().out) == can_go
