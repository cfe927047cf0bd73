"""Output directories and checkpoints on disk: refused early, never half there, never lost."""

import json
import os
import tracemalloc

import pytest

from megatron_idempotent.rl.trainer import CheckpointError, OutputError, output
from megatron_idempotent.rl.trainer.config import load_config
from megatron_idempotent.rl.trainer.output import prepare, resume_state, seal_checkpoint


def make_run(tmp_path, *rollouts, **state):
    """A run directory with sealed checkpoints of two small files each."""
    out = tmp_path / "run"
    config = load_config(overrides=[f"run.out={out}"])
    prepare(config, resume=False, quiet=True)
    for number in rollouts:
        unfinished = output.unfinished_path(out / "checkpoints", number)
        (unfinished / "megatron").mkdir(parents=True)
        (unfinished / "megatron" / "weights").write_bytes(bytes(range(200)))
        (unfinished / "megatron" / "common").write_bytes(b"args")
        sealed = {"rollouts": number, "config": resume_state(config), **state}
        output.seal(unfinished, output.checkpoint_path(out / "checkpoints", number), sealed)
    return config, out / "checkpoints"


def resume(config):
    return prepare(config, resume=True, quiet=True).resume_from


def test_a_sealed_checkpoint_is_found_and_verified(tmp_path):
    config, checkpoints = make_run(tmp_path, 3, 12)
    assert resume(config) == output.checkpoint_path(checkpoints, 12)
    assert output.verify_checkpoint(output.checkpoint_path(checkpoints, 3))["rollouts"] == 3


def test_a_checkpoint_without_its_marker_does_not_count(tmp_path):
    config, checkpoints = make_run(tmp_path, 3)
    output.unfinished_path(checkpoints, 6).mkdir()
    output.checkpoint_path(checkpoints, 9).mkdir()
    assert resume(config) == output.checkpoint_path(checkpoints, 3)


def flipped(file, at=None):
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: os.truncate(file, 5), "5 bytes, 200 were written"),
        (flipped, "its content has changed"),
        (lambda file: file.unlink(), "missing"),
    ],
)
def test_a_damaged_checkpoint_names_the_file_and_the_older_one(tmp_path, damage, message):
    config, checkpoints = make_run(tmp_path, 3, 6)
    damage(output.checkpoint_path(checkpoints, 6) / "megatron" / "weights")
    with pytest.raises(CheckpointError, match=f"weights: {message}") as error:
        resume(config)
    assert "to resume from rollout-000003" in str(error.value)
    assert output.verify_checkpoint(output.checkpoint_path(checkpoints, 3))["rollouts"] == 3


def test_a_damaged_list_names_itself_wherever_the_damage_is(tmp_path):
    config, checkpoints = make_run(tmp_path, 3)
    marker = output.checkpoint_path(checkpoints, 3) / output.MARKER
    whole, state = marker.read_bytes(), output.verify_checkpoint(marker.parent)
    told = []
    for place in range(40, len(whole), 17):  # after the name of its own hash
        flipped(marker, place)
        with pytest.raises(CheckpointError) as error:
            output.verify_checkpoint(marker.parent)
        told.append(str(error.value))
        marker.write_bytes(whole)
    assert all(f"{marker}: damaged" in each for each in told)
    assert output.verify_checkpoint(marker.parent) == state
    os.truncate(marker, 50)
    with pytest.raises(CheckpointError, match=r"COMPLETE.json: damaged .* no older checkpoint"):
        resume(config)


