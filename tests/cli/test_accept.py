"""`drift --accept`: a new release touches the file of reviewed bodies, and no case file."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_drift import edit, rows

from megatron_idempotent.cli import accept as module
from megatron_idempotent.cli.main import main
from megatron_idempotent.patching import UNTRIED, Patch, Reproduction, Target, statements
from megatron_idempotent.patching import record as shipped
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.record import Reviewed
from megatron_idempotent.patching.trees import INFO

SEED = "megatron/core/tensor_parallel/random.py"
GROUPS = "megatron/core/parallel_state.py"
BUCKETS = "megatron/core/distributed/param_and_grad_buffer.py"


@pytest.fixture
def files(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """Copies of the files, which the command writes in place of ours."""
    found = []
    for name, original in (
        ("FILE", module.FILE),
        ("ACCEPTED", module.ACCEPTED),
        ("READS", module.READS),
    ):
        copy = tmp_path / Path(original).name
        shutil.copy(original, copy)
        monkeypatch.setattr(module, name, copy)
        found.append(copy)
    return found[0], found[1]


def release(root: Path, version: str) -> None:
    """Make the checkout say that it is a release."""
    info = root / f"{INFO.replace('.', '/')}.py"
    major, minor, patch = version.split(".")
    info.write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ''\n")


def drifted(root: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Patches of megatron-core that the checkout refuses, beside those of main's own modules."""
    found = {row["id"] for row in rows(capsys, root)[1] if row["standing"] == "drifted"}
    return found - {"fsdp-v2-wedged-by-abort"}


def accept(root: Path, *arguments: str) -> int:
    return main(["drift", str(root), "--accept", *arguments])


def added(before: Reviewed, after: Reviewed) -> dict[str, str]:
    """Hashes that are new, with their labels."""
    old = {
        name for known in (before.bodies, before.parts) for each in known.values() for name in each
    }
    new = {
        name: label
        for known in (after.bodies, after.parts)
        for each in known.values()
        for name, label in each.items()
    }
    return {name: label for name, label in new.items() if name not in old}


def read(path: Path) -> Reviewed:
    return Reviewed(path.read_text("ascii").splitlines())


