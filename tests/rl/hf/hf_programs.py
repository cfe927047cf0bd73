"""Programs that the tests here run on a rank. Legend: B batch, T positions, V vocabulary."""

from __future__ import annotations

from typing import Any

import hf_checkpoints
import torch
import torch.distributed as dist
from ranks import patch

from megatron_idempotent.proof.cpu import tiny
from megatron_idempotent.rl.engines.vllm_inbox import Patched
from megatron_idempotent.rl.hf import Architecture, MegatronWeights, build_gpt, load_hf
from megatron_idempotent.rl.weights import Staging, WeightUpdate


def parallel(*, tp: int = 1, pp: int = 1, vpp: int | None = None, ep: int = 1, cp: int = 1) -> None:
    """Model parallelism of this layout, in place of the one that is up."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    patch()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        context_parallel_size=cp,
    )
    model_parallel_cuda_manual_seed(3)


def config_of(arch: Architecture, **overrides: Any) -> Any:
    """Return the configuration of the layout that is up."""
    from megatron.core import parallel_state as state

    vpp = state.get_virtual_pipeline_model_parallel_world_size()
    return arch.transformer_config(
        tensor_model_parallel_size=state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=state.get_expert_model_parallel_world_size(),
        use_cpu_initialization=True,
        overlap_p2p_comm=vpp is not None,
        batch_p2p_comm=vpp is None,
        **overrides,
    )


def chunks_of(arch: Architecture, config: Any) -> list[Any]:
    """This rank's stages, in Float16Module where their weights are half precision."""
    from megatron.core import parallel_state as state
    from megatron.core.transformer.module import Float16Module

    from megatron_idempotent.megatron.layer_specs import takes

    chunks = []
    vpp = config.virtual_pipeline_model_parallel_size
    for stage in range(vpp) if vpp else [None]:
        where: dict[str, Any] = {"ignore_virtual": False}
        if takes(state.is_pipeline_first_stage, "vp_stage"):
            where["vp_stage"] = stage
        elif stage is not None:
            state.set_virtual_pipeline_model_parallel_rank(stage)
        model = build_gpt(
            arch,
            config,
            pre_process=state.is_pipeline_first_stage(**where),
            post_process=state.is_pipeline_last_stage(**where),
            vp_stage=stage,
            parallel_output=False,
        )
        half = config.bf16 or config.fp16
        chunks.append(Float16Module(config=config, module=model) if half else model)
    return chunks


def loaded(folder: Any, **overrides: Any) -> tuple[Architecture, Any, list[Any]]:
    """A model with a checkpoint's weights."""
    arch = Architecture.read(folder)
    config = config_of(arch, **overrides)
    chunks = chunks_of(arch, config)
    load_hf(folder, chunks)
    return arch, config, chunks


def logits_of(chunks: list[Any], config: Any) -> torch.Tensor | None:
    """[B, T, V] on the last stage, through Megatron's schedule."""
    b, t = hf_checkpoints.B, hf_checkpoints.T
    positions_BT = torch.arange(t).expand(b, -1)
    hidden = torch.ones(1, 1, t, t).tril() < 0.5
    seen: list[torch.Tensor] = []

    def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
        output = model(next(data_iterator), positions_BT, hidden)

        def loss_func(logits_BTV: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            seen.append(logits_BTV[..., : hf_checkpoints.V])
            return logits_BTV.sum(), {}

        return output, loss_func

    count = 2  # an interleaved schedule wants a multiple of the stages
    data = [iter([hf_checkpoints.tokens_BT()] * count) for _ in chunks]
    for chunk in chunks:
        chunk.eval()
    model = tiny.Tiny(config=config, chunks=chunks, optimizer=None, sequence=t, batch=b)
    with torch.no_grad():
        model.schedule(data if len(data) > 1 else data[0], count, forward_step, forward_only=True)
    return seen[0] if seen else None


def exported(source: Any, bucket_bytes: int = 4000) -> dict[str, torch.Tensor]:
    """All tensors on rank 0, checked as an engine does; nothing on others, in as many buckets."""
    staging = Staging(WeightUpdate(id="1", version=1), expected=source.tensors())
    count = 0
    for bucket in source.buckets(bucket_bytes=bucket_bytes):
        staging.add(bucket)
        assert bucket.nbytes <= bucket_bytes or len(bucket.tensors) == 1
        count += 1
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, count)
    assert set(counts) == {count}
    if dist.get_rank():
        assert not staging._tensors
        return {}
    tensors = dict(staging.complete())
    assert list(tensors) == [info.name for info in source.tensors()]
    return tensors


