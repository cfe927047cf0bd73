"""Builds a tiny real GPT on a rank, wired as an ordinary framework wires it, for tests.

It runs on megatron-core 0.11 to 0.19.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from . import bench
from .bench import BATCH, SEQUENCE, VOCABULARY, Tiny, build_optimizer, microbatches, prepare

if TYPE_CHECKING:
    import torch

__all__ = ["BATCH", "SEQUENCE", "VOCABULARY", "Dtype", "Tiny", "build", "microbatches"]

HIDDEN, HEADS = 64, 4
#: Elements of a bucket: so few that a chunk has several, and overlap has an order to keep.
BUCKET_SIZE = 20_000

Dtype = Literal["fp32", "bf16", "fp16"]


def build(
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    ep: int = 1,
    etp: int | None = None,
    cp: int = 1,
    sequence_parallel: bool = False,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = False,
    distributed_optimizer: bool = True,
    layer_wise: bool = False,
    fsdp: bench.Strategy | None = None,
    align: bool = False,
    dtype: Dtype = "fp32",
    experts: int = 0,
    layers_per_stage: int = 2,
    tied: bool = False,
    loss_scale: float | None = None,
    with_optimizer: bool = True,
    wire: bool = True,
    graph_safe_rng: bool = False,
    exact_attention: bool | None = None,
    lengths: Sequence[int] | None = None,
    sequence: int = SEQUENCE,
    batch: int = BATCH,
    vocabulary: int = VOCABULARY,
    config_overrides: Mapping[str, Any] | None = None,
    ddp_overrides: Mapping[str, Any] | None = None,
    optimizer_overrides: Mapping[str, Any] | None = None,
    model_overrides: Mapping[str, Any] | None = None,
    before_ddp: Callable[[Any], None] | None = None,
    seed: int = 1234,
) -> Tiny:
    """Build a GPT (hidden 64, 4 heads, vocabulary 128, 2 rows of 32 tokens) on every rank.

    It initialises model parallelism unless it is up; tp, pp, vpp, ep, etp and cp must then be those
    it is up with. `etp` is the tensor parallel size of experts; None means tp. `layers_per_stage`
    counts per virtual stage. With `tied` the output layer shares the embedding's weight. `wire`
    sets the config's no_sync_func, grad_sync_func, param_sync_func, grad_scale_func and
    finalize_model_grads_func. `lengths` makes each microbatch a pack of sequences of these lengths,
    instead of rows. `exact_attention` puts in `cpu.attention.ExactAttention`; None does so if it is
    needed, with cp > 1 or `lengths`. `graph_safe_rng` takes random trackers that a CUDA graph can
    capture (from 0.13, on a GPU).

    `layer_wise` takes the optimizer that gives each rank whole parameters, and needs dtype="bf16"
    and megatron-core 0.17. It gathers out of DDP's buffers (from 0.18), or with
    distributed_optimizer=False through lists of parameters. `fsdp` puts the model into
    Megatron-FSDP instead of DDP (from 0.15), with that sharding strategy; "v2" takes its second
    version, of Megatron main.

    The overrides are fields of TransformerConfig, DistributedDataParallelConfig and
    OptimizerConfig, and arguments of GPTModel. `before_ddp` is called with each chunk's module
    before DDP wraps it, where a framework freezes parameters and adds adapters. Weights depend on
    `seed` and not on tp.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
        )
    model_parallel_cuda_manual_seed(
        seed, **({"use_cudagraphable_rng": True} if graph_safe_rng else {})
    )
    # Last, because both seed one generator here, and weights are cut from one master copy.
    torch.manual_seed(seed)
    half, params_dtype = _precision(dtype)
    moe: dict[str, Any] = {}
    if experts:
        moe = {
            "num_moe_experts": experts,
            "moe_router_topk": min(2, experts),
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1e-2,
            "add_bias_linear": False,
        }
    config = TransformerConfig(
        **{
            "num_layers": layers_per_stage * pp * (vpp or 1),
            "hidden_size": HIDDEN,
            "num_attention_heads": HEADS,
            "use_cpu_initialization": True,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            # Kernels of Apex.
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": vpp,
            # As upstream's arguments have it: with two stages the next is the previous one, and
            # batched messages of an interleaved schedule come mixed up, silently.
            "overlap_p2p_comm": vpp is not None,
            "batch_p2p_comm": vpp is None,
            "context_parallel_size": cp,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": etp,
            "sequence_parallel": sequence_parallel,
            "pipeline_dtype": params_dtype,
            "params_dtype": params_dtype,
            **half,
            **moe,
            **(config_overrides or {}),
        }
    )
    ddp_config = DistributedDataParallelConfig(
        **{
            "overlap_grad_reduce": overlap_grad_reduce,
            "overlap_param_gather": overlap_param_gather,
            "use_distributed_optimizer": distributed_optimizer,
            "grad_reduce_in_fp32": True,
            "bucket_size": BUCKET_SIZE,
            **({"align_param_gather": True} if align else {}),
            **(bench.options(fsdp) if fsdp else {}),
            **(ddp_overrides or {}),
        }
    )
    if exact_attention is None:
        exact_attention = cp > 1 or lengths is not None
    exact = bench.with_exact_attention if exact_attention else None
    model = {
        "vocab_size": vocabulary,
        "max_sequence_length": sequence,
        "share_embeddings_and_output_weights": tied,
        **(model_overrides or {}),
    }
    chunks = []
    for stage in range(vpp) if vpp else [None]:
        module = _model(config, stage, bool(half), spec=exact, **model)
        if before_ddp is not None:
            before_ddp(module)
        if fsdp:
            chunks.append(bench.wrapped(config, ddp_config, module))
            continue
        layout = {}
        if layer_wise:
            muon = (optimizer_overrides or {}).get("optimizer") == "muon"
            layout = prepare(module, ddp_config, by_layout=distributed_optimizer, muon=muon)
        chunks.append(DistributedDataParallel(config, ddp_config, module, **layout))
    optimizer = None
    if with_optimizer:
        values = {
            "optimizer": "adam",
            "lr": 1e-3,
            "clip_grad": 1.0,
            # The second Megatron-FSDP shards what any optimizer has, and refuses this one.
            "use_distributed_optimizer": distributed_optimizer and fsdp != "v2",
            "overlap_param_gather": overlap_param_gather,
            "loss_scale": loss_scale,
            "params_dtype": params_dtype,
            **half,
            **(optimizer_overrides or {}),
        }
        optimizer = (
            build_optimizer(values, chunks)
            if layer_wise
            else get_megatron_optimizer(
                OptimizerConfig(**_fields_of(OptimizerConfig, values)), chunks
            )
        )
    if wire:
        _wire(config, chunks, optimizer, align)
    return Tiny(
        config=config,
        chunks=chunks,
        optimizer=optimizer,
        sequence=sequence,
        batch=batch,
        vocabulary=vocabulary,
        lengths=tuple(lengths) if lengths else None,
    )