def test_a_new_release_is_accepted_in_one_file_and_drifts_no_longer(
    tree, files, capsys, monkeypatch
):
    release(tree, "0.20.0")
    edit(tree / GROUPS, "def destroy_model_parallel():", "async def destroy_model_parallel():")
    assert drifted(tree, capsys) == {"process-groups-leak"}
    before = read(files[0])
    assert accept(tree, "process_groups_leak.py") == 0
    assert "destroy_model_parallel, 0.20.0" in capsys.readouterr().out
    after = read(files[0])
    ((name, label),) = added(before, after).items()
    assert label == "0.20.0"
    # What stayed as it was is the release's too, and `doctor` says that it is not modified.
    address = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.no_sync"
    assert list(after.bodies[address].values()) == ["0.12.0 to 0.20.0"]
    # A later drift is shown against its statements.
    assert any(line.startswith(name) for line in files[1].read_text().splitlines())
    program = (
        "from pathlib import Path\nfrom megatron_idempotent.patching import record\n"
        f"record.FILE = {str(files[0])!r}\n"
        "from megatron_idempotent.cli.main import main\n"
        f"raise SystemExit(main(['drift', {str(tree)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "process-groups-leak on" not in done.stdout, done.stdout + done.stderr


def test_the_part_that_a_patch_relies_on_is_accepted_for_it_alone(tree, files, capsys):
    release(tree, "0.20.0")
    edit(
        tree / SEED,
        "    offset = seed + 2718",
        "    seed = seed + 0 * tp_rank\n    offset = seed + 2718",
    )
    assert "pipeline-seed-offset" in drifted(tree, capsys)
    before = read(files[0])
    assert accept(tree, "pipeline-seed-offset") == 0
    after = read(files[0])
    assert list(added(before, after).values()) == ["0.20.0"]
    assert {key[1] for key in after.parts if after.parts[key] != before.parts.get(key)} >= {
        "pipeline-seed-offset"
    }


def test_a_body_that_others_wrap_too_is_read_for_all_of_them(tree, files, capsys):
    release(tree, "0.20.0")
    edit(tree / BUCKETS, "    def start_grad_sync(self", "    async def start_grad_sync(self")
    found = drifted(tree, capsys)
    assert len(found) > 1
    before = files[0].read_bytes(), files[1].read_bytes()
    one, *others = sorted(found)
    assert accept(tree, one) == 2
    said = capsys.readouterr().err
    assert "_ParamAndGradBucketGroup.start_grad_sync is wrapped by" in said
    assert all(each in said for each in others)
    assert (files[0].read_bytes(), files[1].read_bytes()) == before
    wrapping = [
        patch.id
        for patch in patches().values()
        if any(t.address.endswith("BucketGroup.start_grad_sync") for t in patch.targets)
    ]
    assert accept(tree, *wrapping) == 0
    assert list(added(Reviewed(before[0].decode().splitlines()), read(files[0])).values()) == [
        "0.20.0"
    ]


def test_a_commit_wants_a_label_and_leaves_those_of_releases(tree, files, capsys):
    info = tree / f"{INFO.replace('.', '/')}.py"
    info.write_text("MAJOR = 0\nMINOR = 20\nPATCH = 0\nPRE_RELEASE = 'rc0'\n")
    edit(tree / GROUPS, "def destroy_model_parallel():", "async def destroy_model_parallel():")
    assert accept(tree, "process-groups-leak") == 2
    assert "0.20.0rc0, which is no release" in capsys.readouterr().err
    before = read(files[0])
    assert accept(tree, "process-groups-leak", "--as", "main, November 2026") == 0
    after = read(files[0])
    assert list(added(before, after).values()) == ["main, November 2026"]
    address = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.no_sync"
    assert after.bodies[address] == before.bodies[address]


def test_what_cannot_be_accepted_is_said_and_nothing_is_written(tree, files, capsys, monkeypatch):
    before = files[0].read_bytes(), files[1].read_bytes()
    assert accept(tree, "no-such-patch") == 2
    assert "no-such-patch" in capsys.readouterr().err
    monkeypatch.setattr(module, "_CHECKOUT", Path("/nowhere"))
    assert accept(tree, "process-groups-leak") == 2
    assert "in a checkout of this project" in capsys.readouterr().err
    assert (files[0].read_bytes(), files[1].read_bytes()) == before


def seed(original, *args, **kwargs):
    """A wrapper that passes everything on."""
    return original(*args, **kwargs)


@pytest.mark.parametrize(("relies_on", "kind"), [((), "body"), (("offset = seed + 2718",), "part")])
def test_a_new_case_file_gets_its_first_reviews(tree, files, capsys, monkeypatch, relies_on, kind):
    target = Target(
        address="megatron.core.tensor_parallel.random:get_cuda_rng_tracker"
        if kind == "body"
        else "megatron.core.tensor_parallel.random:model_parallel_cuda_manual_seed",
        wrapper=seed,
        relies_on=relies_on,
    )
    patch = Patch(
        id="some-symptom",
        summary="it hurts",
        since="0.12",
        before=UNTRIED,
        targets=(target,),
        upstream="https://example.com",
        reproduction=Reproduction(run=print, ranks=1, stock_error="."),
    )
    monkeypatch.setattr(module, "patches", lambda: {patch.id: patch})
    monkeypatch.setattr("megatron_idempotent.cli.drift.patches", lambda: {patch.id: patch})
    if kind == "body":
        assert drifted(tree, capsys) == {patch.id}
    else:
        address = target.address
        monkeypatch.setattr(module, "FILE", files[0])
        known = read(files[0])
        del known.bodies[address]
        files[0].write_text("".join(f"{line}\n" for line in known.lines()))
    assert accept(tree, patch.id) == 0
    assert f"{patch.id}: {kind} " in capsys.readouterr().out


def test_nothing_is_new_in_what_was_read(tree, files, capsys):
    before = files[0].read_bytes(), files[1].read_bytes()
    assert accept(tree) == 0
    assert "nothing is new" in capsys.readouterr().out
    assert (files[0].read_bytes(), files[1].read_bytes()) == before


def test_the_files_hold_nothing_that_no_patch_wraps():
    known = shipped.reviewed()
    addresses = {t.address: t for patch in patches().values() for t in patch.targets}
    assert set(known.bodies) <= set(addresses)
    relying = {(t.address, p.id) for p in patches().values() for t in p.targets if t.relies_on}
    assert set(known.parts) <= relying
    text = Path(shipped.FILE).read_text("ascii")
    assert text == "".join(f"{line}\n" for line in known.lines())
    assert {name for each in known.bodies.values() for name in each} == set(statements.accepted())