def deltas_follow(
    chunks: list[Any], arch: Architecture, dtype: torch.dtype, **settings: Any
) -> None:
    """Exports of what has changed make, on rank 0, the bits that whole ones bring."""
    source = MegatronWeights(chunks, arch, dtype=dtype, deltas=True, **settings)
    plain = MegatronWeights(chunks, arch, dtype=dtype, **settings)
    served = exported(source)
    for version in (2, 3):
        with torch.no_grad():
            for parameter in (each for chunk in chunks for each in chunk.parameters()):
                # Chosen by their values, so that copies on other ranks change alike.
                chosen = (parameter * 997).frac().abs() < 0.02 * version
                parameter.copy_(torch.where(chosen, parameter * 1.25 + 0.01, parameter))
        staging = Staging(
            WeightUpdate(id=f"{version}", version=version, base_version=version - 1),
            expected=source.tensors(),
            served=served.__getitem__,
        )
        for bucket in source.buckets(bucket_bytes=4000, whole=dist.get_rank() > 0):
            if dist.get_rank():
                assert not bucket.tensors
            staging.add(bucket)
        served = Patched(served, staging.complete()).kept()
        wanted = exported(plain)
        if dist.get_rank() == 0:
            same(served, wanted)
    with_none = list(source.buckets(bucket_bytes=10**9, whole=False))
    assert [dict(each.tensors) for each in with_none] == [{}]


def sent_by_rank(source: Any, **asked: Any) -> list[list[dict[str, torch.Tensor]]]:
    """Return on all ranks what each rank has of each bucket; a bucket has a tensor once."""
    mine = [
        # As bytes: Megatron's pickles take no tensors of FP8.
        {
            name: (tensor.reshape(-1).view(torch.uint8), tensor.dtype, tensor.shape)
            for name, tensor in bucket.tensors.items()
        }
        for bucket in source.buckets(bucket_bytes=4000, **asked)
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    by_rank = [
        [
            {name: flat.view(dtype).view(shape) for name, (flat, dtype, shape) in part.items()}
            for part in buckets
        ]
        for buckets in gathered
    ]
    assert len({len(buckets) for buckets in by_rank}) == 1
    for parts in zip(*by_rank, strict=True):
        tensors = [tensor for part in parts for tensor in part.values()]
        nbytes = sum(tensor.nbytes for tensor in tensors)
        assert nbytes <= 4000 or any(len(part) == 1 for part in parts)
    names = [name for buckets in by_rank for part in buckets for name in part]
    assert len(set(names)) == len(names)
    return by_rank


def merged(by_rank: list[list[dict[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """Return the tensors of all ranks."""
    return {name: part[name] for buckets in by_rank for part in buckets for name in part}


def stored(folder: Any) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Equal to the bit: names, shapes, types and values."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def close(logits: Any, reference: Any, name: str, dtype: Any) -> None:
    """Only the order of sums differs, but for float32 inside of both models' routers.

    A sum over n terms, in one order or another, is off by at most n·eps of its terms' sum: about
    60 in each product here, some five of them in each of four layers, and magnitudes that cancel.
    """
    inner = torch.float32 if name == "moe" else dtype
    bound = 60 * 5 * 4 * torch.finfo(inner).eps
    error = (logits - reference).abs().max() / reference.abs().max()
    assert error <= bound, (name, dtype, float(error), bound)
