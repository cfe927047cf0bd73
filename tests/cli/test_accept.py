"""`drift --accept`: a new release touches the file of reviewed bodies, and no case file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkouts import info_of, zipped
from test_drift import edit, rows

from megatron_idempotent.cli import accept as module
from megatron_idempotent.cli import statements
from megatron_idempotent.cli.generated import content, write
from megatron_idempotent.cli.main import main
from megatron_idempotent.patching import Patch, Target, releases
from megatron_idempotent.patching import record as shipped
from megatron_idempotent.patching.base import generated
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.record import Reviewed
from megatron_idempotent.patching.releases import numbers
from megatron_idempotent.patching.trees import INFO

pytestmark = pytest.mark.full

SEED = "megatron/core/tensor_parallel/random.py"
GROUPS = "megatron/core/parallel_state.py"
OFFLOAD = "megatron/core/distributed/distributed_data_parallel.py"
BUCKETS = "megatron/core/distributed/param_and_grad_buffer.py"


@pytest.fixture
def files(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """Copies of the files of reviews and of statements, which the command writes, not ours."""
    folder = tmp_path / "_generated"
    shutil.copytree(module.FOLDER, folder)
    monkeypatch.setattr(module, "FOLDER", folder)
    return folder / module.FILE, folder / module.ACCEPTED


def wheel(root: Path, version: str) -> Path:
    """A release's wheel with the files of the checkout."""
    info = root / f"{INFO.replace('.', '/')}.py"
    info.write_text(info_of(version))
    return zipped(root, root.parent / f"megatron_core-{version}-py3-none-any.whl")


def drifted(root: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Patch of megatron-core that the checkout refuses, beside those of main's own modules."""
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


@pytest.fixture
def drifted_after(tree, files, capsys) -> Callable[[], set[str]]:
    """A function that tells which patches the checkout refuses with the reviews that were written.

    Patches are those of a process that starts now: they take their reviews from the file.
    """

    def refused() -> set[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shipped, "_known", [read(files[0])])
            for each in patches().values():
                for target in each.targets:
                    patch.setitem(target.__dict__, "reviewed", {})
                    patch.setitem(target.__dict__, "parts", {})
                each.__post_init__()  # takes what the file says of its targets
            capsys.readouterr()  # of what was accepted before
            return drifted(tree, capsys)

    return refused


def read(path: Path) -> Reviewed:
    return Reviewed(content(path.parent, path.name))


def test_a_new_release_is_accepted_in_one_file_and_drifts_no_longer(
    tree, files, capsys, drifted_after
):
    edit(tree / GROUPS, "def destroy_model_parallel():", "async def destroy_model_parallel():")
    assert drifted(tree, capsys) == {"process-groups-leak"}
    before = read(files[0])
    assert accept(wheel(tree, "0.20.0"), "process_groups_leak.py") == 0
    assert "destroy_model_parallel, 0.20.0" in capsys.readouterr().out
    after = read(files[0])
    ((name, label),) = added(before, after).items()
    assert label == "0.20.0"
    # What stayed as it was is the release's too, and `doctor` says that it is not modified.
    address = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.no_sync"
    assert list(after.bodies[address].values()) == ["0.12.0 to 0.20.0"]
    # A later drift is shown against its statements.
    assert any(line.startswith(name) for line in files[1].read_text().splitlines())
    assert drifted_after() == set()


def test_a_body_has_the_label_of_all_releases_with_the_same_file(tree, files, capsys):
    installed = releases.installed("megatron-core").text
    table = releases.Table(generated(releases.TABLE))
    module = GROUPS.removesuffix(".py").replace("/", ".")
    digest = releases.digest_of((tree / GROUPS).read_bytes())
    same = [name for name in table.names if table.release(name).digests[module] == digest]
    assert installed in same
    before = read(files[0])
    address = f"{module}:destroy_model_parallel"
    for name in before.bodies.pop(address):
        before.readers.pop((address, name), None)
    write(files[0].parent, files[0].name, before.lines())
    assert accept(wheel(tree, installed), "process_groups_leak.py") == 0
    (label,) = read(files[0]).bodies[address].values()
    assert label == (same[0] if len(same) == 1 else f"{same[0]} to {same[-1]}")


def test_the_part_that_a_patch_relies_on_is_accepted_for_it_alone(tree, files, capsys):
    edit(
        tree / SEED,
        "    offset = seed + 2718",
        "    seed = seed + 0 * tp_rank\n    offset = seed + 2718",
    )
    assert "pipeline-seed-offset" in drifted(tree, capsys)
    before = read(files[0])
    assert accept(wheel(tree, "0.20.0"), "pipeline-seed-offset") == 0
    after = read(files[0])
    body, part = added(before, after)
    address = "megatron.core.tensor_parallel.random:model_parallel_cuda_manual_seed"
    assert after.bodies[address][body] == after.parts[address, "pipeline-seed-offset"][part]
    assert after.readers[address, body] == ["pipeline-seed-offset"]
    assert {key[1] for key in after.parts if after.parts[key] != before.parts.get(key)} >= {
        "pipeline-seed-offset"
    }


def test_a_body_that_others_wrap_too_is_read_for_those_that_are_named(
    tree, files, capsys, drifted_after
):
    edit(tree / BUCKETS, "    def start_grad_sync(self", "    async def start_grad_sync(self")
    found = drifted(tree, capsys)
    assert len(found) > 1
    before = read(files[0])
    one, *others = sorted(found)
    release = wheel(tree, "0.20.0")
    assert accept(release, one) == 0
    assert list(added(before, read(files[0])).values()) == ["0.20.0"]
    assert drifted_after() == {*others}
    once = read(files[0])
    assert accept(release, *others) == 0
    assert added(once, read(files[0])) == {}
    assert drifted_after() == set()


def test_a_commit_wants_a_label_and_leaves_those_of_releases(tree, files, capsys):
    info = tree / f"{INFO.replace('.', '/')}.py"
    info.write_text(info_of("0.20.0rc0"))
    edit(tree / GROUPS, "def destroy_model_parallel():", "async def destroy_model_parallel():")
    assert accept(tree, "process-groups-leak") == 2
    assert "0.20.0rc0, and is no release" in capsys.readouterr().err
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


@pytest.mark.parametrize("relying", [False, True])
@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("get_cuda_rng_tracker", "return _CUDA_RNG_STATE_TRACKER"),
        ("model_parallel_cuda_manual_seed", "offset = seed + 2718"),
    ],
)
def test_a_new_case_file_gets_reviews_of_its_own(
    tree, files, capsys, monkeypatch, name, fragment, relying
):
    """Others wrap one of the two functions, so that its body was read, but for them."""
    address = f"megatron.core.tensor_parallel.random:{name}"
    target = Target(address, seed, *(fragment,) if relying else ())
    patch = Patch(id="some-symptom", summary="it hurts", since="0.12", targets=(target,))
    monkeypatch.setattr(module, "patches", lambda: {patch.id: patch})
    monkeypatch.setattr("megatron_idempotent.cli.drift.patches", lambda: {patch.id: patch})
    (row,) = rows(capsys, tree)[1]
    assert row["standing"] == ("holds" if relying else "drifted")
    before = read(files[0])
    release = wheel(tree, "0.20.0")
    assert accept(release, patch.id) == 0
    told = [line.split(" ")[:2] for line in capsys.readouterr().out.splitlines()]
    kinds = ["body", "part"] if relying else ["body"]
    assert told == [[f"{patch.id}:", kind] for kind in kinds]
    after = read(files[0])
    (body,) = [b for b in after.bodies[address] if patch.id in after.readers[address, b]]
    assert before.bodies.get(address, {}).keys() | {body} == after.bodies[address].keys()
    if name == "get_cuda_rng_tracker":  # which nobody else wraps
        assert after.readers[address, body] == [patch.id]
    assert accept(release, patch.id) == 0
    assert "nothing is new" in capsys.readouterr().out