def _wire(config: Any, chunks: list[Any], optimizer: Any, align: bool) -> None:
    from megatron.core.distributed import finalize_model_grads

    def per_chunk(name: str) -> Any:
        functions = [getattr(chunk, name) for chunk in chunks]
        return functions if len(functions) > 1 else functions[0]

    config.finalize_model_grads_func = finalize_model_grads
    if optimizer is not None:
        config.grad_scale_func = optimizer.scale_loss
    if chunks[0].ddp_config.overlap_grad_reduce:
        config.no_sync_func = per_chunk("no_sync")
        if align:
            config.grad_sync_func = per_chunk("start_grad_sync")
    if chunks[0].ddp_config.overlap_param_gather and align:
        config.param_sync_func = per_chunk("start_param_sync")


def _model(
    config: Any,
    vp_stage: int | None,
    half: bool,
    *,
    spec: Callable[[Any], Any] | None,
    **options: Any,
) -> Any:
    """Return one pipeline stage: a GPTModel, in Float16Module if its weights have 16 bits."""
    from megatron.core import parallel_state
    from megatron.core.transformer.module import Float16Module

    from megatron_idempotent.megatron.layer_specs import gpt_stage, takes

    where: dict[str, Any] = {"ignore_virtual": False}
    if vp_stage is not None:
        # Before 0.13 the stage is a global; later it is an argument.
        parallel_state.set_virtual_pipeline_model_parallel_rank(vp_stage)
        if takes(parallel_state.is_pipeline_first_stage, "vp_stage"):
            where["vp_stage"] = vp_stage
    # Made on the host, so that weights are the same on every device.
    model = gpt_stage(
        config,
        vp_stage=vp_stage,
        change_spec=spec,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        **options,
    ).cuda()
    return Float16Module(config=config, module=model) if half else model


def _precision(dtype: Dtype) -> tuple[dict[str, bool], torch.dtype]:
    import torch

    kinds: dict[str, tuple[dict[str, bool], torch.dtype]] = {
        "fp32": ({}, torch.float32),
        "bf16": ({"bf16": True}, torch.bfloat16),
        "fp16": ({"fp16": True}, torch.float16),
    }
    if dtype not in kinds:
        raise ValueError(f"dtype must be one of {', '.join(kinds)}, found {dtype!r}")
    return kinds[dtype]


def _fields_of(record: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items of `values` that are fields of this release's dataclass."""
    names = {field.name for field in fields(record)}
    return {name: value for name, value in values.items() if name in names}
