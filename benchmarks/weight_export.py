"""Measures an export of a model's weights to rank 0: its rate ÷ that of `save_file`, and memory.

    python -m benchmarks.weight_export [--rounds 5] [--megabytes 128] [--bucket-megabytes 16]
                                       [--json]
    python -m benchmarks.weight_export --device cuda [--json]

The model is on two CPU ranks, first with tensor parallelism, then as two pipeline stages. Each
round exports all weights, bucket by bucket, with and without the checksums of buckets, and calls
`safetensors.torch.save_file` on the same tensors, in /dev/shm if that exists. The results are the
medians of each round's ratios. Then the peak memory of an export, without the model, from the
allocator's events, ÷ (bucket + largest tensor): `MegatronWeights` promises at most 1 on rank 0.

With `--device cuda`, `quantize_blockwise` quantizes bfloat16 weights on one GPU, with both kinds of
scales, by the Triton kernel with each number of warps, and by torch. The result is its bytes (the
weight read, codes and scales written) per second ÷ those of a copy on the device in the same run.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _device, _gpu
from benchmarks._record import options, tell
from megatron_idempotent.proof import cpu

#: The hidden size; the number of layers is computed from `--megabytes`.
HIDDEN = 512
#: The shapes of quantized weights: a matrix of a large dense model, and all experts of a layer.
QUANTIZED = ((29568, 8192), (64, 2048, 4096))
LAYOUTS = {"tensor parallel": {"tp": 2}, "two stages": {"pp": 2}}


def make_source(megabytes: int, layout: dict[str, int], senders: Sequence[int] = (1,)) -> list[Any]:
    """Make a float32 model of about `megabytes` on a rank, and weight sources that export it.

    Returns:
        A `MegatronWeights` of the same model for each number of sending ranks in `senders`.
    """
    import logging

    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_idempotent.rl.hf import Architecture, MegatronWeights, build_gpt

    logging.disable(logging.WARNING)
    tp, pp = layout.get("tp", 1), layout.get("pp", 1)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp
    )
    model_parallel_cuda_manual_seed(1)
    per_layer = 4 * HIDDEN * (HIDDEN + 2 * HIDDEN // 4 + HIDDEN + 3 * 4 * HIDDEN)
    vocabulary = 8192
    both = 2 * 4 * vocabulary * HIDDEN
    stages = max(2, pp)
    layers = stages * max(1, round((megabytes * 2**20 - both) / per_layer / stages))
    arch = Architecture.of(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": HIDDEN,
            "intermediate_size": 4 * HIDDEN,
            "num_attention_heads": 8,
            "num_hidden_layers": layers,
            "num_key_value_heads": 2,
            "head_dim": HIDDEN // 8,
            "vocab_size": vocabulary,
        }
    )
    config = arch.transformer_config(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, use_cpu_initialization=True
    )
    stage = build_gpt(
        arch,
        config,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    stage = stage.cuda()
    return [MegatronWeights([stage], arch, senders=number) for number in senders]


def _fetch_only(source: Any, bucket_bytes: int) -> None:
    """Fetch all buckets of a weight source, without computing checksums."""
    from megatron_idempotent.rl.hf.buckets import split

    for members in split([info.nbytes for info in source.tensors()], bucket_bytes):
        source._fetch(members)


def measure(
    rounds: int, megabytes: int, bucket_bytes: int, layout: dict[str, int]
) -> tuple[dict[str, list[float]], int, float]:
    """Measure on a rank the seconds of exporting a model's weights, and of `save_file` on the same
    tensors. Return these seconds, the model's bytes, and the export's peak memory ÷ (bucket +
    largest tensor).

    Returns:
        The seconds of each round, the bytes of the model, and the peak memory ÷ (bucket + largest
        tensor).
    """
    import torch
    from safetensors.torch import save_file

    from megatron_idempotent.proof.cpu.probes import peak_bytes

    (source,) = make_source(megabytes, layout)
    first = torch.distributed.get_rank() == 0
    infos = source.tensors()
    size = sum(info.nbytes for info in infos)
    tensors = {info.name: torch.zeros(info.shape) for info in infos} if first else {}
    shared = Path("/dev/shm")
    root = shared if shared.is_dir() else None

    def export() -> None:
        for bucket in source.buckets(bucket_bytes=bucket_bytes):
            del bucket

    def save() -> None:
        if first:
            with tempfile.TemporaryDirectory(dir=root) as folder:
                save_file(tensors, Path(folder) / "model.safetensors")

    sides: dict[str, Callable[[], None]] = {
        "export": export,
        "without checksums": lambda: _fetch_only(source, bucket_bytes),
        "save_file": save,
    }
    taken = _device.in_turn(rounds, sides)
    seconds = {name: [each for (each,) in rows] for name, rows in taken.items()}
    tensors.clear()
    held = peak_bytes(export, runs=1)
    return seconds, size, held / (bucket_bytes + max(info.nbytes for info in infos))


def quantized(asked: argparse.Namespace) -> None:
    """Measure FP8 quantization on this GPU, by Triton and by torch, and print the results."""
    import torch

    from megatron_idempotent.fp8 import triton_blockwise
    from megatron_idempotent.fp8.blockwise import quantize_blockwise

    copied = _gpu.copied_bytes_per_s()
    told = {**_gpu.about(), "copied_bytes_per_s": copied}
    found = []
    usual = triton_blockwise.launch_quantize
    for shape in QUANTIZED:
        weight = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        least_ms = weight.numel() * (3 + 4 / 128**2) / copied * 1e3
        for scales in ("float32", "ue8m0"):
            torchs = quantize_blockwise(weight, scales=scales, triton=False)
            for warps in (None, *triton_blockwise.WARPS):
                arguments: dict[str, Any] = {"scales": scales, "triton": warps is not None}
                triton_blockwise.launch_quantize = functools.partial(usual, warps=warps)
                ours = quantize_blockwise(weight, **arguments)
                same = torch.equal(torchs.codes.view(torch.uint8), ours.codes.view(torch.uint8))
                same &= torch.equal(torchs.scale_inv, ours.scale_inv)
                del ours
                call = _gpu.measured(
                    lambda weight=weight: weight,
                    lambda given, more=arguments: quantize_blockwise(given, **more),
                    asked.rounds,
                )
                row = {"shape": shape, "scales": scales, "same_bytes": same, "ms": call.ms}
                row |= {"by": f"Triton, {warps} warps" if warps else "torch"}
                row |= {"share": least_ms / call.ms, "beside_gb": call.beside_gb}
                found.append(row)
    triton_blockwise.launch_quantize = usual
    best = max(row["share"] for row in found if row["by"] != "torch")
    held = {"share of the copy": _device.aim(best, at_least=0.7)}
    tell({"about": told, "quantized": found, "aims": held}, asked.json)


def main() -> None:
    """Print the rates of exports, their ratios to that of `save_file`, and their memory."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--bucket-megabytes", type=int, default=16)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    asked = parser.parse_args()
    if asked.device == "cuda":
        _gpu.require_cuda("benchmarks.weight_export")
        quantized(asked)
        return
    results: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        arguments = (asked.rounds, asked.megabytes, asked.bucket_megabytes << 20, layout)
        (seconds, size, memory), (_, _, others) = cpu.run_ranks(
            2, measure, *arguments, timeout_s=900.0
        )
        rates = {side: size / 1e6 / statistics.median(each) for side, each in seconds.items()}
        ratios = {
            side: statistics.median(
                b / a for a, b in zip(seconds[side], seconds["save_file"], strict=True)
            )
            for side in ("export", "without checksums")
        }
        results[name] = {
            "megabytes": size / 1e6,
            "megabytes_per_s": rates,
            "bandwidth_to_save_file": ratios,
            "memory": {"rank 0": memory, "rank 1": others},
        }
        if not asked.json:
            tell({name: results[name]})
    if asked.json:
        tell(results, True)


if __name__ == "__main__":
    main()
