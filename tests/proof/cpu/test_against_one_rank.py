"""Every layout's losses and gradients are those of one rank, in float64.

docs/cpu-runtime.md says what runs; this is what it rests on.
"""

import itertools
import math
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

WORLD, EXPERTS, LAYERS, MICROBATCHES = 4, 4, 4, 4
# Upstream computes the softmax over the vocabulary in float32, and so its logarithm: as many terms
# as there are words, and a few roundings more. Of experts there are fewer; all else is float64.
TOLERANCE = (128 + 32) * 2.0**-24

SHARDED = {"tp": 2, "sequence_parallel": True}
# Of packed sequences; each is cut into 2 * 4 pieces at most.
PACKS = {"lengths": [8, 24, 16]}
ROTARY = {"model_overrides": {"position_embedding_type": "rope"}}
EXPERT_PARALLEL = {"experts": EXPERTS, "ep": 2}
#: Those that have all kinds of ranks between them; the rest each week.
USUAL = ("dp", "tp-sp-vpp", "tp-sp-ep", "cp-tp-sp-packs", "cp-ep")


def gradients(dispatcher="alltoall", adapted=None, **layout):
    """(losses of this rank's last stage, {name in the whole model: (dimension, part, of, grad)}).

    Weights depend on their place in the whole model and on nothing else. With `adapted`, arguments
    of `lora.Lora`, only adapters are trained.
    """
    import torch
    from megatron.core import parallel_state as ps

    from megatron_idempotent.proof.certify.parameters import parts
    from megatron_idempotent.proof.cpu import tiny

    torch.set_default_dtype(torch.float64)  # the norms' too
    if adapted is not None:
        sys.path.insert(0, str(Path(__file__).parents[2] / "step"))
        from lora import Lora

        layout["before_ddp"] = Lora(**adapted)
    config = {"params_dtype": torch.float64, "pipeline_dtype": torch.float64}
    if "experts" in layout:
        config["moe_token_dispatcher_type"] = dispatcher
    stages = layout.get("pp", 1) * (layout.get("vpp") or 1)
    bench = tiny.build(
        with_optimizer=False,
        distributed_optimizer=False,
        layers_per_stage=LAYERS // stages,
        config_overrides=config,
        ddp_overrides={"grad_reduce_in_fp32": False},
        **layout,
    )
    sizes = {
        "tp": ps.get_tensor_model_parallel_world_size(),
        "ep": ps.get_expert_model_parallel_world_size(),
        "etp": ps.get_expert_tensor_parallel_world_size(),
    }
    names = SimpleNamespace(sizes=sizes, experts="experts" in layout, flags=())
    found = [part for chunk in bench.chunks for part in parts(chunk, names)]
    for part in found:
        shape = list(part.value.shape)
        if part.dimension is not None:
            shape[part.dimension] *= part.size
        generator = torch.Generator().manual_seed(zlib.crc32(part.name.encode()))
        weight = torch.randn(shape, generator=generator) * 0.1
        with torch.no_grad():
            part.value.copy_(_part(weight, part.dimension, part.rank, part.size))
    share = ps.get_data_parallel_world_size()
    losses = bench.forward_backward(MICROBATCHES // share, data_seed=0)
    return (ps.get_data_parallel_rank(), share, losses), {
        part.name: (part.dimension, part.rank, part.size, part.value.main_grad.clone())
        for part in found
        if part.value.requires_grad
    }


def _part(tensor, dimension, rank, size):
    return tensor if dimension is None else tensor.chunk(size, dimension)[rank]


@pytest.fixture(scope="module")
def one_rank(megatron_rank_pool):
    """Return (losses, gradients by name) of one rank, by whether there are experts, adapters
    and what else changes what is computed."""
    known = {}

    def compute(experts, adapted=None, **others):
        key = experts, repr(adapted), repr(others)
        if key not in known:
            layout = others | ({"experts": EXPERTS} if experts else {})
            [((_, _, losses), found)] = megatron_rank_pool.run(
                1, gradients, adapted=adapted, **layout
            )
            known[key] = losses, {name: value[-1] for name, value in found.items()}
        return known[key]

    return compute


def assert_as_one_rank(ranks, one_rank, layout, adapted=None):
    same = {name: layout[name] for name in ("lengths", "model_overrides") if name in layout}
    losses, whole = one_rank("experts" in layout, adapted, **same)
    seen = set()
    for (index, share, own_losses), found in ranks:
        if own_losses:  # the last stage
            assert own_losses == pytest.approx(losses[index::share], abs=TOLERANCE)
        for name, (dimension, rank, size, gradient) in found.items():
            error = (gradient - _part(whole[name], dimension, rank, size)).abs().max()
            assert float(error / whole[name].abs().max()) <= TOLERANCE, name
            seen.add(name)
    assert seen == set(whole)


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(world, layout, id=name, marks=() if name in USUAL else pytest.mark.exhaustive)
        for name, world, layout in (
            ("dp", 2, {}),
            ("tp", 2, {"tp": 2}),
            ("tp-sp-vpp", 4, SHARDED | {"pp": 2, "vpp": 2}),
            ("tp-sp-ep-etp", 4, SHARDED | EXPERT_PARALLEL),
            ("tp-sp-ep", 4, SHARDED | EXPERT_PARALLEL | {"etp": 1, "dispatcher": "allgather"}),
            ("cp-packs-rope", 2, {"cp": 2} | PACKS | ROTARY),
            ("cp4-rope", 4, {"cp": 4} | ROTARY),
            ("cp-tp-sp-packs", 4, {"cp": 2} | SHARDED | PACKS),
            ("cp-vpp-packs-rope", 4, {"cp": 2, "pp": 2, "vpp": 2} | PACKS | ROTARY),
            ("cp-ep", 4, {"cp": 2} | EXPERT_PARALLEL),
        )
    ],
)
def test_a_layout_computes_what_one_rank_does(megatron_ranks, one_rank, world, layout):
    ranks = megatron_ranks(world, gradients, **layout)
    assert_as_one_rank(ranks, one_rank, layout)


