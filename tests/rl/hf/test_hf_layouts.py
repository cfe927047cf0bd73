"""Checkpoints through Megatron and back, in every layout: same logits, and the same bits."""

from __future__ import annotations

from typing import Any

import hf_checkpoints
import hf_programs
import pytest
import torch
from ranks import on_ranks

from megatron_idempotent.rl.hf import MegatronWeights

#: Some releases want sequence parallelism for it, whose tokens gloo gathers with this
#: dispatcher only: those of the other are not as many on all ranks.
SHARED_EXPERTS = {"sequence_parallel": True, "moe_token_dispatcher_type": "allgather"}
Layouts = dict[int, list[tuple[dict[str, Any], tuple[str, ...]]]]
#: Ranks → layouts, and the checkpoints that each is tried with.
LAYOUTS: Layouts = {
    1: [({}, tuple(hf_checkpoints.CASES))],
    2: [
        ({"tp": 2}, ("qwen2-tied", "moe")),
        ({"tp": 2, "sequence_parallel": True}, ("moe-tied",)),
        ({"pp": 2}, ("qwen3-tied",)),
        ({"pp": 2, "vpp": 2}, ("llama3-tied",)),
        ({"ep": 2}, ("moe",)),
        ({"cp": 2}, ("qwen3-tied",)),
    ],
    4: [
        ({"tp": 2, "pp": 2}, ("moe",)),
        ({"tp": 2, "ep": 2, **SHARED_EXPERTS}, ("moe-tied",)),
        ({"tp": 2, "cp": 2}, ("qwen3",)),
        ({"tp": 4}, ("qwen2",)),
    ],
}
#: The same of others, in which nothing is that the ones above do not have in another layout.
MORE: Layouts = {
    2: [
        ({"tp": 2}, ("llama", "qwen3")),
        ({"tp": 2, "sequence_parallel": True}, ("qwen3",)),
        ({"pp": 2}, ("qwen2", "moe-tied")),
        ({"pp": 2, "vpp": 2}, ("qwen3", "moe")),
        ({"ep": 2}, ("moe-tied",)),
    ],
    4: [({"tp": 2, "pp": 2}, ("qwen2-tied",)), ({"tp": 4}, ("qwen3-tied",))],
}


def through_megatron(root: Any, layout: dict[str, Any], names: tuple[str, ...]) -> None:
    """Runs on a rank: logits and an export of each; in float64, and on one rank in float32 too."""
    sizes = {key: layout[key] for key in layout if key in ("tp", "pp", "vpp", "ep", "cp")}
    hf_programs.parallel(**sizes)
    more = {key: layout[key] for key in layout if key not in sizes}
    types = [(torch.float64, "64")] + ([] if sizes else [(torch.float32, "")])
    for name in names:
        wanted = hf_programs.stored(root / name)
        for dtype, suffix in types:
            torch.set_default_dtype(dtype)  # of norms
            arch, config, chunks = hf_programs.loaded(root / name, params_dtype=dtype, **more)
            # A rank of several for one sequence has a part of the logits.
            logits = None if "cp" in sizes else hf_programs.logits_of(chunks, config)
            if logits is not None:
                reference = torch.load(root / name / f"logits{suffix}.bin")
                hf_programs.close(logits, reference, name, dtype)
            found = hf_programs.exported(MegatronWeights(chunks, arch, dtype=torch.float32))
            if torch.distributed.get_rank() == 0:
                hf_programs.same(found, wanted)
            if suffix and (sizes or name.endswith("tied")):
                hf_programs.deltas_follow(chunks, arch, torch.bfloat16)
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        *(
            pytest.param(
                *(ranks, LAYOUTS[ranks]),
                id=f"{ranks}",
                marks=[] if ranks == 2 else pytest.mark.full,
            )
            for ranks in LAYOUTS
        ),
        *(
            pytest.param(ranks, MORE[ranks], id=f"{ranks}-more", marks=pytest.mark.exhaustive)
            for ranks in MORE
        ),
    ],
)
@on_ranks("ranks", timeout_s=180.0)
def test_logits_are_those_of_transformers_and_weights_come_back_as_they_were(
    checkpoints: Any, layouts: list[tuple[dict[str, Any], tuple[str, ...]]]
) -> None:
    """One launch for all that have so many."""
    for layout, names in layouts:
        try:
            through_megatron(checkpoints, layout, names)
        except ValueError as error:
            # Before 0.16 there are no more tensor-parallel ranks than heads of keys.
            if not str(error).startswith("num_query_groups (2) must be a multiple of"):
                raise


