"""A tiny real GPT on a rank, wired as an ordinary framework wires it: the shared test bench.

Runs on megatron-core 0.11 to 0.19. What differs between releases is probed by signature, so that
a release in between, or a patched one, needs no entry. Legend: B batch, T tokens.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

HIDDEN, HEADS, VOCABULARY, SEQUENCE, BATCH = 64, 4, 128, 32, 2
#: In elements: small enough for several buckets per chunk, so that overlap has an order to keep.
BUCKET_SIZE = 20_000

Dtype = Literal["fp32", "bf16", "fp16"]


@dataclass(kw_only=True)
class Tiny:
    """Model chunks in Megatron's DDP, their optimizer and their pipeline schedule."""

    config: Any
    chunks: list[Any]
    #: None where built with `with_optimizer=False`.
    optimizer: Any
    #: Called as (microbatch index on this rank, loss tensor or None before the forward).
    on_microbatch: Callable[[int, Any], Any] | None = None

    def forward_backward(
        self, num_microbatches: int, *, data_seed: int, forward_only: bool = False
    ) -> list[float]:
        """One window through upstream's schedule; the microbatches' losses on the last stage.

        Zeroes the gradients first, unless forward-only. All ranks take part. Global microbatch
        g = i * DP size + DP rank has the same data in every layout, so that two ranks with n
        microbatches and one rank with 2n compute the same gradient.
        """
        import torch
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if not forward_only:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            if self.optimizer is not None:
                self.optimizer.zero_grad()
        data = [microbatches(data_seed) for _ in self.chunks]
        losses: list[float] = []
        with torch.no_grad() if forward_only else contextlib.nullcontext():
            get_forward_backward_func()(
                forward_step_func=self._forward_step(losses),
                data_iterator=data if len(data) > 1 else data[0],
                model=self.chunks,
                num_microbatches=num_microbatches,
                seq_length=SEQUENCE,
                micro_batch_size=BATCH,
                forward_only=forward_only,
            )
        return losses

    def step(self) -> tuple[bool, Any, Any]:
        """Upstream's (success, gradient norm, number of zeros)."""
        result: tuple[bool, Any, Any] = self.optimizer.step()
        return result

    def gradients(self) -> torch.Tensor:
        """All gradient buffers of this rank as one vector, a copy.

        With the distributed optimizer only this rank's shards are reduced.
        """
        import torch

        buffers = [
            buffer
            for chunk in self.chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
        return torch.cat([buffer.grad_data.float().flatten() for buffer in buffers])

    def parameters(self) -> torch.Tensor:
        """All parameters of this rank as one float32 vector, a copy.

        Under `overlap_param_gather` those of other ranks are as old as the last gather.
        """
        import torch

        return torch.cat(
            [
                p.detach().float().flatten()
                for chunk in self.chunks
                for p in chunk.module.parameters()
            ]
        )

    def _forward_step(self, losses: list[float]) -> Callable[..., Any]:
        import torch

        positions_BT = torch.arange(SEQUENCE).expand(BATCH, -1)
        hidden = torch.ones(1, 1, SEQUENCE, SEQUENCE).tril() < 0.5
        count = iter(range(1 << 30))

        def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
            tokens_BT = next(data_iterator)
            index = next(count)
            if self.on_microbatch is not None:
                self.on_microbatch(index, None)
            output = model(tokens_BT, positions_BT, hidden, labels=tokens_BT)

            def loss_func(loss_BT: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                loss = loss_BT.float().mean()
                if self.on_microbatch is not None:
                    replaced = self.on_microbatch(index, loss)
                    loss = loss if replaced is None else replaced
                losses.append(float(loss))
                # A clone: upstream divides the loss in place by the number of microbatches.
                return loss, {"loss": loss.detach().clone()}

            return output, loss_func

        return forward_step


def build(
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    ep: int = 1,
    cp: int = 1,
    sequence_parallel: bool = False,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = False,
    distributed_optimizer: bool = True,
    align: bool = False,
    dtype: Dtype = "fp32",
    experts: int = 0,
    layers_per_stage: int = 2,
    loss_scale: float | None = None,
    with_optimizer: bool = True,
    wire: bool = True,
    config_overrides: Mapping[str, Any] | None = None,
    ddp_overrides: Mapping[str, Any] | None = None,
    optimizer_overrides: Mapping[str, Any] | None = None,
    seed: int = 1234,
) -> Tiny:
    """Build a GPT (hidden 64, 4 heads, vocabulary 128, sequence 32) on every rank.

    Initialises model parallelism unless it is up, in which case tp, pp, vpp, ep and cp must be
    those it is up with. `layers_per_stage` counts per virtual stage. `wire` sets the config's
    no_sync_func, grad_sync_func, param_sync_func, grad_scale_func and finalize_model_grads_func.
    The overrides are fields of TransformerConfig, DistributedDataParallelConfig and
    OptimizerConfig. Weights depend on `seed` and not on tp.
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
        )
    model_parallel_cuda_manual_seed(seed)
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
            "gradient_accumulation_fusion": False,
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": vpp,
            "context_parallel_size": cp,
            "expert_model_parallel_size": ep,
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
            **(ddp_overrides or {}),
        }
    )
    chunks = [
        DistributedDataParallel(config, ddp_config, _model(config, stage, bool(half)))
        for stage in (range(vpp) if vpp else [None])
    ]
    optimizer = None
    if with_optimizer:
        values = {
            "optimizer": "adam",
            "lr": 1e-3,
            "clip_grad": 1.0,
            "use_distributed_optimizer": distributed_optimizer,
            "overlap_param_gather": overlap_param_gather,
            "loss_scale": loss_scale,
            "params_dtype": params_dtype,
            **half,
            **(optimizer_overrides or {}),
        }
        optimizer = get_megatron_optimizer(
            OptimizerConfig(**_fields_of(OptimizerConfig, values)), chunks
        )
    if wire:
        _wire(config, chunks, optimizer, align)
    return Tiny(config=config, chunks=chunks, optimizer=optimizer)


def microbatches(data_seed: int) -> Iterator[torch.Tensor]:
    """This data-parallel rank's token ids [B, T], without end."""
    import torch
    from megatron.core import parallel_state

    index = parallel_state.get_data_parallel_rank()
    while True:
        generator = torch.Generator().manual_seed(data_seed * 10_007 + index)
        yield torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
        index += parallel_state.get_data_parallel_world_size()


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


def _model(config: Any, vp_stage: int | None, half: bool) -> Any:
    """One pipeline stage: a GPTModel, in Float16Module where its weights are half precision."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module

    from megatron_idempotent.cpu.norm import with_marked_norm

    where: dict[str, Any] = {"ignore_virtual": False}
    if vp_stage is not None:
        # Before 0.13 the stage is a global; later it is an argument.
        parallel_state.set_virtual_pipeline_model_parallel_rank(vp_stage)
        if _takes(parallel_state.is_pipeline_first_stage, "vp_stage"):
            where["vp_stage"] = vp_stage
    about_spec = {
        "normalization": config.normalization,
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": False,
    }
    spec = get_gpt_layer_local_spec(
        **{k: v for k, v in about_spec.items() if _takes(get_gpt_layer_local_spec, k)}
    )
    if config.sequence_parallel:
        spec = with_marked_norm(spec, config, vp_stage)
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=False,
        **({"vp_stage": vp_stage} if _takes(GPTModel.__init__, "vp_stage") else {}),
    )
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


def _takes(function: Callable[..., Any], parameter: str) -> bool:
    return parameter in inspect.signature(function).parameters


def _fields_of(record: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that this release's dataclass has."""
    names = {field.name for field in fields(record)}
    return {name: value for name, value in values.items() if name in names}
