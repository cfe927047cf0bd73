"""Adapts this library's `TrainStep` and `accumulation_window`, and a loop of nothing but Megatron.

They also show how an adapter is written.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

import megatron_idempotent
from megatron_idempotent import FSDPTrainStep, TrainStep, all_positions, wire_train_config
from megatron_idempotent.megatron.schedules import sums_tokens_of_context_ranks
from megatron_idempotent.window.accumulation import set_for

from . import packs
from .layouts import LossKind
from .protocol import Finished, Packed, Planted, Rows, Subject

_NO_OFFLOAD: Mapping[str, str] = MappingProxyType(
    {}
    if hasattr(DistributedDataParallel, "offload_grad_buffers")
    else dict.fromkeys(
        ("offload-between-steps", "logprobs-while-offloaded", "offload-in-mid-step"),
        "Megatron before 0.16 frees no gradient buffers",
    )
)


class _Loss:
    """Sums over positions, or sequences, that count; the step divides by their number."""

    normalizers: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.fail = False

    @property
    def kind(self) -> LossKind:
        return self._subject.loss_kind

    def __call__(self, output: Any, microbatch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        if self.fail:
            raise Planted("the loss fails, as the check asks")
        total, _ = self._subject.loss(output, _given(microbatch))
        return total, {"nll": total}


def _given(microbatch: Any) -> Rows | Packed:
    """Returns rows as they are, and what the step has packed as `Subject` takes it."""
    return packs.described(microbatch) if "pack" in microbatch else microbatch


class SplitStep:
    """Trains with `TrainStep`. Certify it with `megatron_idempotent.certify.adapters:SplitStep`."""

    cannot: Mapping[str, str] = _NO_OFFLOAD
    packs = True
    sequences = True
    name: str | None = None  # of one of several tenants

    def build(self, subject: Subject) -> None:
        self.subject = subject
        self.loss = _Loss(subject)
        wire_train_config(subject.chunks, subject.optimizer)
        self.step: Any = TrainStep(
            subject.chunks,
            subject.optimizer,
            forward=self.forward,
            deadline_s=20.0,
            tenant=self.name,
        )

    def tenant(self, name: str) -> SplitStep:
        made = type(self)()
        made.name = name
        return made

    def forward(self, chunk: Any, microbatch: Any) -> Tensor:
        return self.subject.forward(chunk, _given(microbatch))

    def begin(self) -> None:
        subject = self.subject
        self.open = self.step.begin(
            self.loss,
            micro_batch_size=None if subject.packs else subject.micro_batch_size,
            max_tokens_per_microbatch=subject.max_tokens if subject.packs else None,
        )

    def microbatch(self, rows: Rows | None, *, fail: bool = False) -> None:
        self.loss.fail = fail
        try:
            self.step.microbatch(self.open, rows)
        finally:
            self.loss.fail = False

    def finish(self) -> Finished:
        result = self.step.finish(self.open, global_batch_size=1)
        return Finished(
            updated=result.updated, grad_norm=result.grad_norm, loss=result.metrics.get("nll")
        )

    def abort(self) -> None:
        self.step.abort()

    def logprobs(self, rows: Rows) -> Tensor | None:
        return _logprobs(self.subject, rows)

    def export(self) -> None:
        """Read all parameters, as a weight sync does."""
        megatron_idempotent.ensure_params_synced(self.subject.chunks)
        self.exported = [
            each.detach().cpu().clone()
            for chunk in self.subject.chunks
            for each in chunk.module.parameters()
        ]

    def save(self) -> dict[str, Any]:
        return _state_of(self.subject)

    def load(self, state: dict[str, Any]) -> None:
        _restore(self.subject, state)

    def offload(self) -> None:
        _offload(self.subject)

    def onload(self, *, training: bool = True) -> None:
        _onload(self.subject, training=training)


class FSDPSplitStep(SplitStep):
    """Trains an FSDP2 model with `FSDPTrainStep`."""

    packs = False
    fsdp2 = True
    cannot = MappingProxyType({})

    def build(self, subject: Subject) -> None:
        self.subject = subject
        self.loss = _Loss(subject)
        (self.model,) = subject.chunks
        # Begun, finished and aborted as the other is.
        self.step = FSDPTrainStep(
            self.model, subject.optimizer, forward=subject.forward, clip_grad=None, deadline_s=20.0
        )

    def microbatch(self, rows: Rows | None, *, fail: bool = False) -> None:
        # Ranks meet in the model: one without rows takes part with none.
        some = rows is not None and len(rows["input_ids"]) > 0
        super().microbatch(rows if some else None, fail=fail)

    def logprobs(self, rows: Rows) -> Tensor:
        with self.step.reading() as (model,):
            return -self.subject.forward(model, rows)

    def export(self) -> None:
        with self.step.reading() as (model,):
            self.exported = [each.full_tensor().clone() for each in model.parameters()]

    def save(self) -> dict[str, Any]:
        return copy.deepcopy(
            {"model": self.model.state_dict(), "optimizer": self.subject.optimizer.state_dict()}
        )

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.subject.optimizer.load_state_dict(state["optimizer"])

    def offload(self) -> None:
        self.model.cpu()
        self._move_state("cpu")

    def onload(self, *, training: bool = True) -> None:
        self.model.cuda()
        if training:
            self._move_state("cuda")

    def _move_state(self, device: str) -> None:
        for state in self.subject.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(device)


class Megatron:
    """Trains with Megatron alone: one call of its schedule in `finish`, over all rows so far."""

    cannot: Mapping[str, str] = MappingProxyType(
        {
            "failure-on-one-rank": "nothing tells the other ranks of a failure",
            "replica-without-rows": "the schedule takes at least one microbatch",
            "nan": "Megatron checks losses for NaN only if asked, and updates with them",
            "uneven-replicas/ep": "replicas that share experts have as many microbatches each",
            **_NO_OFFLOAD,
        }
    )
    packs = True
    sequences = True

    def build(self, subject: Subject) -> None:
        self.subject = subject
        wire_train_config(subject.chunks, subject.optimizer)

    def tenant(self, name: str) -> Megatron:
        return type(self)()

    def begin(self) -> None:
        self.rows: list[Rows | Packed] = []
        self.fail = False

    def microbatch(self, rows: Rows, *, fail: bool = False) -> None:
        self.fail = self.fail or fail
        self.rows += self._pieces(rows)

    def _pieces(self, rows: Rows) -> list[Rows | Packed]:
        subject = self.subject
        pieces: list[Rows | Packed] = [*microbatches(subject, rows)]
        if not subject.packs:
            return pieces
        # All of one size, as a pipeline takes them.
        return [packs.one_pack(each, subject.config, subject.max_tokens) for each in pieces]

    def finish(self) -> Finished:
        self._zero()
        self._train(self.rows)
        return self._update()

    def _train(self, pieces: Sequence[Rows | Packed]) -> None:
        with _auxiliary_losses(self.subject, positions=pieces[0]["input_ids"].shape[1]):
            _schedule(self.subject, pieces, self._forward_step, forward_only=False)

    def _zero(self) -> None:
        for chunk in self.subject.chunks:
            chunk.zero_grad_buffer()
        self.subject.optimizer.zero_grad()

    def _update(self) -> Finished:
        updated, grad_norm, _ = self.subject.optimizer.step()
        return Finished(updated=updated, grad_norm=None if grad_norm is None else float(grad_norm))

    def _forward_step(self, data: Any, chunk: Any) -> Any:
        rows = next(data)

        def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            if self.fail:
                raise Planted("the loss fails, as the check asks")
            total, count = self.subject.loss(output, rows)
            count = count.to(torch.int)
            if not sums_tokens_of_context_ranks():
                group = parallel_state.get_context_parallel_group()
                torch.distributed.all_reduce(count, group=group)
            return total, count, {"nll": total.detach().clone()}

        return self.subject.forward(chunk, rows), loss

    def abort(self) -> None:
        self.rows = []

    def save(self) -> dict[str, Any]:
        return _state_of(self.subject)

    def load(self, state: dict[str, Any]) -> None:
        _restore(self.subject, state)

    def offload(self) -> None:
        _offload(self.subject)

    def onload(self, *, training: bool = True) -> None:
        _onload(self.subject, training=training)


class Window(Megatron):
    """Trains with Megatron's schedule, called for each part of a step in `accumulation_window`."""

    cannot: Mapping[str, str] = MappingProxyType(
        {
            **Megatron.cannot,
            "replica-without-rows": "a window in which a rank has no call raises, and others wait",
            "swapped-adapters/tp": "finalizing adds up all adapters' gradients over these ranks",
        }
    )

    def begin(self) -> None:
        self._zero()
        self._window = megatron_idempotent.accumulation_window(self.subject.chunks)
        self._window.__enter__()

    def microbatch(self, rows: Rows, *, fail: bool = False) -> None:
        self.fail = fail
        pieces = self._pieces(rows)
        if pieces:
            self._train(pieces)

    def finish(self) -> Finished:
        self._window.__exit__(None, None, None)
        return self._update()

    def abort(self) -> None:
        """Leave the block as an exception does, without the reduction at its end."""
        with contextlib.suppress(Planted):
            raised = Planted("the step is dropped")
            self._window.__exit__(Planted, raised, None)
        megatron_idempotent.abort_window(self.subject.chunks, self.subject.optimizer)


