"""Output directories and checkpoints on disk: refused early, never half there, never lost."""

import os
import tracemalloc

import pytest
from trainer_cases import job_for

from megatron_idempotent.rl.trainer import CheckpointError, OutputError, output
from megatron_idempotent.rl.trainer.config import load_config
from megatron_idempotent.rl.trainer.output import checkpoint_path, seal_checkpoint

HUNDRED = "run.keep_checkpoints=100"


def make_run(tmp_path, *rollouts):
    """A run directory with sealed checkpoints of two small files each; it, and theirs."""
    job = job_for(tmp_path / "run", HUNDRED)
    checkpoints = job.out / "checkpoints"
    for number in rollouts:
        unfinished = output.unfinished_path(checkpoints, number)
        (unfinished / "megatron").mkdir(parents=True)
        (unfinished / "megatron" / "weights").write_bytes(bytes(range(200)))
        (unfinished / "megatron" / "common").write_bytes(b"args")
        seal_checkpoint(checkpoints, number, job.config, digest="of the weights")
    return job.out, checkpoints


def resume(out, *overrides):
    return job_for(out, *overrides, resume=True).resume_from


def flipped(file, at=None):
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    file.write_bytes(data)


def test_the_newest_sealed_checkpoint_is_found_and_what_has_no_seal_does_not_count(tmp_path):
    out, checkpoints = make_run(tmp_path, 3, 12)
    output.unfinished_path(checkpoints, 15).mkdir()
    checkpoint_path(checkpoints, 18).mkdir()
    assert resume(out) == checkpoint_path(checkpoints, 12)
    state = output.verify_checkpoint(checkpoint_path(checkpoints, 3))
    assert (state["rollouts"], state["weights sha256"]) == (3, "of the weights")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda file: os.truncate(file, 5),
            "its 5 bytes are not those of COMPLETE.json, which lists 200 bytes",
        ),
        (flipped, "its 200 bytes are not those of COMPLETE.json"),
        (lambda file: file.unlink(), "missing"),
    ],
)
def test_a_damaged_checkpoint_names_the_file_and_the_older_one(tmp_path, damage, message):
    out, checkpoints = make_run(tmp_path, 3, 6)
    damage(checkpoint_path(checkpoints, 6) / "megatron" / "weights")
    with pytest.raises(CheckpointError, match=f"weights: {message}.*to resume from rollout-000003"):
        resume(out)
    output.verify_checkpoint(checkpoint_path(checkpoints, 3))


def test_the_millionth_rollout_comes_after_the_one_before_it(tmp_path):
    out, checkpoints = make_run(tmp_path, 999_998, 999_999, 1_000_000)
    mine = checkpoint_path(checkpoints, 999_999).rename(checkpoints / "rollout-of-mine-7")
    newest = checkpoint_path(checkpoints, 1_000_000)
    assert resume(out) == newest
    flipped(newest / "megatron" / "weights")
    with pytest.raises(CheckpointError, match="to resume from rollout-999998"):
        resume(out)
    output.remove_old(checkpoints, keep=1)
    assert sorted(checkpoints.iterdir()) == [newest, mine]


def test_a_damaged_list_names_itself_wherever_the_damage_is(tmp_path):
    out, checkpoints = make_run(tmp_path, 3)
    marker = checkpoint_path(checkpoints, 3) / output.MARKER
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
        resume(out)


