"""The reference trainer on the device that `--device` names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tokenizers")  # comes with the extra `trainer`

from megatron_idempotent.patching.source import locate
from megatron_idempotent.rl.metrics.loggers import METRICS_FILE, read_metrics
from megatron_idempotent.rl.trainer import main as command
from megatron_idempotent.rl.trainer.config import load_config
from megatron_idempotent.rl.trainer.loop import Stopwatch
from megatron_idempotent.rl.trainer.output import prepare

SMALL = (
    *("model.hidden=32", "model.ffn=32", "rollout.prompts=8", "rollout.group_size=8"),
    *("evaluation.prompts=9", "evaluation.every=1", "run.checkpoint_every=2"),
    *("run.rollouts=2", "run.ranks=1"),
    # All that reads log-probs: the initial weights', and those of the weights that train.
    *("loss.old_logprobs=recomputed", "loss.correction=truncate"),
)

pytestmark = pytest.mark.skipif(
    locate("megatron.training.training") is None,
    reason="this release's wheel does not carry megatron.training",
)


def trained(out: Path, device: str, *more: str) -> list[dict[str, Any]]:
    """The metrics of a small run, without what the clock decides."""
    config = load_config(overrides=[*SMALL, *more, f"run.out={out}", f"run.device={device}"])
    job = prepare(config, resume=False, quiet=True)
    command.start_ranks(job)
    assert (out / "model" / "model.safetensors").exists()
    return [
        {
            name: value
            for name, value in row.items()
            if not (name.startswith("timing/") or name.endswith("_s"))
        }
        for row in read_metrics(out / METRICS_FILE)
    ]


def test_it_puts_everything_where_a_gpu_needs_it_and_trains_as_on_the_cpu(tmp_path):
    one = ("run.rollouts=1", "run.checkpoint_every=1")
    checked = trained(tmp_path / "checked", "checked", *one)
    assert checked == trained(tmp_path / "cpu", "cpu", *one)
    assert len(checked) == 2
    assert not [name for row in checked for name in row if name.startswith("memory/")]


@pytest.mark.gpu
def test_it_trains_on_a_gpu_again_to_the_bit_with_its_memory_written_down(device, tmp_path):
    if device != "cuda":
        pytest.skip("needs a GPU: run with --megatron-device cuda")
    first, second = (trained(tmp_path / name, "cuda") for name in ("a", "b"))
    memory = {name for row in first for name in row if name.startswith("memory/train/")}
    for phase in ("generation", "policy_training", "sync_weights"):
        for number in ("allocated", "reserved", "peak", "kept"):
            assert f"memory/train/{phase}_{number}_gib" in memory
    # Generation and a sync give back what they took, once buffers that live on are there.
    last = first[-1]
    assert last["memory/train/generation_kept_gib"] <= 0.01
    assert last["memory/train/sync_weights_kept_gib"] <= 0.01
    learnt = [
        [{k: v for k, v in row.items() if not k.startswith("memory/")} for row in run]
        for run in (first, second)
    ]
    assert learnt[0] == learnt[1]


def test_the_stopwatch_says_what_a_phase_held_and_what_it_kept():
    gib = 1 << 30
    allocated, peaks, resets = iter((2, 2, 2, 3)), iter((7, 4)), []
    device = SimpleNamespace(
        reset_peak_memory_stats=lambda: resets.append(1),
        memory_allocated=lambda: next(allocated) * gib,
        memory_reserved=lambda: 8 * gib,
        max_memory_allocated=lambda: next(peaks) * gib,
    )
    watch = Stopwatch(device)
    for name in ("generation", "policy_training"):
        with watch.phase(name):
            pass
    found = watch.metrics(tokens=1.0)
    assert {name: found[name] for name in found if name.startswith("memory/")} == {
        "memory/train/generation_allocated_gib": 2.0,
        "memory/train/generation_reserved_gib": 8.0,
        "memory/train/generation_peak_gib": 7.0,
        "memory/train/generation_kept_gib": 0.0,
        "memory/train/policy_training_allocated_gib": 3.0,
        "memory/train/policy_training_reserved_gib": 8.0,
        "memory/train/policy_training_peak_gib": 4.0,
        "memory/train/policy_training_kept_gib": 1.0,
    }
    assert len(resets) == 2, "each phase has a peak of its own"


def test_a_cpus_memory_is_not_measured(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    watch = Stopwatch()
    with watch.phase("generation"):
        pass
    assert all(name.startswith("timing/") for name in watch.metrics(tokens=1.0))


def test_a_run_that_asks_for_a_gpu_ends_with_one_line_where_there_is_none(
    tmp_path, capfd, monkeypatch
):
    from megatron_idempotent.rl.trainer.main import main

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    out = ["--out", str(tmp_path / "run"), "--quiet", "--rollouts", "1"]
    assert main(["--device", "cuda", *out]) == 2
    error = capfd.readouterr().err
    assert error.startswith("error: no NVIDIA GPU here: torch ")
    assert error.count("\n") == 1