@pytest.mark.full
@on_ranks(4)
def test_ranks_that_have_tensors_send_them_side_by_side(checkpoints: Any) -> None:
    """Stages and expert-parallel ranks send what they have, with the bits of rank 0 alone."""
    import torch.distributed as dist

    from megatron_idempotent.fp8 import Fp8Export
    from megatron_idempotent.rl.weights.records import DELTA

    layouts: list[tuple[dict[str, int], str, list[int]]] = [
        ({"tp": 2, "pp": 2}, "moe", [0, 2]),
        ({"ep": 2}, "moe-tied", [0, 1]),
        ({"pp": 2, "ep": 2}, "moe", [0, 1, 2, 3]),
    ]
    for layout, name, owners in layouts:
        hf_programs.parallel(**layout)
        arch, _, chunks = hf_programs.loaded(checkpoints / name)
        stored = hf_programs.stored(checkpoints / name)
        for senders in (1, 2, None):
            source = MegatronWeights(chunks, arch, senders=senders)
            by_rank = hf_programs.sent_by_rank(source)
            sending = [rank for rank, parts in enumerate(by_rank) if any(parts)]
            assert sending == owners[:: len(owners) // (senders or len(owners))]
            assert source.keeps == (dist.get_rank() in sending)
            hf_programs.same(hf_programs.merged(by_rank), stored)
            first = by_rank[sending[-1]][0]
            assert first, "all send from the first bucket on"
        settings = {"dtype": torch.bfloat16, "fp8": Fp8Export()}
        alone = hf_programs.sent_by_rank(MegatronWeights(chunks, arch, **settings))
        several = hf_programs.sent_by_rank(MegatronWeights(chunks, arch, senders=None, **settings))
        hf_programs.same(hf_programs.merged(several), hf_programs.merged(alone))
        assert [rank for rank, parts in enumerate(several) if any(parts)] == owners
        source = MegatronWeights(chunks, arch, deltas=True, senders=None)
        alone = MegatronWeights(chunks, arch, deltas=True)
        for one in (source, alone):
            hf_programs.sent_by_rank(one, whole=dist.get_rank() > 0)  # nothing was sent yet
        with torch.no_grad():
            for parameter in (each for chunk in chunks for each in chunk.parameters()):
                parameter.copy_(torch.where(parameter > 0.01, parameter * 1.25, parameter))
        changes = hf_programs.sent_by_rank(source, whole=False)
        hf_programs.same(
            hf_programs.merged(changes),
            hf_programs.merged(hf_programs.sent_by_rank(alone, whole=False)),
        )
        assert [rank for rank, parts in enumerate(changes) if any(parts)] == owners
        assert all(tensor.endswith(DELTA) for tensor in hf_programs.merged(changes))
    with pytest.raises(ValueError, match="senders=0"):
        MegatronWeights(chunks, arch, senders=0)


@on_ranks(4)
def test_each_replica_can_export_to_a_rank_of_its_own(checkpoints: Any) -> None:
    """Each of two replicas brings its weights to a rank of its own."""
    import torch.distributed as dist

    hf_programs.parallel(tp=2)
    arch, _, chunks = hf_programs.loaded(checkpoints / "qwen3")
    replica, within = divmod(dist.get_rank(), 2)
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.add_(float(replica))
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    source = MegatronWeights(chunks, arch, group=groups[replica])
    found = {}
    for bucket in source.buckets(bucket_bytes=4000):
        found |= bucket.tensors
    if within:
        assert not found
        return
    stored = hf_programs.stored(checkpoints / "qwen3")
    hf_programs.same(found, {name: tensor + float(replica) for name, tensor in stored.items()})