def microbatches(subject: Subject, rows: Rows) -> list[Rows]:
    """Cut a call's rows into microbatches of `subject.micro_batch_size` rows, in their order.

    Example: `self.rows += microbatches(subject, rows)`.
    """
    size = subject.micro_batch_size
    return [
        {name: each[start : start + size] for name, each in rows.items()}
        for start in range(0, len(rows["input_ids"]), size)
    ]


@contextlib.contextmanager
def _auxiliary_losses(subject: Subject, *, positions: int) -> Iterator[None]:
    """Let auxiliary losses weigh as many sequences as they are about, if the loss is of sequences.

    Megatron multiplies each by the positions of its microbatch, and divides by what the loss
    functions count. Of sequences with so many positions that is so many times too much.
    """
    with contextlib.ExitStack() as stack:
        if subject.loss_kind == "sequence":
            modules = [module for chunk in subject.chunks for module in chunk.modules()]
            for name in ("moe_aux_loss_coeff", "mtp_loss_scaling_factor"):
                # 0.12 keeps a copy of the second in the block of MTP layers.
                for owner in (subject.config, *(each for each in modules if name in vars(each))):
                    if value := getattr(owner, name, None):
                        set_for(stack, owner, name, value / positions)
        yield


def _schedule(
    subject: Subject, microbatches: Sequence[Rows | Packed], forward_step: Any, **options: Any
) -> Any:
    """Call Megatron's schedule, and return what it does."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    data = [iter(microbatches) for _ in subject.chunks]
    rows, positions = microbatches[0]["input_ids"].shape
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data if len(data) > 1 else data[0],
        model=subject.chunks,
        num_microbatches=len(microbatches),
        seq_length=positions,
        micro_batch_size=rows,
        **options,
    )


def _logprobs(subject: Subject, rows: Rows) -> Tensor | None:
    """Compute log-probs [B, T] by the schedule, without gradients; None but on the last stage."""

    def forward_step(data: Any, chunk: Any) -> Any:
        microbatch = next(data)
        return subject.forward(chunk, microbatch), lambda output, non_loss_data: -output

    pieces = microbatches(subject, rows)
    with torch.no_grad():
        found = _schedule(
            subject, pieces, forward_step, forward_only=True, collect_non_loss_data=True
        )
    return all_positions(torch.cat(found)) if found else None


def _offload(subject: Subject) -> None:
    """Move optimizer state and parameters to the host, and free the gradients, as Megatron does."""
    # First, because the distributed optimizer's parameters in float32 are views of the model's.
    subject.optimizer.offload_to_cpu()
    for chunk in subject.chunks:
        chunk.offload_grad_buffers()
        for buffer in _buffers(chunk):
            buffer.offload_to_cpu(move_grads=False)


def _onload(subject: Subject, *, training: bool) -> None:
    for chunk in subject.chunks:
        for buffer in _buffers(chunk):
            buffer.reload_from_cpu(move_grads=False)
        chunk.module.cuda()  # the optimizer's own, where it updates the model's parameters in place
        if training:
            chunk.restore_grad_buffers()
    if training:
        subject.optimizer.restore_from_cpu()


def _buffers(chunk: Any) -> list[Any]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _state_of(subject: Subject) -> dict[str, Any]:
    """Copy parameters and optimizer state of this rank, as a checkpoint would.

    What the optimizer updates are main parameters in float32, where the model is in bfloat16.
    """
    megatron_idempotent.ensure_params_synced(subject.chunks)
    inner = _inner(subject.optimizer)
    return {
        "model": [
            [each.detach().clone() for each in chunk.module.parameters()]
            for chunk in subject.chunks
        ],
        "main": [[each.detach().clone() for each in _updated(one)] for one in inner],
        "optimizer": [
            [
                {
                    name: value.clone() if isinstance(value, Tensor) else value
                    for name, value in one.state[p].items()
                }
                for p in _updated(one)
                if p in one.state
            ]
            for one in inner
        ],
    }


def _restore(subject: Subject, state: dict[str, Any]) -> None:
    with torch.no_grad():
        for chunk, values in zip(subject.chunks, state["model"], strict=True):
            for parameter, value in zip(chunk.module.parameters(), values, strict=True):
                parameter.copy_(value)
    kept = zip(_inner(subject.optimizer), state["main"], state["optimizer"], strict=True)
    for one, values, states in kept:
        with torch.no_grad():
            for parameter, value in zip(_updated(one), values, strict=True):
                parameter.copy_(value)
        if states:
            for parameter, moments in zip(_updated(one), states, strict=True):
                one.state[parameter] = moments


def _updated(optimizer: Any) -> list[Any]:
    """Returns the parameters that a torch optimizer updates."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def _inner(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [each.optimizer for each in chained if getattr(each, "optimizer", None) is not None]
