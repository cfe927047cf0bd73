"""Builds a tiny real GPT on a rank, wired as an ordinary framework wires it, for tests.

It runs on megatron-core 0.12 to 0.19. Legend: B batch, T tokens.

`LayerWiseDistributedOptimizer` gives each rank whole parameters to update. From 0.18 it gathers
them out of DDP's buffers, which are laid out for it (`has_layout`), or through lists of parameters
per rank. 0.16 and 0.17 have such lists only, and models with experts fall back to them.

gloo lacks one thing that Megatron-FSDP uses, the reduction that scales as it sums (`PREMUL_SUM`),
and upstream has an option for that: gradients are divided first. There are two versions of the
wrapper, the second one on Megatron main.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from megatron_idempotent.megatron.ddp import innermost
from megatron_idempotent.megatron.layer_specs import takes

VOCABULARY, SEQUENCE, BATCH = 128, 32, 2
HIDDEN, HEADS = 64, 4
#: Elements of a bucket: so few that a chunk has several, and overlap has an order to keep.
BUCKET_SIZE = 20_000

Dtype = Literal["fp32", "bf16", "fp16"]
Strategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params", "v2"]
"""The state that the first version of Megatron-FSDP shards; the second one shards all three."""


@dataclasses.dataclass(kw_only=True)
class Tiny:
    """Holds model chunks in Megatron's DDP and their optimizer, and runs Megatron's schedule on
    them.
    """

    config: Any
    chunks: list[Any]
    #: The optimizer of all chunks; None if built with `with_optimizer=False`.
    optimizer: Any
    #: The number of tokens of a row.
    sequence: int = SEQUENCE
    #: The number of rows of a microbatch.
    batch: int = BATCH
    #: The number of token ids.
    vocabulary: int = VOCABULARY
    #: The lengths of the sequences that each microbatch packs; None for rows.
    lengths: tuple[int, ...] | None = None
    #: A function of the microbatch's index on this rank and its loss, or None before the forward;
    #: it may return another loss.
    on_microbatch: Callable[[int, Any], Any] | None = None

    def forward_backward(
        self,
        num_microbatches: int,
        *,
        data_seed: int,
        forward_only: bool = False,
        zero_first: bool = True,
    ) -> list[float]:
        """Run `num_microbatches` through Megatron's schedule; return their losses, on the last
        stage only.

        It zeroes the gradients first, unless forward-only or told otherwise. All ranks take part.
        Global microbatch g = i * DP size + DP rank has the same data in every layout, so that two
        ranks with n microbatches and one rank with 2n compute the same gradient.
        """
        if zero_first and not forward_only:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            if self.optimizer is not None:
                self.optimizer.zero_grad()
        sizes = (*self._shape, self.vocabulary)
        data = [microbatches(data_seed, *sizes) for _ in self.chunks]
        losses: list[float] = []
        with torch.no_grad() if forward_only else contextlib.nullcontext():
            self.schedule(
                data if len(data) > 1 else data[0],
                num_microbatches,
                self._forward_step(losses),
                forward_only=forward_only,
            )
        return losses

    def schedule(
        self,
        data: Any,
        num_microbatches: int,
        forward_step: Callable[..., Any] | None = None,
        **options: Any,
    ) -> Any:
        """Call Megatron's forward-backward schedule on the chunks; return its result. Gradients are
        not zeroed.

        Args:
            data: the data iterator.
            forward_step: upstream's argument; by default one that takes tokens out of `data`.
            options: arguments of the schedule, in place of the defaults here.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        defaults = {
            "forward_step_func": forward_step or self._forward_step([]),
            "data_iterator": data,
            "model": self.chunks,
            "num_microbatches": num_microbatches,
            "seq_length": self._shape[1],
            "micro_batch_size": self._shape[0],
            "forward_only": False,
        }
        return get_forward_backward_func()(**defaults | options)

    @property
    def _shape(self) -> tuple[int, int]:
        """The numbers of rows and of positions of a microbatch, before context-parallel ranks split
        the positions.
        """
        return (1, sum(self.lengths)) if self.lengths else (self.batch, self.sequence)

    def step(self) -> tuple[bool, Any, Any]:
        """Call the optimizer's `step`; return its (success, gradient norm, number of zeros)."""
        result: tuple[bool, Any, Any] = self.optimizer.step()
        return result

    def train_step(self, num_microbatches: int, *, data_seed: int) -> None:
        """Run forward and backward of `num_microbatches`, and step the optimizer. All ranks call
        it.
        """
        self.forward_backward(num_microbatches, data_seed=data_seed)
        self.step()

    def gradients(self) -> torch.Tensor:
        """Return a copy of this rank's gradient buffers, as one float32 vector.

        With the distributed optimizer only this rank's shards are reduced. Under Megatron-FSDP they
        are the gradients that the optimizer would step with. The vector is on the host.
        """
        tensors: list[Any] = []
        for chunk in self.chunks:
            if not _in_fsdp(chunk):
                buffers = (*chunk.buffers, *chunk.expert_parallel_buffers)
                tensors += [buffer.grad_data for buffer in buffers]
                continue
            for parameter in _optimizer_parameters(chunk):
                decoupled = getattr(parameter, "decoupled_grad", None)
                gradient = parameter.grad if decoupled is None else decoupled
                if gradient is not None:
                    tensors.append(getattr(gradient, "_local_tensor", gradient))
        return torch.cat([tensor.float().flatten() for tensor in tensors]).cpu()

    def parameters(self) -> torch.Tensor:
        """Return this rank's parameters as one float32 vector, a copy on the host.

        Under `overlap_param_gather` those of other ranks are as old as the last gather. Under
        Megatron-FSDP they are the parts that this rank's optimizer holds.
        """
        return parameters_of(self.chunks)

    def bits(self) -> bytes:
        """Return the bytes of `parameters()`, to compare parameters bit by bit."""
        bits: bytes = self.parameters().numpy().tobytes()
        return bits

    def _forward_step(self, losses: list[float]) -> Callable[..., Any]:
        part, positions_BT, hidden, packed = self._inputs()
        count = itertools.count()

        def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
            tokens_BT = part(next(data_iterator))
            index = next(count)
            if self.on_microbatch is not None:
                self.on_microbatch(index, None)
            more = packed | mtp_labels(model, tokens_BT)
            output = model(tokens_BT, positions_BT, hidden, labels=tokens_BT, **more)

            def loss_func(loss_BT: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                loss, mean = mean_over_ranks(loss_BT)
                if self.on_microbatch is not None:
                    replaced = self.on_microbatch(index, loss)
                    if replaced is not None:
                        loss, mean = replaced, replaced.detach().clone()
                losses.append(float(mean))
                return loss, {"loss": mean}

            return output, loss_func

        return forward_step

    def _inputs(self) -> tuple[Callable[[Any], Any], Any, Any, dict[str, Any]]:
        """Return what a forward needs besides tokens: a function that cuts [B, T] to this
        context-parallel rank's positions; the position ids of these; the attention mask (None for
        packs); and the keyword arguments for packs (none for rows).
        """
        # The runtime makes "cuda" the CPU.
        rows, length = self._shape
        lengths = self.lengths or (length,)
        position_S = torch.cat(
            [torch.arange(sequence_length, device="cuda") for sequence_length in lengths]
        )
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")

        def part(values_BT: Any) -> Any:
            return own_part(values_BT, cu_seqlens=ends)

        positions_BT = part(position_S).expand(rows, -1)
        if self.lengths is None:
            hidden = torch.ones(1, 1, length, length, device="cuda").tril() < 0.5
            return part, positions_BT, hidden, {}
        from megatron.core.packed_seq_params import PackedSeqParams

        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
        return part, positions_BT, None, {"packed_seq_params": packed}


def own_part(values: Any, cu_seqlens: Any = None) -> Any:
    """Cut whole rows or packs [..., T] down to this context-parallel rank's positions."""
    from megatron.core import parallel_state

    from megatron_idempotent.logprobs.targets import context_parallel_part

    return context_parallel_part(
        values,
        rank=parallel_state.get_context_parallel_rank(),
        size=parallel_state.get_context_parallel_world_size(),
        cu_seqlens=cu_seqlens,
    )


def mean_over_ranks(loss_BT: Any) -> tuple[Any, Any]:
    """Return this rank's part of the mean loss over the positions of all context-parallel ranks,
    and the mean itself, which is the sum of all these ranks' parts. All of them must call this.

    A loss function that returns no number of tokens returns such a part: the parts add up, because
    the schedule multiplies by the number of these ranks, and DDP then averages.
    """
    from megatron.core import parallel_state

    ranks = parallel_state.get_context_parallel_world_size()
    loss = loss_BT.float().mean() / ranks
    # A clone: upstream divides the loss in place by the number of microbatches.
    mean = loss.detach().clone()
    if ranks > 1:
        group = parallel_state.get_context_parallel_group()
        torch.distributed.all_reduce(mean, group=group)
    return loss, mean


def microbatches(
    data_seed: int, batch: int = BATCH, sequence: int = SEQUENCE, vocabulary: int = VOCABULARY
) -> Iterator[torch.Tensor]:
    """Yield this data-parallel rank's microbatches of random token ids [B, T], without end."""
    from megatron.core import parallel_state

    index = parallel_state.get_data_parallel_rank()
    while True:
        generator = torch.Generator().manual_seed(data_seed * 10_007 + index)
        # Drawn on the host, so that the data are the same on every device.
        yield torch.randint(0, vocabulary, (batch, sequence), generator=generator).cuda()
        index += parallel_state.get_data_parallel_world_size()


def inputs(data_seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return one microbatch: tokens [B, T], positions [B, T] and a mask [1, 1, T, T], True where
    hidden.
    """
    tokens_BT = next(microbatches(data_seed))
    positions_BT = torch.arange(SEQUENCE, device="cuda").expand(BATCH, -1)
    return tokens_BT, positions_BT, torch.ones(1, 1, SEQUENCE, SEQUENCE).tril().cuda() < 0.5


def mtp_labels(chunk: Any, labels_BT: torch.Tensor) -> dict[str, Any]:
    """Return a dict with the keyword argument `mtp_kwargs`, the labels of MTP layers, if the
    chunk's `forward` takes it; else an empty dict.

    The commits that slime and miles pin do so.
    """
    takes_labels = takes(innermost(chunk).forward, "mtp_kwargs")
    return {"mtp_kwargs": {"mtp_labels": labels_BT}} if takes_labels else {}


def parameters_of(chunks: Sequence[Any]) -> torch.Tensor:
    """Return this rank's parameters as one float32 vector [P], a copy on the host.

    Under Megatron-FSDP they are the parts that this rank's optimizer holds.
    """
    tensors = [
        getattr(parameter, "_local_tensor", parameter).detach()
        for chunk in chunks
        for parameter in (
            _optimizer_parameters(chunk) if _in_fsdp(chunk) else chunk.module.parameters()
        )
    ]
    return torch.cat([tensor.float().flatten() for tensor in tensors]).cpu()


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
    fsdp: Strategy | None = None,
    align: bool = False,
    dtype: Dtype = "fp32",
    experts: int = 0,
    layers_per_stage: int = 2,
    mtp: int = 0,
    tied: bool = False,
    loss_scale: float | None = None,
    with_optimizer: bool = True,
    wire: bool = True,
    capturable: bool = False,
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
    """Build a tiny GPT (hidden 64, 4 heads, vocabulary 128, 2 rows of 32 tokens) in Megatron's DDP
    on every rank, with its optimizer.

    It initialises model parallelism unless it is up; tp, pp, vpp, ep, etp and cp must then be those
    it is up with. `etp` is the tensor parallel size of experts; None means tp. `layers_per_stage`
    counts per virtual stage; `mtp` layers predict further tokens. With `tied` the output layer
    shares the embedding's weight. `wire` sets the config's no_sync_func, grad_sync_func,
    param_sync_func, grad_scale_func and finalize_model_grads_func. `lengths` makes each microbatch
    a pack of sequences of these lengths, instead of rows. `exact_attention` puts in
    `cpu.attention.ExactAttention`; None does so if it is needed, with cp > 1 or `lengths`.
    `capturable` takes random trackers, and a stream of DDP's hooks, that a CUDA graph of an
    iteration can capture (from 0.14, on a GPU).

    `layer_wise` takes the optimizer that gives each rank whole parameters, and needs dtype="bf16"
    and megatron-core 0.16. It gathers out of DDP's buffers (from 0.18), or with
    distributed_optimizer=False through lists of parameters. `fsdp` puts the model into
    Megatron-FSDP instead of DDP (from 0.15), with that sharding strategy; "v2" takes its second
    version, of Megatron main.

    The overrides are fields of TransformerConfig, DistributedDataParallelConfig and
    OptimizerConfig, and arguments of GPTModel. `before_ddp` is called with each chunk's module
    before DDP wraps it, where a framework freezes parameters and adds adapters. Weights depend on
    `seed` and not on tp.
    """
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
    model_parallel_cuda_manual_seed(seed, **({"use_cudagraphable_rng": True} if capturable else {}))
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
            # As upstream's arguments set it: with two stages the next one is the previous one, too,
            # and batched messages of an interleaved schedule are silently mixed up.
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
            **({"mtp_num_layers": mtp} if mtp else {}),
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
            **(_fsdp_options(fsdp) if fsdp else {}),
            **(ddp_overrides or {}),
        }
    )
    if exact_attention is None:
        exact_attention = cp > 1 or lengths is not None
    exact: Callable[[Any], Any] | None = None
    if exact_attention:
        from .attention import with_exact_attention

        exact = with_exact_attention
    model = {
        "vocab_size": vocabulary,
        "max_sequence_length": sequence,
        "share_embeddings_and_output_weights": tied,
        **({"position_embedding_type": "none"} if mtp else {}),
        **(model_overrides or {}),
    }
    chunks = []
    for stage in range(vpp) if vpp else [None]:
        module = _model(config, stage, bool(half), spec=exact, **model)
        if before_ddp is not None:
            before_ddp(module)
        if fsdp:
            chunks.append(_fsdp_wrapped(config, ddp_config, module))
            continue
        layout = {}
        if layer_wise:
            muon = (optimizer_overrides or {}).get("optimizer") == "muon"
            layout = _layer_wise_layout(
                module, ddp_config, by_layout=distributed_optimizer, muon=muon
            )
        with _stream_of_a_graph() if capturable else contextlib.nullcontext():
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
            _layer_wise_optimizer(values, chunks)
            if layer_wise
            else get_megatron_optimizer(
                OptimizerConfig(**_known_fields(OptimizerConfig, values)), chunks
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


@contextlib.contextmanager
def _stream_of_a_graph() -> Iterator[None]:
    """Run the block on the CUDA stream that Megatron captures graphs on; before 0.19 on a new one.

    Autograd runs a parameter's hooks on the stream that DDP registered them on, and a capture
    refuses to wait for the default stream.
    """
    from megatron.core import full_cuda_graph

    shared = getattr(full_cuda_graph, "get_shared_capture_stream", torch.cuda.Stream)  # from 0.19
    stream, outer = shared(), torch.cuda.current_stream()
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        yield
    outer.wait_stream(stream)


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

    from megatron_idempotent.megatron.layer_specs import gpt_stage

    stage: dict[str, Any] = {"ignore_virtual": False}
    if vp_stage is not None:
        # Before 0.13 the stage is a global; later it is an argument.
        parallel_state.set_virtual_pipeline_model_parallel_rank(vp_stage)
        if takes(parallel_state.is_pipeline_first_stage, "vp_stage"):
            stage["vp_stage"] = vp_stage
    # Made on the host, so that weights are the same on every device.
    model = gpt_stage(
        config,
        vp_stage=vp_stage,
        change_spec=spec,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        **options,
    ).cuda()
    return Float16Module(config=config, module=model) if half else model


def _precision(dtype: Dtype) -> tuple[dict[str, bool], torch.dtype]:
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if dtype not in kinds:
        raise ValueError(f"dtype must be one of {', '.join(kinds)}, found {dtype!r}")
    return ({} if dtype == "fp32" else {dtype: True}), kinds[dtype]


def _known_fields(record: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items of `values` whose names are fields of the dataclass `record` in this
    release.
    """
    names = {field.name for field in dataclasses.fields(record)}
    return {name: value for name, value in values.items() if name in names}


# The layer-wise optimizer.

_MODULE = "megatron.core.optimizer.layer_wise_optimizer"


def has_layer_wise() -> bool:
    """Return whether the installed Megatron has the layer-wise optimizer."""
    return importlib.util.find_spec(_MODULE) is not None


def has_layout() -> bool:
    """Return whether the installed Megatron lays DDP's buffers out for the layer-wise optimizer."""
    return hasattr(_optimizer_class(), "compute_full_param_layout")


def _layer_wise_layout(
    module: Any, ddp_config: Any, *, by_layout: bool, muon: bool
) -> dict[str, Any]:
    """Mark the parameters of `module` that the layer-wise optimizer updates, and return keyword
    arguments with which DDP lays out its buffers for that optimizer. Without `by_layout`, change
    nothing and return {}.

    With Muon the vectors and embeddings go to a DistributedOptimizer of their own, as upstream
    routes them; without, the layer-wise optimizer has everything.
    """
    if not by_layout:
        return {}
    from megatron.core import parallel_state

    if muon:
        importlib.import_module(_MODULE).tag_params_for_buffer_routing([module])
    else:
        for parameter in module.parameters():
            parameter.is_managed_by_layer_wise_optimizer = True
    layout = _optimizer_class().compute_full_param_layout(
        [parameter for parameter in module.parameters() if parameter.requires_grad],
        ddp_config.bucket_size,
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        ddp_config,
        expert_data_parallel_world_size=parallel_state.get_expert_data_parallel_world_size(),
    )
    return {"full_param_layout": layout}


def _layer_wise_optimizer(values: Mapping[str, Any], chunks: list[Any]) -> Any:
    """Build Megatron's layer-wise optimizer, which gives each rank whole parameters to update,
    around Muon or AdamW.

    For Muon (`emerging-optimizers`) upstream's own factory makes it; for AdamW this wraps torch's.
    `values` are fields of OptimizerConfig; `use_distributed_optimizer` in it is ignored, as
    upstream's arguments clear it.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    options = {**values, "use_distributed_optimizer": False}
    muon = options["optimizer"] == "muon"
    if muon:
        options["use_layer_wise_distributed_optimizer"] = True
    options = _known_fields(OptimizerConfig, options)
    config = OptimizerConfig(**options)
    if not muon:
        return _around_adam(config, chunks)
    if "use_layer_wise_distributed_optimizer" in options:
        return get_megatron_optimizer(config, chunks)
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    return get_megatron_muon_optimizer(
        config, chunks, use_gloo_process_groups=False, layer_wise_distributed_optimizer=True
    )


def _around_adam(config: Any, chunks: list[Any]) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    parameters = [p for chunk in chunks for p in chunk.module.parameters() if p.requires_grad]
    kinds = (
        (False, [p for p in parameters if getattr(p, "allreduce", True)]),
        (True, [p for p in parameters if not getattr(p, "allreduce", True)]),
    )
    groups = [
        {
            "params": members,
            "is_expert_parallel": is_expert,
            "wd_mult": 1.0,
            "lr_mult": 1.0,
            "is_decoupled_lr": False,
        }
        for is_expert, members in kinds
        if members
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, weight_decay=config.weight_decay)
    layer_wise = _optimizer_class()
    # 0.17 and commits up to 0.18 take the overlap as an argument, later ones read the config.
    offered = {
        "async_allgather": config.overlap_param_gather,
        "overlap_param_gather": config.overlap_param_gather,
        "model_chunks": chunks,  # 0.16 has none, and always gathers
    }
    taken_options = {name: offered[name] for name in offered if takes(layer_wise.__init__, name)}
    return layer_wise(
        [optimizer],
        config,
        ProcessGroupCollection.use_mpu_process_groups(),
        init_state_fn_list=None,
        **taken_options,
    )


def _optimizer_class() -> Any:
    return importlib.import_module(_MODULE).LayerWiseDistributedOptimizer


# Megatron-FSDP.


def _fsdp_options(strategy: Strategy) -> dict[str, Any]:
    """Return fields of DistributedDataParallelConfig for a model under Megatron-FSDP."""
    second = strategy == "v2"
    return {
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": "optim_grads_params" if second else strategy,
        "gradient_reduce_div_fusion": False,
        "bucket_size": None,
        **({"megatron_fsdp_version": 2} if second else {}),
    }


def _fsdp_wrapped(config: Any, ddp_config: Any, module: Any) -> Any:
    """Wrap a model chunk in Megatron-FSDP, with each transformer layer as a unit, and return it."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter

    options = {"config": config, "ddp_config": ddp_config, "module": module}
    if getattr(ddp_config, "megatron_fsdp_version", 1) == 2:
        from megatron.core.process_groups_config import ProcessGroupCollection

        dbuffer = "megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.dbuffer"
        # Its buffers note a stream on a CUDA device only, and it asserts that they have one.
        # Nothing else of upstream is replaced here.
        importlib.import_module(dbuffer).DBuffer.allocation_stream = property(
            lambda self: torch.cuda.current_stream(), lambda self, stream: None
        )
        options["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups()
    return adapter.FullyShardedDataParallel(**options)


def _in_fsdp(chunk: Any) -> bool:
    """Return whether a model chunk is wrapped in Megatron-FSDP."""
    return hasattr(chunk.module, "param_and_grad_buffer") or _is_second(chunk)


def _optimizer_parameters(chunk: Any) -> list[Any]:
    if _is_second(chunk):
        return list(chunk.parameters())
    return [
        parameter for _, parameter in chunk.module.param_and_grad_buffer.optimizer_named_parameters
    ]


def _is_second(chunk: Any) -> bool:
    return getattr(getattr(chunk, "ddp_config", None), "megatron_fsdp_version", 1) == 2
