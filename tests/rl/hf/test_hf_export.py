"""Exports: right after a step, left early, quantized, and what they hold and send."""

from __future__ import annotations

from typing import Any

import hf_checkpoints
import hf_programs
import pytest
import torch
from ranks import on_ranks

from megatron_idempotent.proof.cpu import tiny
from megatron_idempotent.rl.hf import Architecture, Lora, MegatronWeights, load_hf

pytestmark = pytest.mark.full


def trained(root: Any, folder: Any) -> tuple[Architecture, tiny.Tiny]:
    """Runs on a rank: a model in DDP with a checkpoint's weights, to be trained."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from megatron_idempotent import wire_train_config

    arch = Architecture.read(root / folder)
    config = hf_programs.config_of(arch)
    ddp = DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        bucket_size=2000,
    )
    chunks = [
        DistributedDataParallel(config, ddp, chunk) for chunk in hf_programs.chunks_of(arch, config)
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            # So that a step depends on nothing but weights and gradients.
            adam_beta1=0.0,
            adam_beta2=0.0,
            adam_eps=0.01,
            optimizer="adam",
            lr=0.01,
            clip_grad=0.0,
            weight_decay=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
        ),
        chunks,
    )
    wire_train_config(chunks, optimizer)
    load_hf(root / folder, chunks, optimizer=optimizer)
    return arch, tiny.Tiny(
        config=config,
        chunks=chunks,
        optimizer=optimizer,
        sequence=hf_checkpoints.T,
        vocabulary=hf_checkpoints.V,
    )


def right_after_a_step(root: Any, name: str) -> bool:
    """Runs on two data-parallel ranks; returns whether rank 0's parameters lacked some of the
    step."""
    hf_programs.parallel()
    arch, model = trained(root, name)
    chunks = model.chunks
    source = MegatronWeights(chunks, arch)
    stored = hf_programs.stored(root / name)
    first = torch.distributed.get_rank() == 0
    sends: list[int] = []
    watch_messages(sends)
    found = hf_programs.exported(source)
    assert not sends  # rank 0 has all
    if first:
        hf_programs.same(found, stored)
    model.train_step(1, data_seed=1)
    stale = [parameter.clone() for parameter in chunks[0].module.parameters()]
    found = hf_programs.exported(source)
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)
    synced = hf_programs.exported(source)
    now = chunks[0].module.parameters()
    lacked = not all(map(torch.equal, stale, now))
    if first:
        hf_programs.same(found, synced)
        assert any(not torch.equal(found[each], stored[each]) for each in stored)
    # A load right after a step, while its gathers are in flight; then a step from what was loaded.
    model.train_step(1, data_seed=2)
    for chunk in chunks:
        chunk.start_param_sync()
    assert in_flight(chunks)
    load_hf(root / name, chunks, optimizer=model.optimizer)
    assert not in_flight(chunks)  # they could still write what was there before
    found = hf_programs.exported(source)
    if first:
        hf_programs.same(found, stored)
    model.train_step(1, data_seed=3)
    found = hf_programs.exported(source)
    arch, model = trained(root, name)
    model.train_step(1, data_seed=3)
    wanted = hf_programs.exported(MegatronWeights(model.chunks, arch))
    if first:
        hf_programs.same(found, wanted)
    return lacked


def in_flight(chunks: list[Any]) -> bool:
    groups = [group for chunk in chunks for group in chunk.bucket_groups]
    return any(group.param_gather_handle is not None for group in groups)


@pytest.mark.parametrize(
    "name", ["moe-half", pytest.param("qwen2-tied-half", marks=pytest.mark.exhaustive)]
)
def test_an_export_and_a_load_right_after_a_step_see_all_of_it(megatron_ranks, checkpoints, name):
    lacked = megatron_ranks(2, right_after_a_step, checkpoints, name)
    assert lacked[0], "nothing was pending: the test shows nothing"


def watch_messages(seen: list[int]) -> None:
    """Have `seen` get how many messages are sent and received together, from here on."""
    import torch.distributed as dist

    original = dist.batch_isend_irecv

    def watched(messages: list[Any]) -> list[Any]:
        seen.append(len(messages))
        works: list[Any] = original(messages)
        return works

    dist.batch_isend_irecv = watched


@on_ranks(2)
def test_ranks_stay_in_step_whoever_leaves_an_export_early(checkpoints: Any) -> None:
    """Every way to leave, and a whole export after each."""
    from megatron_idempotent.fp8 import Fp8Export

    hf_programs.parallel(tp=2)
    arch, _, chunks = hf_programs.loaded(checkpoints / "llama")
    stored = hf_programs.stored(checkpoints / "llama")
    source = MegatronWeights(chunks, arch)
    first = torch.distributed.get_rank() == 0

    def take_all() -> None:
        for _ in source.buckets(bucket_bytes=4000):
            pass

    def whole() -> None:
        found = hf_programs.exported(source)
        if first:
            hf_programs.same(found, stored)

    def close() -> None:
        with source.buckets(bucket_bytes=4000) as buckets:
            assert next(buckets).tensors
        assert list(buckets) == []
        buckets.close()

    def fail() -> None:
        def consume() -> None:
            with source.buckets(bucket_bytes=4000) as buckets:
                for _ in buckets:
                    raise KeyError("consumer")

        with pytest.raises(KeyError, match="consumer"):
            consume()

    def never_begin() -> None:
        source.buckets(bucket_bytes=4000).close()

    def refuse() -> None:
        with pytest.raises(ValueError, match="bucket_bytes=0; allowed: 1 or more"):
            source.buckets(bucket_bytes=0)

    for leave in (close, fail, never_begin, refuse):
        leave() if first else take_all()
        whole()
    if first:
        take_all()
    else:
        with source.buckets(bucket_bytes=4000) as buckets:
            next(buckets)
    whole()
    # What cannot be quantized is known on rank 0 only, after some of the tensors.
    quantized = MegatronWeights(chunks, arch, fp8=Fp8Export())
    weight = chunks[0].decoder.layers[2].mlp.linear_fc2.weight
    kept = weight.detach().clone()
    weight.data[0, 0] = float("nan")
    if first:
        with pytest.raises(ValueError, match=r"layers\.2\.mlp\.down_proj") as caught:
            list(quantized.buckets(bucket_bytes=4000))
    else:
        assert len(list(quantized.buckets(bucket_bytes=4000))) > 4
    weight.data.copy_(kept)
    whole()  # although the error still holds the stream
    assert not first or caught.value
    found = hf_programs.exported(quantized)
    if first:
        hf_programs.same(found, dict(Fp8Export().weights(iter(stored.items()))))
        config = quantized.quantization_config()
        assert config == Fp8Export().quantization_config(stored.items())
    # A model that is not all there, and one that is another.
    with pytest.raises(
        ValueError, match=r"of model.embed_tokens.weight \[51, 24\] there is 0 to 26"
    ):
        MegatronWeights(chunks if first else [], arch)
    chunks[0].decoder.layers[1].extra = torch.nn.Linear(2, 2) if not first else None
    with pytest.raises(ValueError, match="rank 1: Ch" if first else "1.extra.bias .2. has no cou"):
        MegatronWeights(chunks, arch)


@on_ranks(1)
def test_an_export_that_is_dropped_half_way_warns_and_sends_nothing(checkpoints: Any) -> None:
    """An export that nobody closes, and one that is at its end."""
    import gc
    import warnings

    hf_programs.parallel(tp=1)
    arch, _, chunks = hf_programs.loaded(checkpoints / "llama")
    source = MegatronWeights(chunks, arch)
    said = r"dropped after [1-9]\d* of \d+ tensors, and other ranks"
    with pytest.warns(ResourceWarning, match=said):
        next(source.buckets(bucket_bytes=4000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(source.buckets(bucket_bytes=4000))
        source.buckets(bucket_bytes=4000).close()
        gc.collect()


BUCKET = 6 << 20


def what_it_takes() -> dict[str, int]:
    """Runs on two tensor-parallel ranks with 64 MB; returns most bytes held, messages, sizes in
    bytes."""
    from megatron_idempotent.proof.cpu.probes import peak_bytes

    hf_programs.parallel(tp=2)
    arch = Architecture.of(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_attention_heads": 8,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "vocab_size": 4001,
        }
    )
    chunks = hf_programs.chunks_of(arch, hf_programs.config_of(arch))
    source = MegatronWeights(chunks, arch)
    narrow = MegatronWeights(chunks, arch, dtype=torch.bfloat16)

    def export() -> None:
        for bucket in source.buckets(bucket_bytes=BUCKET):
            del bucket

    def export_at_once() -> None:  # all of which is cast before it is sent
        for bucket in narrow.buckets(bucket_bytes=1 << 30):
            del bucket

    messages: list[int] = []
    watch_messages(messages)
    export()
    count = sum(messages)
    sizes = [info.nbytes for info in source.tensors()]
    return {
        "peak": peak_bytes(export, runs=1),
        "peak, cast": peak_bytes(export_at_once, runs=1),
        "messages": count,
        "largest": max(sizes),
        "total": sum(sizes),
        "shard": max(4 * parameter.numel() for parameter in chunks[0].parameters()),
    }


def test_an_export_holds_a_bucket_and_a_tensor_and_sends_each_shard_once(megatron_ranks):
    first, second = megatron_ranks(2, what_it_takes)
    checksum = 2 << 20  # a few blocks of half a MB
    assert first["total"] > 3 * (BUCKET + first["largest"])
    assert first["peak"] <= BUCKET + first["largest"] + checksum
    assert first["peak, cast"] <= (first["total"] + first["largest"]) // 2 + checksum
    assert second["peak"] <= second["shard"]
    assert second["peak, cast"] <= second["shard"] // 2
    # Of each layer q, k, v with their biases, o, gate, up and down; the embedding and the output.
    assert first["messages"] == second["messages"] == 3 * 10 + 2


def test_parts_have_to_follow_each_other_from_end_to_end():
    from megatron_idempotent.rl.hf.export import TensorPart, _covers

    both = [TensorPart(0, 0, 2, 0), TensorPart(0, 2, 3, 1)]
    assert _covers(both, (5, 4))
    for wrong in (
        [],
        both[:1],
        both[1:],
        [both[0], TensorPart(0, 3, 2, 1)],
        [both[0], TensorPart(0, 1, 3, 1)],
        [*both, TensorPart(0, 2, 3, 1)],
        [both[0], TensorPart(1, 2, 2, 1)],
        [*both, TensorPart(0, 5, 1, 1)],
    ):
        assert not _covers(wrong, (5, 4))


def adapters_alone(root: Any, name: str, layout: dict[str, int], cut: bool) -> None:
    """Runs on a rank: the base with what the export brings is a model with its factors merged in.

    With `cut`, factors that ranks share whole are cut as well, as Megatron-Bridge cuts some.
    """
    import zlib

    from megatron.core import parallel_state

    from megatron_idempotent.megatron.ddp import innermost
    from megatron_idempotent.proof.certify.low_rank import SCALE, Adapted, add

    hf_programs.parallel(**layout)
    arch, _, chunks = hf_programs.loaded(root / name, params_dtype=torch.float32)
    base = hf_programs.exported(MegatronWeights(chunks, arch))
    tp = parallel_state.get_tensor_model_parallel_rank()
    stage = parallel_state.get_pipeline_model_parallel_rank()

    def draw() -> None:
        """Set the factors to small integers, of which all products are exact."""
        for key, factor in (each for chunk in chunks for each in chunk.named_parameters()):
            if ".adapter." in key:
                shard = tp if hasattr(factor, "partition_dim") else 0
                seed = zlib.crc32(f"{stage} {key} {shard}".encode())
                generator = torch.Generator().manual_seed(seed)
                factor.data = torch.randint(-3, 4, factor.shape, generator=generator).float()

    for chunk in chunks:
        add(innermost(chunk), rank=4)
    draw()
    lora = Lora(rank=4)
    source = MegatronWeights(chunks, arch, lora=lora)
    found = hf_programs.exported(source)
    with pytest.raises(ValueError, match=r"linear_in.weight .* has no counterpart"):
        MegatronWeights(chunks, arch)
    with pytest.raises(ValueError, match=r"linear_in.weight is|there is"):
        MegatronWeights(chunks, arch, lora=Lora(rank=6))
    if cut and layout.get("tp", 1) > 1:
        for chunk in chunks:
            for key, factor in chunk.named_parameters():
                if ".adapter." in key and not hasattr(factor, "partition_dim"):
                    factor.data = factor.data.chunk(layout["tp"])[tp].clone()
        again = hf_programs.exported(MegatronWeights(chunks, arch, lora=lora))
        if not torch.distributed.get_rank():
            hf_programs.same(again, found)
        return
    hf_programs.deltas_follow(chunks, arch, torch.bfloat16, lora=lora)
    draw()
    found = hf_programs.exported(source)
    for chunk in chunks:
        model = innermost(chunk)
        for key, layer in list(model.named_modules()):
            if isinstance(layer, Adapted):
                parent, _, own = key.rpartition(".")
                factors = layer.adapter.linear_out.weight, layer.adapter.linear_in.weight
                layer.to_wrap.weight.data.copy_(SCALE * factors[0] @ factors[1])
                setattr(model.get_submodule(parent), own, layer.to_wrap)
    merged = hf_programs.exported(MegatronWeights(chunks, arch))
    for key in base:
        at = f"base_model.model.{key.removesuffix('weight')}lora_"
        if f"{at}A.weight" in found:
            product = SCALE * found[f"{at}B.weight"] @ found[f"{at}A.weight"]
            assert torch.equal(merged[key], product), key
    assert not base or len(found) == 2 * sum("_proj.weight" in key for key in base)


@pytest.mark.parametrize(
    ("layout", "cut"),
    [
        ({"tp": 2}, False),
        pytest.param({"tp": 2}, True, marks=pytest.mark.exhaustive),
        pytest.param({"pp": 2}, False, marks=pytest.mark.exhaustive),
    ],
)
def test_adapters_come_alone_by_pefts_names(megatron_ranks, checkpoints, layout, cut):
    megatron_ranks(2, adapters_alone, checkpoints, "qwen2", layout, cut)
