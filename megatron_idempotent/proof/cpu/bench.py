"""Drives a model, its optimizer and its schedule in tests. Legend: B batch, T tokens.

`LayerWiseDistributedOptimizer` gives each rank whole parameters to update. From 0.18 it gathers
them out of DDP's buffers, which are laid out for it (`by_layout`), or through lists of parameters
per rank. 0.17 has such lists only, and models with experts fall back to them.

gloo lacks one thing that Megatron-FSDP uses, the reduction that scales as it sums (`PREMUL_SUM`),
and upstream has an option for that: gradients are divided first. There are two versions of the
wrapper, the second one on Megatron main.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megatron_idempotent.megatron.layer_specs import takes

if TYPE_CHECKING:
    import torch


_MODULE = "megatron.core.optimizer.layer_wise_optimizer"


def has_layout() -> bool:
    """Return whether this release lays DDP's buffers out for the optimizer."""
    return hasattr(_optimizer_class(), "compute_full_param_layout")


def prepare(module: Any, ddp_config: Any, *, by_layout: bool, muon: bool) -> dict[str, Any]:
    """Prepare a model that is not in DDP yet; return further arguments for its DDP.

    With Muon the vectors and embeddings go to a DistributedOptimizer of their own, as upstream
    routes them; without, the layer-wise optimizer has everything.
    """
    if not by_layout:
        return {}
    import importlib

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


