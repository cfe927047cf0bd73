"""A trainer, engines and a bucket in memory: what they have is compared by bits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch

from megatron_idempotent.rl.engines import EngineError, EngineHealth, PauseMode
from megatron_idempotent.rl.engines.transformers_weights import ServedWeights, WeightVersions
from megatron_idempotent.rl.sync import BucketFollower, BucketPublisher, SyncSettings, WeightSync
from megatron_idempotent.rl.weights import Bucket, WeightUpdate
from megatron_idempotent.rl.weights.chains import Index, Manifest
from megatron_idempotent.rl.weights.transports.bucket import Objects

QUICK = SyncSettings(bucket_bytes=1500, attempts=2, retry_wait_s=0.001)
SHAPES = {
    "embed": ((16, 24), torch.bfloat16),
    "norm": ((24,), torch.float32),
    "up": ((24, 16), torch.float16),
    "scales": ((3,), torch.float32),
    "fp8": ((16, 16), torch.float8_e5m2),
    "router": ((5, 5), torch.bfloat16),
}


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: raw(tensor).numpy().tobytes() for name, tensor in tensors.items()}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Trainer:
    """Has weights, changes bits of them, and publishes; `bits_of` has each version that it sent."""

    def __init__(self, place: str, *, seed: int = 0, **publisher: Any) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            name: torch.randn(shape, generator=self.generator).to(dtype)
            for name, (shape, dtype) in SHAPES.items()
        }
        self.bits_of: dict[int, dict[str, bytes]] = {}
        self.version = 0
        self.fails_at: int | None = None
        self._given = {"run": "run", "anchor_every": 4, **publisher}
        self._place = place
        self.start_again()

    @classmethod
    async def followed(
        cls, place: str, steps: int
    ) -> tuple[Trainer, WeightsEngine, BucketFollower]:
        """Return one that has published steps, and an engine that has them, with its follower."""
        trainer, engine = cls(place), WeightsEngine()
        await trainer.steps(steps)
        following = follower(place, engine)
        await following.catch_up()
        return trainer, engine, following

    def start_again(self) -> None:
        """Forget everything but the weights, as a new process does."""
        self.publisher = BucketPublisher(self._place, **self._given)
        self.sync = WeightSync([self.publisher], settings=QUICK)

    def step(self, share: float = 0.02) -> None:
        """Change a share of all bytes."""
        for tensor in self.tensors.values():
            flat = raw(tensor)
            changed = torch.rand(len(flat), generator=self.generator) < share
            flat[changed] ^= 1

    async def publish(self, *, deltas: bool = True) -> Any:
        self.version += 1
        self.bits_of[self.version] = bits(self.tensors)
        return await self.sync.update(self, self.version, deltas=deltas)

    async def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()
            await self.publish()

    def buckets(self, *, bucket_bytes: int) -> Iterator[Bucket]:
        names = list(SHAPES)
        for index, pair in enumerate(zip(names[::2], names[1::2], strict=True)):
            if index == self.fails_at:
                self.fails_at = None
                raise OSError("the other rank is gone")
            yield Bucket.of(index, {name: self.tensors[name].clone() for name in pair})


class Model:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._saved = {
            name: torch.nn.Parameter(torch.zeros(shape).to(dtype), requires_grad=False)
            for name, (shape, dtype) in SHAPES.items()
        }

    def state_dict(self, *, keep_vars: bool) -> dict[str, torch.Tensor]:
        return dict(self._saved)


class WeightsEngine:
    """An engine of weights alone, which keeps the rules by the parts that all of ours have."""

    def __init__(self, name: str = "engine") -> None:
        self.name = name
        self.model = Model()
        self.versions = WeightVersions(ServedWeights(self.model), name=name, version=0)
        self.paused = False
        self.pauses = 0

    @property
    def bits(self) -> dict[str, bytes]:
        return bits(self.model.state_dict(keep_vars=True))

    async def pause(self, mode: PauseMode = "keep") -> None:
        self.paused = True
        self.pauses += 1

    async def resume(self) -> None:
        self.paused = False

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        await self.versions.stage(update, buckets)

    async def commit(self, update_id: str) -> int:
        if (done := self.versions.committed(update_id)) is not None:
            return done
        if not self.paused:
            raise EngineError(f"{self.name} is not paused")
        return self.versions.commit(update_id)

    async def rollback(self, update_id: str) -> None:
        await self.versions.rollback(update_id)

    async def health(self) -> EngineHealth:
        if self.versions.trouble:
            return EngineHealth(status="DIRTY", version=None, detail=self.versions.trouble)
        status = "PAUSED" if self.paused else "SERVING"
        return EngineHealth(status=status, version=self.versions.version)


def follower(place: str, *engines: WeightsEngine, **more: Any) -> BucketFollower:
    return BucketFollower(place, engines, settings=QUICK, **more)


def index_of(objects: Objects) -> Index:
    found = Index.read(objects)
    assert found is not None
    return found


def unneeded(objects: Objects) -> set[str]:
    """The keys that no listed update needs."""
    index = index_of(objects)
    needed = (Manifest(objects, index.run, each).keys for each in index.updates)
    return (objects.keys("objects") | objects.keys("manifests")).difference(*needed)