@pytest.mark.parametrize(
    ("world", "layout", "adapted"),
    [
        pytest.param(2, {"tp": 2}, {}, marks=pytest.mark.exhaustive),
        (2, SHARDED, {}),
        (2, {"pp": 2}, {"layers": (3, 4)}),
        pytest.param(4, SHARDED | {"pp": 2, "vpp": 2}, {}, marks=pytest.mark.exhaustive),
        pytest.param(4, SHARDED | EXPERT_PARALLEL | {"etp": 1}, {}, marks=pytest.mark.exhaustive),
        pytest.param(2, EXPERT_PARALLEL, {"layers": (2,)}, marks=pytest.mark.exhaustive),
    ],
    ids=["tp", "tp-sp", "pp", "tp-sp-vpp", "tp-sp-ep", "ep"],
)
def test_adapters_get_the_gradients_of_one_rank(megatron_ranks, one_rank, world, layout, adapted):
    ranks = megatron_ranks(world, gradients, adapted=adapted, **layout)
    assert_as_one_rank(ranks, one_rank, layout, adapted)


def every_layout():
    """All that upstream allows on four ranks."""
    sizes = [1, 2, 4]
    for tp, pp, vpp, cp in itertools.product(sizes, sizes, [None, 2], sizes):
        if tp * pp * cp > WORLD or (vpp and pp == 1) or pp * (vpp or 1) > LAYERS:
            continue
        dense = {"tp": tp, "pp": pp, "vpp": vpp, "cp": cp}
        yield dense
        if tp > 1:
            yield dense | {"sequence_parallel": True}
        for ep, etp, dispatcher in itertools.product(sizes, sizes, ["alltoall", "allgather"]):
            if math.prod((ep, etp, pp)) <= WORLD:
                moe = {"experts": EXPERTS, "ep": ep, "etp": etp, "dispatcher": dispatcher}
                yield dense | moe | {"sequence_parallel": tp > 1}


def test_packed_sequences_compute_what_they_do_as_rows(megatron_ranks, one_rank):
    pack = {"lengths": [32, 32]}  # the tokens of two rows
    ranks = megatron_ranks(2, gradients, cp=2, **pack, **ROTARY)
    assert_as_one_rank(ranks, one_rank, ROTARY)


@pytest.mark.exhaustive
def test_every_layout_of_four_ranks_computes_what_one_rank_does(megatron_ranks, one_rank):
    layouts = list(every_layout())
    assert len(layouts) == 128
    packed = [layout | PACKS | ROTARY for layout in layouts if layout["cp"] > 1]
    for layout in layouts + packed:
        ranks = megatron_ranks(WORLD, gradients, **layout)
        try:
            assert_as_one_rank(ranks, one_rank, layout)
        except AssertionError as error:
            raise AssertionError(f"{layout}: {error}") from None
