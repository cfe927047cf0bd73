"""Output directories and checkpoints on disk: refused early, never half there, never lost."""

import json
import os

import pytest

from megatron_idempotent.trainer import saved
from megatron_idempotent.trainer.errors import CheckpointError, OutputError
from megatron_idempotent.trainer.output import prepare, resume_state, seal_checkpoint
from megatron_idempotent.trainer.settings import load_config


def make_run(tmp_path, *rollouts, **state):
    """A run directory with sealed checkpoints of two small files each."""
    out = tmp_path / "run"
    config = load_config(overrides=[f"run.out={out}"])
    prepare(config, resume=False, quiet=True)
    for number in rollouts:
        unfinished = saved.unfinished_path(out / "checkpoints", number)
        (unfinished / "megatron").mkdir(parents=True)
        (unfinished / "megatron" / "weights").write_bytes(bytes(range(200)))
        (unfinished / "megatron" / "common").write_bytes(b"args")
        sealed = {"rollouts": number, "config": resume_state(config), **state}
        saved.seal(unfinished, saved.path_for(out / "checkpoints", number), sealed)
    return config, out / "checkpoints"


def resume(config):
    return prepare(config, resume=True, quiet=True).resume_from


def test_a_sealed_checkpoint_is_found_and_verified(tmp_path):
    config, checkpoints = make_run(tmp_path, 3, 12)
    assert resume(config) == saved.path_for(checkpoints, 12)
    assert saved.verify(saved.path_for(checkpoints, 3))["rollouts"] == 3


def test_a_checkpoint_without_its_marker_does_not_count(tmp_path):
    config, checkpoints = make_run(tmp_path, 3)
    saved.unfinished_path(checkpoints, 6).mkdir()
    saved.path_for(checkpoints, 9).mkdir()
    assert resume(config) == saved.path_for(checkpoints, 3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.write_bytes(b"short"), "weights: 5 bytes, 200 were written"),
        (lambda file: file.write_bytes(bytes(200)), "weights: its content has changed"),
        (lambda file: file.unlink(), "weights: missing"),
    ],
)
def test_a_damaged_checkpoint_names_the_file_and_the_older_one(tmp_path, damage, message):
    config, checkpoints = make_run(tmp_path, 3, 6)
    damage(saved.path_for(checkpoints, 6) / "megatron" / "weights")
    with pytest.raises(CheckpointError, match=message) as error:
        resume(config)
    assert "to resume from rollout-000003" in str(error.value)
    assert saved.verify(saved.path_for(checkpoints, 3))["rollouts"] == 3


def test_a_truncated_marker_names_itself(tmp_path):
    config, checkpoints = make_run(tmp_path, 3)
    marker = saved.path_for(checkpoints, 3) / saved.MARKER
    marker.write_text(marker.read_text()[:50])
    with pytest.raises(CheckpointError, match=r"COMPLETE.json: damaged .* no older checkpoint"):
        resume(config)


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    _, checkpoints = make_run(tmp_path, 3, 6, 9)
    saved.keep_newest(checkpoints, 2)
    assert [path.name for path in saved.complete(checkpoints)] == [
        "rollout-000006",
        "rollout-000009",
    ]


def test_a_save_keeps_nothing_of_a_run_that_died_in_it_and_drops_the_oldest_checkpoints(tmp_path):
    config, checkpoints = make_run(tmp_path, 3, 6, 9)
    unfinished = saved.unfinished_path(checkpoints, 12)
    unfinished.mkdir()
    (unfinished / "shard of another layout").write_bytes(b"half")
    saved.make_empty(unfinished)
    (unfinished / "weights").write_bytes(b"whole")
    seal_checkpoint(checkpoints, 12, config, digest="of the weights")
    found = saved.complete(checkpoints)
    assert (
        found
        == [saved.path_for(checkpoints, each) for each in (3, 6, 9, 12)][
            -config.run.keep_checkpoints :
        ]
    )
    assert len(found) < 4
    assert resume(config) == found[-1]
    assert saved.verify(found[-1])["weights sha256"] == "of the weights"
    assert not (found[-1] / "shard of another layout").exists()


def test_resuming_with_another_setting_names_it_and_both_values(tmp_path):
    config, _ = make_run(tmp_path, 3)
    other = load_config(overrides=[f"run.out={config.run.out}", "optimizer.lr=0.5"])
    with pytest.raises(CheckpointError, match=r"optimizer.lr = 0.\d+, now it is 0.5; resume with"):
        resume(other)


def test_resuming_for_more_rollouts_or_in_other_chunks_is_allowed(tmp_path):
    config, checkpoints = make_run(tmp_path, 3)
    free = ("run.rollouts=500", "optimizer.chunks_per_step=1")
    longer = load_config(overrides=[f"run.out={config.run.out}", *free])
    assert longer.optimizer.chunks_per_step != config.optimizer.chunks_per_step
    assert resume(longer) == saved.path_for(checkpoints, 3)


def test_there_must_be_something_to_resume(tmp_path):
    config, _ = make_run(tmp_path)
    with pytest.raises(CheckpointError, match="no complete checkpoint to resume from"):
        resume(config)
    with pytest.raises(OutputError, match="no such directory; nothing to resume there"):
        resume(load_config(overrides=[f"run.out={tmp_path / 'other'}"]))


def test_a_directory_with_another_run_is_not_written_to(tmp_path):
    config, _ = make_run(tmp_path)
    with pytest.raises(OutputError, match="not empty; continue that run with --resume"):
        prepare(config, resume=False, quiet=True)


def test_an_output_directory_that_cannot_be_made_is_refused(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    config = load_config(overrides=[f"run.out={blocker / 'run'}"])
    with pytest.raises(OutputError, match=r"Not a directory; choose a directory .* --out"):
        prepare(config, resume=False, quiet=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_directory_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    config = load_config(overrides=[f"run.out={tmp_path / 'run'}"])
    with pytest.raises(OutputError, match="Permission denied"):
        prepare(config, resume=False, quiet=True)


def test_runs_without_a_name_are_numbered_and_the_last_is_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config()
    first = prepare(config, resume=False, quiet=True)
    second = prepare(config, resume=False, quiet=True)
    assert [first.out.name, second.out.name] == ["train-001", "train-002"]
    assert load_config(second.out / "config.toml") == config
    with pytest.raises(CheckpointError, match="train-002"):
        resume(config)


def test_the_seal_holds_the_hash_of_every_file(tmp_path):
    _, checkpoints = make_run(tmp_path, 3)
    sealed = json.loads((saved.path_for(checkpoints, 3) / saved.MARKER).read_text())
    assert sorted(sealed["files"]) == ["megatron/common", "megatron/weights"]