def test_a_release_that_lacks_the_hazard_needs_no_review(tree, files, capsys):
    edit(
        tree / OFFLOAD,
        "    def offload_grad_buffers(self",
        "    async def offload_grad_buffers(self",
    )
    assert accept(wheel(tree, "0.12.3"), "offload-drops-gradients") == 0
    assert "nothing is new" in capsys.readouterr().out


def test_nothing_is_new_in_what_was_read(tree, files, capsys):
    before = files[0].read_bytes(), files[1].read_bytes()
    assert accept(tree) == 0
    assert "nothing is new" in capsys.readouterr().out
    assert (files[0].read_bytes(), files[1].read_bytes()) == before


def test_bodies_that_no_patch_wraps_any_more_leave_with_their_statements(tree, files):
    before = read(files[0])
    (gone,) = {address for address in before.bodies if address.endswith(":destroy_model_parallel")}
    files[0].write_text(files[0].read_text().replace(gone, f"{gone}_of_old"))
    assert accept(tree, "pipeline-seed-offset", "--as", "main, November 2026") == 0
    after = read(files[0])
    assert {address for address in before.bodies if address not in after.bodies} == {gone}
    assert f"{gone}_of_old" not in after.bodies
    others = {name for address, name in before.readers if address != gone}
    dropped = {name for address, name in before.readers if address == gone} - others
    assert dropped
    assert not [line for line in files[1].read_text().splitlines() if line[:12] in dropped]


def test_the_files_hold_nothing_that_no_patch_wraps():
    known = shipped.reviewed()
    addresses = {t.address: t for patch in patches().values() for t in patch.targets}
    assert set(known.bodies) <= set(addresses)
    relying = {(t.address, p.id) for p in patches().values() for t in p.targets if t.relies_on}
    assert set(known.parts) <= relying
    wrapping = {(t.address, p.id) for p in patches().values() for t in p.targets}
    read_for = {(address, p) for (address, _), found in known.readers.items() for p in found}
    assert read_for <= wrapping
    bodies = {
        (a, name): label for a, found in known.bodies.items() for name, label in found.items()
    }
    assert set(known.readers) <= set(bodies)
    # Nobody has to read what a function was before the hazard came.
    since = {t.address: p.since for p in patches().values() for t in p.targets}
    for address, name in set(bodies) - set(known.readers):
        newest = bodies[address, name].rpartition(" ")[2]
        assert () < numbers(newest) < numbers(since[address]), address
    assert generated(shipped.FILE) == known.lines()
    assert {name for _, name in known.readers} == set(statements.accepted())
