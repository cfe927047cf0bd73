"""Programs that hit no hazard: with all patches the same bits and the same collectives as stock."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import pytest
from ranks import tiered

import megatron_idempotent
from megatron_idempotent.patching import OPEN, releases
from megatron_idempotent.patching.source import locate
from megatron_idempotent.proof.cpu import program, tiny

WINDOWS = 3


@dataclass(frozen=True)
class Layout:
    """A bench and how many microbatches its windows have."""

    name: str
    ranks: int
    options: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 4

    def __str__(self) -> str:
        return self.name


OFF = {"overlap_grad_reduce": False}
GATHER = {"overlap_param_gather": True}
ALL_REDUCE = {"distributed_optimizer": False}
LAYER_WISE = GATHER | {"dtype": "bf16", "layer_wise": True}
INSTALLED = releases.installed("megatron-core")
assert INSTALLED is not None, "the tests need a Megatron"
LAYOUTS = [
    Layout("plain", 2, OFF | ALL_REDUCE),
    Layout("overlap", 2, ALL_REDUCE),
    Layout("distributed-optimizer", 2, OFF),
    Layout("distributed-optimizer-overlap", 2, GATHER),
    Layout("fp16", 2, GATHER | {"dtype": "fp16", "loss_scale": 1024.0}),
    Layout("pp2-dp2", 4, GATHER | {"pp": 2}),
    Layout("interleaved", 2, GATHER | {"pp": 2, "vpp": 2, "layers_per_stage": 1, "align": True}),
    Layout(
        "gather-in-the-step",
        4,
        GATHER
        | {"pp": 2, "vpp": 2, "layers_per_stage": 1}
        | {"optimizer_overrides": {"overlap_param_gather_with_optimizer_step": True}},
    ),
    Layout("moe-ep2", 2, GATHER | {"ep": 2, "experts": 4}),
    Layout("tp2-sp", 2, GATHER | {"tp": 2, "sequence_parallel": True}),
    *(
        Layout(name, 2, LAYER_WISE | options)
        for name, options, since in (
            ("layer-wise", {}, "0.18"),
            ("layer-wise-no-gather-overlap", {"overlap_param_gather": False}, "0.18"),
            ("layer-wise-lists", ALL_REDUCE, "0.17"),
        )
        if releases.supported(INSTALLED, since, OPEN)
    ),
]


def recorded(seen: list[str]) -> contextlib.AbstractContextManager[None]:
    """Let every collective append its name, its tensors' sizes and its ranks to `seen`."""
    import torch

    from megatron_idempotent.proof.cpu.probes import watching_collectives

    def see(name: str, leaves: list[Any]) -> None:
        tensors = [(tuple(t.shape), str(t.dtype)) for t in leaves if isinstance(t, torch.Tensor)]
        seen.append(f"{name} {tensors} {[each for each in leaves if isinstance(each, int)]}")

    return watching_collectives(see)


def windows(layout: Layout, applied: bool) -> tuple[list[str], list[Any]]:
    """Runs on a rank: collectives of a few windows and steps, and losses, gradients, parameters."""
    if applied:
        megatron_idempotent.apply(strict=True)
    bench = tiny.build(**layout.options)
    seen: list[str] = []
    bits: list[Any] = []
    with recorded(seen):
        for window in range(WINDOWS):
            seen.append(f"window {window}")
            bits.append(bench.forward_backward(layout.microbatches, data_seed=window))
            # After a step a gather may be in flight, and how much of it has arrived is chance.
            bits += [bench.gradients().numpy().tobytes(), bench.bits()]
            seen.append("step")
            bits.append(tuple(map(str, bench.step())))
        bits.append(bench.forward_backward(layout.microbatches, data_seed=9, forward_only=True))
        bits.append(bench.bits())
    return seen, bits


#: The others differ from these in what they leave out; all of them on every release.
ALWAYS = ("overlap", "fp16", "pp2-dp2", "moe-ep2", "tp2-sp")


@pytest.mark.parametrize(
    "layout", tiered(LAYOUTS, [each for each in LAYOUTS if each.name in ALWAYS], "full"), ids=str
)
def test_windows_and_steps_are_stocks_to_the_bit_and_to_the_collective(layout, megatron_ranks):
    stock = megatron_ranks(layout.ranks, windows, layout, False, timeout_s=120)
    patched = megatron_ranks(layout.ranks, windows, layout, True, timeout_s=120)
    for (calls, bits), (patched_calls, patched_bits) in zip(stock, patched, strict=True):
        assert patched_calls == calls
        assert patched_bits == bits
        assert len(calls) > 2 * WINDOWS, "nothing was recorded"


def train(options: tuple[str, ...], applied: bool) -> tuple[list[str], list[float], bytes]:
    """Runs on a rank: one call of stock `train` over three iterations."""
    if applied:
        megatron_idempotent.apply(strict=True)
    running = program.start(options)
    seen: list[str] = []
    with recorded(seen):
        running.train(3)
    return seen, running.losses, running.parameters().numpy().tobytes()


@pytest.mark.skipif(
    locate("megatron.training.training") is None,
    reason="this release's wheel does not carry megatron.training",
)
@pytest.mark.parametrize("options", [(), ("--overlap-grad-reduce", "--overlap-param-gather")])
def test_train_is_stocks_to_the_bit_and_to_the_collective(options, megatron_ranks):
    stock = megatron_ranks(2, train, options, False, timeout_s=120)
    patched = megatron_ranks(2, train, options, True, timeout_s=120)
    assert [rank[0] for rank in patched] == [rank[0] for rank in stock]
    assert patched == stock
    assert any("reduce" in call for call in stock[0][0])
