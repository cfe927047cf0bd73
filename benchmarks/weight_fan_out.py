"""Measures a weight sync to 1, 2, 4 and 8 engines, and the controller's processor time in it.

    python -m benchmarks.weight_fan_out [--engines 1 2 4 8] [--rounds 5] [--hidden 512] [--json]

Two embedded ranks have a checkpoint's weights, and the engines are actors of a Ray cluster on this
machine (install the extra `ray`). In the first measurement, the sender of each engine is on rank 0,
as in the trainer. In the second, it is in the controller, which first receives every bucket. Both
senders write files.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks._record import options, tell
from megatron_idempotent.rl.engines.ray import RayEngine
from megatron_idempotent.rl.sync import Exports, RemoteWeights, SyncSettings, WeightSync
from megatron_idempotent.rl.weights import Bucket, TensorInfo
from megatron_idempotent.rl.weights.transports import DiskSender
from megatron_idempotent.rl.workers import EmbeddedRanks, WorkerSpec

RANKS = 2
BUCKET_BYTES = 32 << 20
SIDES = ("from rank 0", "through the controller")


class CheckpointSource:
    """Implements `WeightSource` with a checkpoint's tensors; only rank 0's buckets have tensors."""

    def __init__(self, folder: str) -> None:
        import torch.distributed as dist
        from safetensors.torch import load_file

        self._tensors = load_file(Path(folder) / "model.safetensors")
        self._keeps = dist.get_rank() == 0

    def tensors(self) -> tuple[TensorInfo, ...]:
        """Return the names, shapes and dtypes of the checkpoint's tensors."""
        return tuple(TensorInfo.of(name, tensor) for name, tensor in self._tensors.items())

    def buckets(self, *, bucket_bytes: int) -> Iterator[Bucket]:
        """Yield the tensors in buckets of up to `bucket_bytes`, but at least one tensor each;
        buckets are empty on ranks other than 0.
        """
        parts: list[dict[str, Any]] = [{}]
        for name, tensor in self._tensors.items():
            if (
                parts[-1]
                and sum(t.nbytes for t in parts[-1].values()) + tensor.nbytes > bucket_bytes
            ):
                parts.append({})
            parts[-1][name] = tensor
        for index, part in enumerate(parts):
            yield Bucket.of(index, part if self._keeps else {})


def make(folder: str) -> Exports:
    """Make the worker of a rank, which exports the checkpoint in `folder`."""
    return Exports(CheckpointSource(folder))


def make_engine(folder: str, name: str) -> Any:
    """Make an inference engine in the calling Ray actor, from the checkpoint in `folder`."""
    from megatron_idempotent.rl.engines.transformers import TransformersEngine

    return TransformersEngine(folder, name=name)


def _write_checkpoint(folder: Path, hidden: int) -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1024,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


async def measure(engines: int, rounds: int, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Measure weight updates to `engines` engines, sent from rank 0 and through the controller.
    Return median seconds for both, and two ratios between them: of the controller's CPU time, and
    of total time.
    """
    spec = WorkerSpec(factory="benchmarks.weight_fan_out:make", argument=str(checkpoint))
    ranks = EmbeddedRanks(spec, RANKS, preload=("torch",))
    await ranks.start()
    loop = asyncio.get_running_loop()
    sources = dict(
        zip(
            SIDES,
            (RemoteWeights(ranks, loop, transport=None), RemoteWeights(ranks, loop)),
            strict=True,
        )
    )
    sender = functools.partial(DiskSender, folder)
    side = SIDES[0]
    actors = [
        RayEngine(
            f"engine-{number}",
            functools.partial(make_engine, str(checkpoint), f"engine-{number}"),
            transport=lambda: sources[side].sender(sender) if side == SIDES[0] else sender(),
        )
        for number in range(engines)
    ]
    await asyncio.gather(*(actor.ready() for actor in actors))
    sync = WeightSync(actors, settings=SyncSettings(bucket_bytes=BUCKET_BYTES))
    taken: dict[str, list[Sequence[float]]] = {side: [] for side in SIDES}
    for number in range(len(SIDES) * (rounds + 1)):
        side = SIDES[number % len(SIDES)]
        before = time.process_time()
        report = await sync.update(sources[side], number + 1)
        cpu = time.process_time() - before
        assert len(report.named("committed")) == engines, report
        taken[side].append((report.stage_s, report.pause_s, report.total_s, cpu))
    await asyncio.gather(*(actor.close() for actor in actors), ranks.close())
    names = ("stage_s", "pause_s", "total_s", "controller_cpu_s")
    found = {
        side: dict(zip(names, map(statistics.median, zip(*rows[1:], strict=True)), strict=True))
        for side, rows in taken.items()
    }
    ranks_send, controller_sends = (found[side] for side in SIDES)
    return {
        **found,
        "CPU ÷ through the controller": ranks_send["controller_cpu_s"]
        / controller_sends["controller_cpu_s"],
        "total ÷ through the controller": ranks_send["total_s"] / controller_sends["total_s"],
    }


def main() -> None:
    """Print the seconds of a weight update for each number of engines: sent from rank 0, and
    through the controller.
    """
    parser = options(__doc__)
    parser.add_argument("--engines", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=512)
    asked = parser.parse_args()
    import ray

    ray.init("local", num_cpus=max(asked.engines), include_dashboard=False, log_to_driver=False)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        checkpoint = Path(name, "checkpoint")
        _write_checkpoint(checkpoint, asked.hidden)
        found["mb"] = Path(checkpoint, "model.safetensors").stat().st_size / 1e6
        for engines in asked.engines:
            measured = measure(engines, asked.rounds, checkpoint, Path(name, "sync"))
            found[f"{engines} engines"] = asyncio.run(measured)
    tell(found, asked.json)


if __name__ == "__main__":
    main()
