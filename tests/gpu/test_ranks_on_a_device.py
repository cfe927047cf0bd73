"""Ranks get the device that they are asked for, and their launcher leaves the driver alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_idempotent.proof import cpu
from megatron_idempotent.proof.cpu import gpu
from megatron_idempotent.proof.prove import prove


def where_it_computes() -> tuple[str, str, str, float]:
    """Runs on a rank: a tensor's device, the group's backend, LOCAL_RANK, and a sum over ranks."""
    total = torch.ones(3, device="cuda")
    dist.all_reduce(total)
    return total.device.type, dist.get_backend(), os.environ["LOCAL_RANK"], float(total[0])


def test_one_rank_has_the_device_and_its_backend(device, megatron_ranks):
    expected = ("cuda", "nccl") if device == "cuda" else ("cpu", "gloo")
    assert megatron_ranks(1, where_it_computes) == [(*expected, "0", 1.0)]


def test_two_ranks_compute_on_the_device_too(device, megatron_ranks):
    for rank, (kind, backend, local_rank, total) in enumerate(megatron_ranks(2, where_it_computes)):
        assert kind == ("cuda" if device == "cuda" else "cpu")
        assert backend == "gloo" or local_rank == str(rank)  # NCCL: a GPU for each
        assert total == 2.0


@pytest.mark.exhaustive
def test_each_hazard_is_proven_where_ranks_refuse_what_a_gpu_would():
    assert not [finding for finding in prove(device="checked") if finding.failed]


# In a process of its own: what the runtime answers is asked by upstream while it is imported.
_ASKED = """
import importlib, importlib.util, json, sys, warnings
warnings.simplefilter("ignore")
from megatron_idempotent.proof.cpu import device, runtime
asked = set()
def told(name, answer):
    if isinstance(answer, type):
        return answer
    def call(*args, **kwargs):
        asked.add(name)
        return answer(*args, **kwargs)
    return call
for answers in (device.ANSWERS, device.ACCELERATOR_ANSWERS):
    for name in answers:
        answers[name] = told(name, answers[name])
runtime.enable()
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        pass
print(json.dumps(sorted(asked)))
"""


def test_importing_what_ranks_need_asks_nothing_that_starts_the_driver():
    # Where a GPU is said to be there, so that what upstream asks then is asked here too.
    run = subprocess.run(
        [sys.executable, "-c", _ASKED, *cpu.PROGRAM_PRELOAD, "pytest"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert set(json.loads(run.stdout.splitlines()[-1])) <= {"is_available", "device_count"}


def test_a_process_that_has_not_loaded_the_drivers_library_has_not_started_it(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 00:00 0  /usr/lib/libc.so.6\n")
    assert not gpu.driver_started(maps)


def test_a_launcher_counts_devices_without_the_driver_and_is_found_out_where_it_does_not(
    monkeypatch,
):
    assert gpu.ENVIRONMENT == {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    monkeypatch.setattr(gpu, "driver_started", lambda: True)
    with pytest.raises(RuntimeError, match=r"importing some\.module has started the CUDA driver"):
        gpu.check_untouched("some.module")


def test_without_a_gpu_asking_for_one_says_why():
    with (
        cpu.RankPool(1, device="cuda", preload=("torch",)) as pool,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        with pytest.raises(cpu.NoDeviceError, match=r"finds none \(CUDA_VISIBLE_DEVICES is ''\)"):
            pool.run(1, where_it_computes)


@pytest.mark.parametrize(
    ("argument", "variable", "expected"),
    [
        (None, None, "cpu"),
        (None, "", "cpu"),
        (None, "cuda", "cuda"),
        ("cpu", "cuda", "cpu"),
        ("checked", None, "checked"),
    ],
)
def test_an_argument_wins_over_the_environment(argument, variable, expected, monkeypatch):
    monkeypatch.delenv(gpu.VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(gpu.VARIABLE, variable)
    assert gpu.chosen_device(argument) == expected
    assert cpu.RankPool(1, device=argument).device == expected


def test_an_unknown_device_is_named_with_those_that_there_are(monkeypatch):
    monkeypatch.setenv(gpu.VARIABLE, "gpu")
    with pytest.raises(ValueError, match="MEGATRON_IDEMPOTENT_DEVICE is 'gpu'; allowed: cpu, cuda"):
        cpu.RankPool(1)


def settings_of_a_rank() -> dict[str, Any]:
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def test_ranks_on_a_gpu_use_deterministic_kernels_and_others_see_none(device, megatron_ranks):
    (found,) = megatron_ranks(1, settings_of_a_rank)
    if device == "cuda":
        assert found["deterministic"]
        assert found["workspace"] == ":4096:8"
    else:
        assert found["visible"] == ""


# The launcher's way up to the fork, less the question for a GPU; no runtime is on.
_PREPARED = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
from megatron_idempotent.proof.cpu import gpu
gpu.require = lambda: None
gpu.prepare()
for name in sys.argv[1:]:
    importlib.import_module(name)
    gpu.check_untouched(name)
import torch, torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer as buffers
from megatron.core.transformer.moe import moe_utils
from megatron_idempotent.proof.cpu import collectives, is_enabled
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
seen = []
copy_back = collectives._Copying.copy_back
collectives._Copying.copy_back = lambda self: (seen.append(len(self._copies)), copy_back(self))[1]
def reduced():
    out = torch.zeros(2)
    buffers.dist_reduce_scatter_func(out, torch.ones(2), group=dist.group.WORLD)
    return out.tolist()
found = [reduced()]
plain = list(seen)
collectives.begin("cpu")
found.append(reduced())
print(json.dumps({"found": found, "plain": plain, "staged": seen, "runtime": is_enabled(),
                  "manager": buffers._coalescing_manager is dist._coalescing_manager,
                  "completed": hasattr(moe_utils, "te_general_gemm")}))
"""


@pytest.mark.exhaustive
def test_a_launchers_imports_bind_collectives_that_pass_by_until_ranks_share_a_gpu():
    modules = (
        "megatron.core.distributed",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.optimizer",
    )
    run = subprocess.run(
        [sys.executable, "-c", _PREPARED, *modules],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **gpu.ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""},
    )
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["found"] == [[1.0, 1.0]] * 2
    assert found["plain"] == [], "torch's own collective, as long as each rank has a GPU"
    assert 1 in found["staged"]
    assert found["manager"]
    assert found["completed"], "what needs Transformer Engine by oversight"
    assert not found["runtime"]