def build_optimizer(values: Mapping[str, Any], chunks: list[Any]) -> Any:
    """Build the layer-wise optimizer around Muon or AdamW.

    For Muon (`emerging-optimizers`) upstream's own factory makes it; for AdamW this wraps torch's.
    `values` are fields of OptimizerConfig; `use_distributed_optimizer` in it is ignored, as
    upstream's arguments clear it.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    names = {field.name for field in dataclasses.fields(OptimizerConfig)}
    wanted = {**values, "use_distributed_optimizer": False}
    muon = wanted["optimizer"] == "muon"
    if muon:
        wanted["use_layer_wise_distributed_optimizer"] = True
    config = OptimizerConfig(**{name: v for name, v in wanted.items() if name in names})
    if not muon:
        return _around_adam(config, chunks)
    if "use_layer_wise_distributed_optimizer" in names:
        return get_megatron_optimizer(config, chunks)
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    return get_megatron_muon_optimizer(
        config, chunks, use_gloo_process_groups=False, layer_wise_distributed_optimizer=True
    )


def _around_adam(config: Any, chunks: list[Any]) -> Any:
    import torch
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
    # 0.17 and commits between it and 0.18 have an argument for it, later ones read the config.
    overlap = {
        name: config.overlap_param_gather
        for name in ("async_allgather", "overlap_param_gather")
        if takes(layer_wise.__init__, name)
    }
    return layer_wise(
        [optimizer],
        config,
        ProcessGroupCollection.use_mpu_process_groups(),
        init_state_fn_list=None,
        model_chunks=chunks,
        **overlap,
    )


def _optimizer_class() -> Any:
    import importlib

    return importlib.import_module(_MODULE).LayerWiseDistributedOptimizer


def with_exact_attention(spec: Any) -> Any:
    """Give a layer spec the attention for packs and context parallelism; load Megatron."""
    from . import attention

    return attention.with_exact_attention(spec)


Strategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params", "v2"]
"""The state that the first version shards; the second one shards all three."""


def options(strategy: Strategy) -> dict[str, Any]:
    """Return fields of DistributedDataParallelConfig for a model under Megatron-FSDP."""
    second = strategy == "v2"
    return {
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": "optim_grads_params" if second else strategy,
        "gradient_reduce_div_fusion": False,
        "bucket_size": None,
        **({"megatron_fsdp_version": 2} if second else {}),
    }


def wrapped(config: Any, ddp_config: Any, module: Any) -> Any:
    """Return the model chunk in Megatron-FSDP, with each transformer layer as a unit."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter

    options = {"config": config, "ddp_config": ddp_config, "module": module}
    if getattr(ddp_config, "megatron_fsdp_version", 1) == 2:
        from megatron.core.process_groups_config import ProcessGroupCollection

        _give_streams()
        options["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups()
    return adapter.FullyShardedDataParallel(**options)


def _give_streams() -> None:
    """Give buffers of the second version a stream, which they note on a CUDA device only.

    The second version asserts that they have one. Nothing else of upstream is replaced here.
    """
    import torch
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.dbuffer import DBuffer

    DBuffer.allocation_stream = property(
        lambda self: torch.cuda.current_stream(), lambda self, stream: None
    )


def is_wrapped(chunk: Any) -> bool:
    """Return whether the chunk is in Megatron-FSDP."""
    return hasattr(chunk.module, "param_and_grad_buffer") or _is_second(chunk)


def gradients(chunk: Any) -> list[Any]:
    """Return the gradients that this rank's optimizer would step with, in parameter order."""
    found = []
    for parameter in _held(chunk):
        gradient = getattr(parameter, "decoupled_grad", None)
        gradient = parameter.grad if gradient is None else gradient
        if gradient is not None:
            found.append(getattr(gradient, "_local_tensor", gradient))
    return found


def parameters(chunk: Any) -> list[Any]:
    """Return this rank's optimizer's parts of the parameters, in their order."""
    return [getattr(each, "_local_tensor", each).detach() for each in _held(chunk)]


def _held(chunk: Any) -> list[Any]:
    if _is_second(chunk):
        return list(chunk.parameters())
    return [each for _, each in chunk.module.param_and_grad_buffer.optimizer_named_parameters]


def _is_second(chunk: Any) -> bool:
    return getattr(getattr(chunk, "ddp_config", None), "megatron_fsdp_version", 1) == 2


VOCABULARY, SEQUENCE, BATCH = 128, 32, 2


@dataclass(kw_only=True)
class Tiny:
    """Holds model chunks in Megatron's DDP and their optimizer, and runs their schedule."""

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
        """Run one window through upstream's schedule; return the losses on the last stage.

        It zeroes the gradients first, unless forward-only or told otherwise. All ranks take part.
        Global microbatch g = i * DP size + DP rank has the same data in every layout, so that two
        ranks with n microbatches and one rank with 2n compute the same gradient.
        """
        import torch
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if zero_first and not forward_only:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            if self.optimizer is not None:
                self.optimizer.zero_grad()
        sizes = (*self._shape, self.vocabulary)
        data = [microbatches(data_seed, *sizes) for _ in self.chunks]
        losses: list[float] = []
        with torch.no_grad() if forward_only else contextlib.nullcontext():
            get_forward_backward_func()(
                forward_step_func=self._forward_step(losses),
                data_iterator=data if len(data) > 1 else data[0],
                model=self.chunks,
                num_microbatches=num_microbatches,
                seq_length=self._shape[1],
                micro_batch_size=self._shape[0],
                forward_only=forward_only,
            )
        return losses

    @property
    def _shape(self) -> tuple[int, int]:
        """The rows and positions of a microbatch, on all context-parallel ranks."""
        return (1, sum(self.lengths)) if self.lengths else (self.batch, self.sequence)

    def step(self) -> tuple[bool, Any, Any]:
        """Run the optimizer; return upstream's (success, gradient norm, number of zeros)."""
        result: tuple[bool, Any, Any] = self.optimizer.step()
        return result

    def gradients(self) -> torch.Tensor:
        """Return all gradient buffers of this rank as one vector, a copy.

        With the distributed optimizer only this rank's shards are reduced. Under Megatron-FSDP they
        are the gradients that the optimizer would step with. The vector is on the host.
        """
        import torch

        tensors = [
            tensor
            for chunk in self.chunks
            for tensor in (
                gradients(chunk)
                if is_wrapped(chunk)
                else [b.grad_data for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
            )
        ]
        return torch.cat([tensor.float().flatten() for tensor in tensors]).cpu()

    def parameters(self) -> torch.Tensor:
        """Return all parameters of this rank as one float32 vector, a copy.

        Under `overlap_param_gather` those of other ranks are as old as the last gather. Under
        Megatron-FSDP they are the parts that this rank's optimizer holds.
        """
        import torch

        tensors = [
            tensor
            for chunk in self.chunks
            for tensor in (parameters(chunk) if is_wrapped(chunk) else chunk.module.parameters())
        ]
        return torch.cat([tensor.detach().float().flatten() for tensor in tensors]).cpu()

    def _forward_step(self, losses: list[float]) -> Callable[..., Any]:

        part, positions_BT, hidden, packed = self._inputs()
        count = iter(range(1 << 30))

        def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
            tokens_BT = part(next(data_iterator))
            index = next(count)
            if self.on_microbatch is not None:
                self.on_microbatch(index, None)
            output = model(tokens_BT, positions_BT, hidden, labels=tokens_BT, **packed)

            def loss_func(loss_BT: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                loss, whole = mean_over_ranks(loss_BT)
                if self.on_microbatch is not None:
                    replaced = self.on_microbatch(index, loss)
                    if replaced is not None:
                        loss, whole = replaced, replaced.detach().clone()
                losses.append(float(whole))
                return loss, {"loss": whole}

            return output, loss_func

        return forward_step

    def _inputs(self) -> tuple[Callable[[Any], Any], Any, Any, dict[str, Any]]:
        """Make a function that cuts [B, T], the part's positions, a mask, a pack's arguments."""
        import torch

        # The runtime makes "cuda" the CPU.
        rows, length = self._shape
        lengths = self.lengths or (length,)
        places = torch.cat([torch.arange(each, device="cuda") for each in lengths])
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")

        def part(values_BT: Any) -> Any:
            return own_part(values_BT, cu_seqlens=ends)

        positions_BT = part(places).expand(rows, -1)
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
    """Return this rank's share of the mean over all context-parallel ranks, and the mean.

    A loss function without tokens returns such a share: shares add up over these ranks, because the
    schedule multiplies by their number, and DDP then averages.
    """
    import torch
    from megatron.core import parallel_state

    ranks = parallel_state.get_context_parallel_world_size()
    loss = loss_BT.float().mean() / ranks
    # A clone: upstream divides the loss in place by the number of microbatches.
    whole = loss.detach().clone()
    if ranks > 1:
        group = parallel_state.get_context_parallel_group()
        torch.distributed.all_reduce(whole, group=group)
    return loss, whole


def microbatches(
    data_seed: int, batch: int = BATCH, sequence: int = SEQUENCE, vocabulary: int = VOCABULARY
) -> Iterator[torch.Tensor]:
    """Yield this data-parallel rank's token ids [B, T], without end."""
    import torch
    from megatron.core import parallel_state

    index = parallel_state.get_data_parallel_rank()
    while True:
        generator = torch.Generator().manual_seed(data_seed * 10_007 + index)
        # Drawn on the host, so that the data are the same on every device.
        yield torch.randint(0, vocabulary, (batch, sequence), generator=generator).cuda()
        index += parallel_state.get_data_parallel_world_size()