def test_the_initial_checkpoint_and_the_metrics_of_a_damaged_run_are_not_trusted(tmp_path):
    config, checkpoints = make_run(tmp_path, 3)
    initial = checkpoints.parent / "model-initial"
    initial.mkdir()
    (initial / "model.safetensors").write_bytes(bytes(100))
    (initial / "config.json").write_text("{}")
    output.write_sums(initial)
    metrics = checkpoints.parent / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n{"step": 2}\n')
    assert resume(config) == output.checkpoint_path(checkpoints, 3)
    flipped(initial / "model.safetensors")
    advice = r"model.safetensors: .* remove .*model-initial, and an equal"
    with pytest.raises(CheckpointError, match=advice):
        resume(config)
    flipped(initial / "model.safetensors")
    flipped(metrics, at=13)
    with pytest.raises(OutputError, match=r"metrics.jsonl:2: damaged .* remove that line"):
        resume(config)
    (initial / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json: missing, and SHA256SUMS lists it"):
        resume(config)


def test_files_are_hashed_without_being_held_in_memory(tmp_path):
    unfinished = output.unfinished_path(tmp_path, 3)
    unfinished.mkdir()
    with (unfinished / "weights").open("wb") as file:
        file.truncate(1 << 26)  # a hole: no byte of it is on the disk
    tracemalloc.start()
    try:
        output.seal(unfinished, output.checkpoint_path(tmp_path, 3), {"rollouts": 3})
        assert output.verify_checkpoint(output.checkpoint_path(tmp_path, 3)) == {"rollouts": 3}
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    _, checkpoints = make_run(tmp_path, 3, 6, 9)
    output.keep_newest(checkpoints, 2)
    assert [path.name for path in output.complete_checkpoints(checkpoints)] == [
        "rollout-000006",
        "rollout-000009",
    ]


def test_a_save_keeps_nothing_of_a_run_that_died_in_it_and_drops_the_oldest_checkpoints(tmp_path):
    config, checkpoints = make_run(tmp_path, 3, 6, 9)
    unfinished = output.unfinished_path(checkpoints, 12)
    unfinished.mkdir()
    (unfinished / "shard of another layout").write_bytes(b"half")
    output.make_empty(unfinished)
    (unfinished / "weights").write_bytes(b"whole")
    seal_checkpoint(checkpoints, 12, config, digest="of the weights")
    found = output.complete_checkpoints(checkpoints)
    assert (
        found
        == [output.checkpoint_path(checkpoints, each) for each in (3, 6, 9, 12)][
            -config.run.keep_checkpoints :
        ]
    )
    assert len(found) < 4
    assert resume(config) == found[-1]
    assert output.verify_checkpoint(found[-1])["weights sha256"] == "of the weights"
    assert not (found[-1] / "shard of another layout").exists()


def test_resuming_with_another_setting_names_it_and_both_values(tmp_path):
    config, _ = make_run(tmp_path, 3)
    other = load_config(overrides=[f"run.out={config.run.out}", "optimizer.lr=0.5"])
    with pytest.raises(CheckpointError, match=r"optimizer.lr = 0.\d+, now it is 0.5; resume with"):
        resume(other)


def test_a_checkpoint_of_a_release_without_a_setting_has_its_default(tmp_path):
    now = resume_state(load_config(overrides=[f"run.out={tmp_path / 'run'}"]))
    older = {key: value for key, value in now.items() if not key.startswith("parallel.")}
    config, checkpoints = make_run(tmp_path, 3, config=older)
    assert resume(config) == output.checkpoint_path(checkpoints, 3)
    other = load_config(overrides=[f"run.out={config.run.out}", "parallel.tp=2"])
    with pytest.raises(CheckpointError, match=r"parallel.tp = 1, now it is 2; resume with"):
        resume(other)


def test_resuming_for_more_rollouts_or_in_other_chunks_is_allowed(tmp_path):
    config, checkpoints = make_run(tmp_path, 3)
    free = ("run.rollouts=500", "optimizer.chunks_per_step=1")
    longer = load_config(overrides=[f"run.out={config.run.out}", *free])
    assert longer.optimizer.chunks_per_step != config.optimizer.chunks_per_step
    assert resume(longer) == output.checkpoint_path(checkpoints, 3)


def test_there_must_be_something_to_resume(tmp_path):
    config, _ = make_run(tmp_path)
    with pytest.raises(CheckpointError, match="no complete checkpoint to resume from"):
        resume(config)
    with pytest.raises(OutputError, match="no such directory; name the run to resume with --out"):
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
    sealed = json.loads((output.checkpoint_path(checkpoints, 3) / output.MARKER).read_text())
    assert sorted(sealed["files"]) == ["megatron/common", "megatron/weights"]
