"""Builds the model of a layout on each rank, and gathers the whole model's parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_idempotent.proof.cpu import tiny
from megatron_idempotent.window.params import ensure_params_synced

from . import fsdp2, oracle
from .batches import LOSSES, forward
from .forwards import Forwards, PacksSeen
from .layouts import Layout
from .memories import Memories
from .oracle import MTP_FACTOR
from .parameters import (
    LOSS_SCALE,
    Main,
    ParameterPart,
    joined,
    joined_main,
    mains_of,
    parts,
    spread,
)
from .protocol import MICRO_BATCH, Adapter, Subject, Wrong
from .ranks import Ranks, bits_of
from .rows import T

#: Adam divides by sqrt(v) + epsilon. An epsilon far above any gradient makes the step proportional
#: to the gradient; with a usual one a gradient twice as large would give the same step.
_EPSILON = 2.0**20
SGD = {"momentum": 0.5}
ADAM = {"beta1": 0.5, "beta2": 0.5, "epsilon": _EPSILON}
_LR = 0.5
#: So small that routers keep their margins over the steps of a check.
_LR_OF_EXPERTS = 0.005


class LayoutModel(Ranks):
    """Builds a layout's model on this rank, gives it to an adapter, and gathers its parameters.

    Example: `LayoutModel(Megatron(), layout("dp2")).gather_parameters()`.
    """

    def __init__(self, adapter: Adapter, layout: Layout) -> None:
        """Build the layout's model, and call the adapter's `build` with it."""
        super().__init__()
        self.adapter: Any = adapter  # typed Any, because it may have optional methods
        self.layout = layout
        self.packs_seen: PacksSeen | None = None
        self.double, self.half = layout.dtype == "fp64", layout.dtype in ("bf16", "fp16")
        # The ranks that have each parameter, by its name and the number of the shard.
        self.holders: dict[tuple[str, int], list[int]] = {}
        self.set_up()
        self.rank_names: list[str] = self.gather(self._rank_name)

    def set_up(self) -> None:
        """Build the layout's model, and call the adapter's `build` with it; a further call makes a
        new model.
        """
        self.make_model()
        self.adapter.build(self.subject)
        self.memories = Memories(self.adapter, self.subject)
        self.forwards = Forwards(self.subject.chunks)

    @property
    def rate(self) -> float:
        rate = _LR_OF_EXPERTS if self.layout.experts else _LR
        return rate if self.double else rate * _EPSILON

    def make_model(self) -> None:
        """Build the layout's model and optimizer, and set `subject`. Each call gives the same
        weights.
        """
        if self.layout.fsdp2:
            self.sharded, optimizer = fsdp2.build(_LR, SGD["momentum"])
            self.replica = self.rank
            model = tiny.Tiny(config=None, chunks=[self.sharded], optimizer=optimizer)
            self.subject = self.subject_of(model, fsdp2.forward)
            return
        from megatron.core import parallel_state

        self.model = self.spread_model()
        self.replica = int(parallel_state.get_data_parallel_rank())
        self.subject = self.subject_of(self.model, forward)

    def spread_model(self) -> tiny.Tiny:
        """Return the layout's model, with the noise of `spread` in its weights."""
        model = self.built()
        for chunk in model.chunks:
            spread(chunk, self.layout)
        model.optimizer.reload_model_params()
        return model

    def built(self, **more: Any) -> tiny.Tiny:
        """Return the model that `tiny.build` makes for the layout; `more` are further arguments of
        `tiny.build`, which override the layout's.
        """
        settings = self._settings()
        if "mtp" in self.layout.flags:
            # With MTP upstream's arguments refuse learned positions, which would be added twice.
            settings["model_overrides"] = {"position_embedding_type": "none"}
        settings["config_overrides"] = {
            "calculate_per_token_loss": True,
            **settings["config_overrides"],
            **getattr(self.adapter, "config_overrides", {}),
        }
        # Wiring the config is up to the framework.
        arguments = {"batch": MICRO_BATCH, "wire": False, **settings, **self.layout.options, **more}
        return tiny.build(**arguments)

    def _settings(self) -> dict[str, Any]:
        """Return settings of `tiny.build` under which a step can be compared with its definition in
        float64: no clipping, no weight decay, a constant rate.
        """
        rates = {"lr": self.rate, "min_lr": self.rate, "weight_decay": 0.0, "clip_grad": 0.0}
        adam = {"adam_beta1": ADAM["beta1"], "adam_beta2": ADAM["beta2"], "adam_eps": _EPSILON}
        optimizer: dict[str, Any] = rates | adam
        precise: dict[str, Any] = {}
        config: dict[str, Any] = {}
        if self.double:
            torch.set_default_dtype(torch.float64)  # the norms' too
            config |= {"params_dtype": torch.float64, "pipeline_dtype": torch.float64}
            precise = {"ddp_overrides": {"grad_reduce_in_fp32": False}}
            optimizer = rates | {"optimizer": "sgd", "sgd_momentum": SGD["momentum"]}
        if self.layout.dtype == "fp16":
            optimizer["loss_scale"] = LOSS_SCALE
        # Layers that have a loss of their own.
        if self.layout.experts:
            config |= {"moe_router_topk": oracle.TOPK, "moe_aux_loss_coeff": oracle.COEFFICIENT}
        if "mtp" in self.layout.flags:
            config |= {"mtp_num_layers": 1, "mtp_loss_scaling_factor": MTP_FACTOR}
        return {"config_overrides": config, "optimizer_overrides": optimizer, **precise}

    def subject_of(self, model: tiny.Tiny, forward: Callable[[Any, Any], Tensor]) -> Subject:
        """Return the `Subject` for the adapter: the model's chunks and optimizer, `forward`, and
        the layout's loss.
        """
        # Only packs have to be seen: the rows of each auxiliary loss are known.
        looks = self.layout.packs and self.layout.auxiliary
        self.packs_seen = PacksSeen(model.chunks[0]) if looks else None
        return Subject(
            chunks=model.chunks,
            optimizer=model.optimizer,
            config=model.config,
            forward=forward,
            loss=LOSSES[self.layout.loss_kind],
            loss_kind=self.layout.loss_kind,
            micro_batch_size=MICRO_BATCH,
            packs=self.layout.packs,
            max_tokens=MICRO_BATCH * T,
        )

    @property
    def coordinates(self) -> tuple[int, int, bool]:
        """The index of this rank's replica, the index of this rank's pipeline stage, and True if
        the stage is the last one, which computes the loss.
        """
        if self.layout.fsdp2:
            return self.replica, 0, True
        from megatron.core import parallel_state as ps

        stage = int(ps.get_pipeline_model_parallel_rank())
        return self.replica, stage, stage == self.layout.sizes["pp"] - 1

    @property
    def _rank_name(self) -> str:
        words = [f"replica {self.replica}"]
        if not self.layout.fsdp2:
            from megatron.core import parallel_state as ps

            words += [
                f"{word} {rank()}"
                for size, word, rank in (
                    ("pp", "stage", ps.get_pipeline_model_parallel_rank),
                    ("tp", "tensor-parallel rank", ps.get_tensor_model_parallel_rank),
                    ("cp", "context-parallel rank", ps.get_context_parallel_rank),
                    ("ep", "expert-parallel rank", ps.get_expert_model_parallel_rank),
                )
                if self.layout.sizes[size] > 1
            ]
        return f"rank {self.rank} ({', '.join(words)})"

    @property
    def fails_within_model(self) -> bool:
        """True if a forward or backward can fail on one replica without leaving the other replicas
        waiting in a collective.

        Replicas that share experts or shards have collectives in the model.
        """
        return not self.layout.fsdp2 and self.layout.sizes["ep"] == 1

    def gather_parameters(
        self, own_parts: Sequence[ParameterPart] | None = None
    ) -> dict[str, Tensor]:
        """Gather the whole, unsharded model's parameters on every rank, by Megatron's names. A
        collective.

        `own_parts` are this rank's; None to copy them now. In bfloat16 and float16 the result is
        the main parameters, and the model's must be equal to them, rounded.

        Raises:
            Wrong: two replicas have different bits.
        """
        everybody = self.gather(self._own_parts() if own_parts is None else own_parts)
        copies_of: dict[tuple[str, int], list[tuple[int, ParameterPart]]] = {}
        for rank, rank_parts in enumerate(everybody):
            for part in rank_parts:
                copies_of.setdefault((part.name, part.rank), []).append((rank, part))
        self.holders = {
            name_and_shard: [rank for rank, _ in copies]
            for name_and_shard, copies in copies_of.items()
        }
        shards_of: dict[str, list[ParameterPart]] = {}
        for (name, _), ((first_rank, first), *replicas) in copies_of.items():
            for rank, part in replicas:
                # Bits are compared, because NaN is not equal to NaN.
                if not torch.equal(bits_of(first.value), bits_of(part.value)):
                    raise Wrong(
                        f"{self.rank_names[rank]} has other bits in {name} than its replica, "
                        f"{self.rank_names[first_rank]}"
                    )
            if self.half:
                mains = [
                    part.main for part in (first, *(part for _, part in replicas)) if part.main
                ]
                first = dataclasses.replace(first, value=joined_main(name, first.value, mains))
            shards_of.setdefault(name, []).append(first)
        return {name: joined(shards) for name, shards in shards_of.items()}

    def _own_parts(
        self, *, synced: bool = True, chunks: Sequence[int] | None = None
    ) -> list[ParameterPart]:
        """Copy this rank's parameters of the model chunks with the indices `chunks` (None for all)
        to the CPU. With `synced`, first wait for pending parameter gathers.
        """
        if self.layout.fsdp2:
            return [
                ParameterPart(name=name, dimension=0, rank=self.rank, size=self.ranks, value=shard)
                for name, shard in fsdp2.shards(self.sharded).items()
            ]
        if synced:
            ensure_params_synced(self.model.chunks)
        mains: dict[Any, Main] = {}
        if self.half:
            mains = mains_of(self.model.optimizer)
            for value in (p for chunk in self.model.chunks for p in chunk.parameters()):
                # A parameter frozen before DDP, or of 32 bits, is its own main parameter.
                if not hasattr(value, "main_grad") or value.dtype == torch.float32:
                    itself = value.detach().to("cpu", torch.float32, copy=True).flatten()
                    mains.setdefault(value, Main(start=0, values=itself))
        return [
            dataclasses.replace(
                part, value=part.value.detach().cpu().clone(), main=mains.get(part.value)
            )
            for index, chunk in enumerate(self.model.chunks)
            if chunks is None or index in chunks
            for part in parts(chunk, self.layout)
        ]