def test_the_initial_checkpoint_and_the_metrics_of_a_damaged_run_are_not_trusted(tmp_path):
    out, checkpoints = make_run(tmp_path, 3)
    initial, metrics = out / "model-initial", out / "metrics.jsonl"
    initial.mkdir()
    (initial / "model.safetensors").write_bytes(bytes(100))
    (initial / "config.json").write_text("{}")
    output.write_sums(initial)
    metrics.write_text('{"step": 1}\n{"step": 2}\n')
    assert resume(out) == checkpoint_path(checkpoints, 3)
    flipped(initial / "model.safetensors")
    advice = r"model.safetensors: .* remove .*model-initial, and an equal"
    with pytest.raises(CheckpointError, match=advice):
        resume(out)
    flipped(initial / "model.safetensors")
    flipped(metrics, at=13)
    with pytest.raises(OutputError, match=r"metrics.jsonl:2: damaged .* remove that line"):
        resume(out)
    (initial / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json: missing; .* SHA256SUMS"):
        resume(out)


def test_files_are_hashed_without_being_held_in_memory(tmp_path):
    unfinished = output.unfinished_path(tmp_path, 3)
    unfinished.mkdir()
    with (unfinished / "weights").open("wb") as file:
        file.truncate(1 << 26)  # a hole: no byte of it is on the disk
    tracemalloc.start()
    try:
        seal_checkpoint(tmp_path, 3, load_config(), digest="")
        output.verify_checkpoint(checkpoint_path(tmp_path, 3))
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


def test_a_save_keeps_nothing_of_a_run_that_died_in_it_and_drops_the_oldest_checkpoints(tmp_path):
    out, checkpoints = make_run(tmp_path, 3, 6, 9)
    half_removed = checkpoint_path(checkpoints, 1)
    half_removed.mkdir()
    output.unfinished_path(checkpoints, 5).mkdir()
    unfinished = output.unfinished_path(checkpoints, 12)
    unfinished.mkdir()
    (unfinished / "shard of another layout").write_bytes(b"half")
    output.make_empty(unfinished)
    (unfinished / "weights").write_bytes(b"whole")
    seal_checkpoint(checkpoints, 12, load_config(overrides=["run.keep_checkpoints=2"]), digest="")
    found = output.complete_checkpoints(checkpoints)
    assert found == [checkpoint_path(checkpoints, number) for number in (9, 12)]
    assert sorted(checkpoints.iterdir()) == found
    assert resume(out) == found[-1]
    assert not (found[-1] / "shard of another layout").exists()


ON_RAY = ["run.mode=async", "controller.cluster=ray"]
PACKED = "optimizer.max_tokens_per_microbatch=64"


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ([], ["optimizer.lr=0.5"], r"optimizer.lr = 0.\d+, now it is 0.5; resume with"),
        ([], ["run.rollouts=500", "optimizer.chunks_per_step=1"], None),
        (ON_RAY, [*ON_RAY, "controller.cpus_per_rank=2"], None),
        ([PACKED], [PACKED], None),
        ([PACKED], ["optimizer.chunks_per_step=1", PACKED], "packed at once = 64, now it is 128"),
        ([PACKED], [], "optimizer.max_tokens_per_microbatch = 64, now it is 0"),
    ],
)
def test_only_settings_that_change_no_number_may_change(tmp_path, before, now, message):
    job = job_for(tmp_path / "run", *before)
    output.unfinished_path(job.out / "checkpoints", 3).mkdir(parents=True)
    seal_checkpoint(job.out / "checkpoints", 3, job.config, digest="")
    if message is None:
        assert resume(job.out, *now) == checkpoint_path(job.out / "checkpoints", 3)
    else:
        with pytest.raises(CheckpointError, match=message):
            resume(job.out, *now)


def test_a_checkpoint_of_a_release_without_a_setting_has_its_default(tmp_path, monkeypatch):
    known = output.resume_state(load_config())
    older = {key: value for key, value in known.items() if not key.startswith("parallel.")}
    with monkeypatch.context() as then:
        then.setattr(output, "resume_state", lambda config: older)
        out, checkpoints = make_run(tmp_path, 3)
    assert resume(out) == checkpoint_path(checkpoints, 3)
    with pytest.raises(CheckpointError, match=r"parallel.tp = 1, now it is 2"):
        resume(out, "parallel.tp=2")


def test_an_output_directory_that_cannot_serve_is_refused_with_a_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    make_run(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine").write_text("")
    cases = [
        ("notes", True, CheckpointError, "neither a complete checkpoint nor the config.toml"),
        ("other", True, OutputError, "no such directory; name the run to resume with --out"),
        ("run", False, OutputError, "not empty; continue that run with --resume"),
        ("file/run", False, OutputError, r"Not a directory; choose a directory .* --out"),
    ]
    if os.geteuid():  # root may write everywhere
        cases.append(("locked/run", False, OutputError, "Permission denied"))
    for name, resumed, error, message in cases:
        with pytest.raises(error, match=message):
            job_for(tmp_path / name, resume=resumed)


def test_what_a_run_that_died_was_sending_to_servers_goes_and_a_folder_of_the_users_stays(tmp_path):
    pytest.importorskip("torch")
    from megatron_idempotent.rl.trainer.engines import server_engines

    url = "rollout.engine_url=http://unused"
    for folder, own in (("sync", ""), ("mine", f"sync.directory={tmp_path / 'mine'}")):
        half = tmp_path / folder / "version-00000003-0"
        half.mkdir(parents=True)
        config = load_config(overrides=["rollout.engine=vllm", url, *filter(None, [own])])
        server_engines(output.Job(config=config, out=tmp_path), tmp_path)
        assert half.exists() == bool(own)


def test_runs_without_a_name_are_numbered_and_the_last_is_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config()
    with pytest.raises(OutputError, match="runs: no run to resume"):
        output.prepare(config, resume=True, quiet=True)
    first, second = (output.prepare(config, resume=False, quiet=True) for _ in range(2))
    assert [first.out.name, second.out.name] == ["train-001", "train-002"]
    assert load_config(second.out / "config.toml") == config
    # It died before its first checkpoint: it goes on from its start.
    again = output.prepare(config, resume=True, quiet=True)
    assert (again.out.name, again.resume_from) == ("train-002", None)
    for name in ("train-999", "train-1000", "train-of-mine"):
        second.out.with_name(name).mkdir()
    assert output.run_to_resume("").name == "train-1000"
