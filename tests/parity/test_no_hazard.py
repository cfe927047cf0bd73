"""Programs that hit no hazard: with all patches the same bits and the same collectives as stock."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from megatron_idempotent.patching import OPEN, decide
from megatron_idempotent.patching.source import locate

COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "barrier"),
    *("all_gather", "all_gather_into_tensor", "_all_gather_base", "gather"),
    *("reduce_scatter", "reduce_scatter_tensor", "_reduce_scatter_base", "scatter"),
    *("all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv", "batch_isend_irecv"),
    *("all_gather_object", "broadcast_object_list", "monitored_barrier"),
)
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
INSTALLED = decide.installed("megatron-core")
assert INSTALLED is not None, "the tests need a Megatron"
LAYOUTS = [
    Layout("plain", 2, OFF | ALL_REDUCE),
    Layout("overlap", 2, ALL_REDUCE),
    Layout("distributed-optimizer", 2, OFF),
    Layout("distributed-optimizer-overlap", 2, GATHER),
    Layout("fp16", 2, GATHER | {"dtype": "fp16", "loss_scale": 1024.0}),
    Layout("pp2-dp2", 4, GATHER | {"pp": 2}),
    Layout("interleaved", 2, GATHER | {"pp": 2, "vpp": 2, "layers_per_stage": 1, "align": True}),
    Layout("moe-ep2", 2, GATHER | {"ep": 2, "experts": 4}),
    Layout("tp2-sp", 2, GATHER | {"tp": 2, "sequence_parallel": True}),
    *(
        Layout(name, 2, LAYER_WISE | options)
        for name, options, since in (
            ("layer-wise", {}, "0.18"),
            ("layer-wise-no-gather-overlap", {"overlap_param_gather": False}, "0.18"),
            ("layer-wise-lists", ALL_REDUCE, "0.17"),
        )
        if decide.supported(INSTALLED, since, OPEN)
    ),
]


def recorded(seen: list[str]) -> None:
    """Let every call of a collective append its name and its tensors' sizes to `seen`."""
    import torch

    depth = 0

    def record(name: str, original: Any) -> Any:
        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if depth == 0:  # not what one collective calls to do its work
                seen.append(f"{name} {_sizes([*args, *kwargs.values()])}")
            depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                depth -= 1

        return collective

    found = {name: getattr(torch.distributed, name, None) for name in COLLECTIVES}
    ours = {id(original): record(name, original) for name, original in found.items() if original}
    # Megatron binds some of them by names of its own when it is imported.
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(("megatron", "torch.distributed")):
            for bound, value in list(vars(module).items()):
                if id(value) in ours:
                    setattr(module, bound, ours[id(value)])


def _sizes(values: list[Any]) -> list[Any]:
    import torch

    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append((tuple(value.shape), str(value.dtype)))
        elif isinstance(value, torch.distributed.P2POp):
            found.append((value.op.__name__, tuple(value.tensor.shape), value.peer))
        elif isinstance(value, (list, tuple)):
            found.append(_sizes(list(value)))
    return found


def windows(layout: Layout, applied: bool) -> tuple[list[str], list[Any]]:
    """Runs on a rank: collectives of a few windows and steps, and losses, gradients, parameters."""
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    if applied:
        megatron_idempotent.apply(strict=True)
    bench = tiny.build(**layout.options)
    seen: list[str] = []
    recorded(seen)
    bits: list[Any] = []
    for window in range(WINDOWS):
        seen.append(f"window {window}")
        bits.append(bench.forward_backward(layout.microbatches, data_seed=window))
        bits.append(bench.gradients().numpy().tobytes())
        seen.append("step")
        bits.append(tuple(map(str, bench.step())))
        bits.append(bench.parameters().numpy().tobytes())
    bits.append(bench.forward_backward(layout.microbatches, data_seed=9, forward_only=True))
    return seen, bits


#: The others differ from these in what they leave out; all of them on every release.
ALWAYS = ("overlap", "fp16", "pp2-dp2", "moe-ep2", "tp2-sp")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(each, marks=() if str(each) in ALWAYS else pytest.mark.matrix)
        for each in LAYOUTS
    ],
    ids=str,
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
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import program

    if applied:
        megatron_idempotent.apply(strict=True)
    running = program.start(options)
    seen: list[str] = []
    recorded(seen)
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
    assert any("all_reduce" in call or "reduce_scatter" in call for call in stock[0][0])
