"""Names the layouts that are certified: how ranks share the model, and in which precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Describes one model on some ranks.

    Example: `Layout(name="dp2", summary="two replicas", ranks=2)`.
    """

    name: str
    summary: str
    ranks: int
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of `cpu.tiny.build`."""
    double: bool = True
    """True for float64, with SGD; else float32, with Adam."""

    @property
    def stages(self) -> int:
        """The number of pipeline stages, virtual ones included."""
        return self._size("pp") * self._size("vpp")

    @property
    def replicas(self) -> int:
        """The number of data-parallel ranks."""
        return self.ranks // (self._size("tp") * self._size("pp"))

    def _size(self, name: str) -> int:
        return int(self.options.get(name, 1))


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        each.name: each
        for each in (
            Layout(name="dp2", summary="two replicas, overlapped reductions", ranks=2),
            Layout(
                name="dp2-distopt",
                summary="two replicas, distributed optimizer, both overlaps, float32",
                ranks=2,
                options={"distributed_optimizer": True, "overlap_param_gather": True},
                double=False,
            ),
            Layout(
                name="tp2",
                summary="tensor and sequence parallel",
                ranks=2,
                options={"tp": 2, "sequence_parallel": True},
            ),
            Layout(name="pp2", summary="two stages", ranks=2, options={"pp": 2}),
            Layout(
                name="vpp2",
                summary="two interleaved stages",
                ranks=2,
                options={"pp": 2, "vpp": 2},
            ),
            Layout(
                name="dp2-pp2",
                summary="two replicas of two stages",
                ranks=4,
                options={"pp": 2},
            ),
        )
    }
)
"""The layouts by name. All have one GPT of four layers, in float64 but for `dp2-distopt`, because
Megatron's distributed optimizer takes no float64."""

LAYERS = 4
