"""Adapts this library's `TrainStep` and `accumulation_window`, and a loop of Megatron alone.

The classes also serve as examples of adapters.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

import megatron_idempotent
from megatron_idempotent import FSDPTrainStep, TrainStep, wire_train_config
from megatron_idempotent.megatron.schedules import sums_tokens_of_context_ranks
from megatron_idempotent.step import all_positions
from megatron_idempotent.window.accumulation import set_for

from . import batches
from .layouts import LossKind
from .parameters import inner_optimizers, updated_by
from .protocol import Finished, Packed, Part, Planted, Rows, Subject

_NO_OFFLOAD: Mapping[str, str] = MappingProxyType(
    {}
    if hasattr(DistributedDataParallel, "offload_grad_buffers")
    else dict.fromkeys(
        (
            *("offload-between-steps", "logprobs-while-offloaded", "offload-in-mid-step"),
            *("offload-one-part", "offload-again"),
        ),
        "Megatron before 0.16 frees no gradient buffers",
    )
)


class _Loss:
    """A loss for `TrainStep`: returns the sum of the losses of the positions, or sequences, that
    count; `TrainStep` divides the sum by their number.
    """

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
        total, _ = self._subject.loss(output, _described(microbatch))
        return total, {"nll": total}


def _described(microbatch: Any) -> Rows | Packed:
    """Return a microbatch in the form that `Subject.forward` takes: a pack that `TrainStep` made is
    converted to a dict, plain rows are returned unchanged.
    """
    return batches.described(microbatch) if "pack" in microbatch else microbatch


class Stateful:
    """Base class of adapters: saves, loads, offloads and onloads this rank's parameters and
    optimizer state.
    """

    subject: Subject
    parts: tuple[Part, ...] = ("weights", "gradients", "optimizer")

    def save(self) -> Any:
        """Return copies of this rank's parameters, main parameters and optimizer state.

        If the model is in bfloat16, "main" has the float32 parameters that the optimizer updates.
        """
        megatron_idempotent.ensure_params_synced(self.subject.chunks)
        return {
            "model": [p.detach().clone() for p in parameters_of(self.subject)],
            "main": [p.detach().clone() for _, p in updated(self.subject)],
            "optimizer": [
                {
                    name: value.clone() if isinstance(value, Tensor) else value
                    for name, value in inner.state[parameter].items()
                }
                for inner, parameter in updated(self.subject)
                if parameter in inner.state
            ],
        }

    def load(self, state: Any) -> None:
        """Write the copies that `save` returned back into the model's parameters and the optimizer,
        in place.
        """
        updates = list(updated(self.subject))
        values = [*state["model"], *state["main"]]
        with torch.no_grad():
            parameters = [*parameters_of(self.subject), *(main for _, main in updates)]
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
        if state["optimizer"]:
            for (inner, main), moments in zip(updates, state["optimizer"], strict=True):
                inner.state[main] = copy.deepcopy(moments)

    def offload(self, *, only: Part | None = None) -> None:
        """Move this rank's parameters and optimizer state to the host, and free the memory of its
        gradients, by Megatron's functions. With `only`, do this for "weights", "optimizer" or
        "gradients" alone.
        """
        self._away = {*self.parts} if only is None else {only}
        # The optimizer first: the distributed one's float32 parameters are views of the model's.
        if "optimizer" in self._away:
            self.subject.optimizer.offload_to_cpu()
        for chunk in self.subject.chunks:
            if "gradients" in self._away:
                chunk.offload_grad_buffers()
            if "weights" in self._away:
                of_weights = [b for b in buffers(chunk) if b.param_data is not None]
                for buffer in of_weights:
                    buffer.offload_to_cpu(move_grads=False)
                # Without a distributed optimizer the buffers hold no parameters. `module.cpu()`
                # would move the gradients too, whose memory is freed.
                for parameter in chunk.module.parameters() if not of_weights else ():
                    parameter.data = parameter.data.cpu()

    def onload(self, *, training: bool = True) -> None:
        """Undo `offload`: move parameters and optimizer state back to the device, and allocate the
        gradients again. With `training=False` only move the parameters back.
        """
        for chunk in self.subject.chunks:
            for buffer in buffers(chunk) if "weights" in self._away else ():
                buffer.reload_from_cpu(move_grads=False)
            # An optimizer that updates the model's parameters in place has moved these, too.
            chunk.module.cuda()
            if training and "gradients" in self._away:
                chunk.restore_grad_buffers()
        if training and "optimizer" in self._away:
            self.subject.optimizer.restore_from_cpu()


def buffers(chunk: Any) -> list[Any]:
    """Return a DDP chunk's buffers of parameters and gradients, including those of experts."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def parameters_of(subject: Subject) -> list[Any]:
    """Return this rank's parameters in all model chunks of a subject, in order."""
    return [p for chunk in subject.chunks for p in chunk.module.parameters()]


def updated(subject: Subject) -> Iterator[tuple[Any, Any]]:
    """Yield (torch optimizer, parameter) for each parameter that the subject's optimizer updates,
    such as a float32 main parameter.
    """
    for inner in inner_optimizers(subject.optimizer):
        yield from ((inner, parameter) for parameter in updated_by(inner))


class SplitStep(Stateful):
    """Adapts this library's `TrainStep` to the interface that checks call, `Adapter`. Its name for
    `certify` is `megatron_idempotent.proof.certify.adapters:SplitStep`.
    """

    cannot: Mapping[str, str] = _NO_OFFLOAD
    packs = True
    sequences = True
    order_stable = False
    loss_of: type[_Loss] = _Loss
    options: Mapping[str, Any] = MappingProxyType({"deadline_s": 20.0})
    """Further arguments of `TrainStep`."""

    def build(self, subject: Subject) -> None:
        self.subject = subject
        self.loss = self.loss_of(subject)
        wire_train_config(subject.chunks, subject.optimizer)
        self.step: Any = TrainStep(
            subject.chunks,
            subject.optimizer,
            forward=self.forward,
            order_stable=self.order_stable,
            **self.options,
        )

    def forward(self, chunk: Any, microbatch: Any) -> Tensor:
        return self.subject.forward(chunk, _described(microbatch))

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

    def finish(self, **kwargs: Any) -> Finished:
        result = self.step.finish(self.open, global_batch_size=1, **kwargs)
        return Finished(
            updated=result.updated, grad_norm=result.grad_norm, loss=result.metrics.get("nll")
        )

    def abort(self) -> None:
        self.step.abort()

    def logprobs(self, rows: Rows) -> Tensor | None:
        return _logprobs(self.subject, rows)

    def export(self) -> None:
        """Set `exported` to copies of this rank's parameters on the CPU, after waiting for pending
        parameter gathers, like a weight sync.
        """
        megatron_idempotent.ensure_params_synced(self.subject.chunks)
        self.exported = [p.detach().cpu().clone() for p in parameters_of(self.subject)]


class OrderStable(SplitStep):
    """Adapts `TrainStep(order_stable=True)`, whose bits do not depend on the order of microbatches,
    to the checks.
    """

    order_stable = True


class FSDPSplitStep(SplitStep):
    """Adapts `FSDPTrainStep`, which trains an FSDP2 model, to the checks."""

    packs = False
    parts = ()
    fsdp2 = True
    cannot = MappingProxyType({})

    def build(self, subject: Subject) -> None:
        self.subject = subject
        self.loss = self.loss_of(subject)
        (self.model,) = subject.chunks
        # `begin`, `finish` and `abort` are SplitStep's.
        self.step = FSDPTrainStep(
            self.model, subject.optimizer, forward=subject.forward, clip_grad=None, **self.options
        )

    def microbatch(self, rows: Rows | None, *, fail: bool = False) -> None:
        # The model's collectives need every rank: one without rows passes None.
        some = rows is not None and len(rows["input_ids"]) > 0
        super().microbatch(rows if some else None, fail=fail)

    def logprobs(self, rows: Rows) -> Tensor:
        with self.step.reading() as (model,):
            return -self.subject.forward(model, rows)

    def export(self) -> None:
        with self.step.reading() as (model,):
            self.exported = [p.full_tensor().clone() for p in model.parameters()]

    def save(self) -> dict[str, Any]:
        return copy.deepcopy(
            {"model": self.model.state_dict(), "optimizer": self.subject.optimizer.state_dict()}
        )

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.subject.optimizer.load_state_dict(state["optimizer"])

    def offload(self, *, only: Part | None = None) -> None:
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


class Megatron(Stateful):
    """Adapts Megatron without `TrainStep` to the checks: `microbatch` only collects rows, and
    `finish` calls Megatron's schedule once over all of them.
    """

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
        # A pipeline needs packs of one size.
        return [batches.one_pack(rows, subject.config, subject.max_tokens) for rows in pieces]

    def finish(self) -> Finished:
        self._zero()
        self._train(self.rows)
        return self._update()

    def _train(self, pieces: Sequence[Rows | Packed]) -> None:
        with _auxiliary_losses(self.subject) as self._weigh:
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
        self._weigh(rows)

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


class Window(Megatron):
    """Adapts `accumulation_window` to the checks: each call of `microbatch` runs Megatron's
    schedule once, within one window per optimizer step.
    """

    cannot: Mapping[str, str] = MappingProxyType(
        {
            **Megatron.cannot,
            "replica-without-rows": "a window in which a rank has no call raises, and others wait",
        }
    )

    def begin(self) -> None:
        self._zero()
        self._window = megatron_idempotent.window.accumulation_window(self.subject.chunks)
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
        """Leave the `accumulation_window` as an exception would, so that gradients are not reduced;
        then drop the gradients with `abort_window`.
        """
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
        {name: values[start : start + size] for name, values in rows.items()}
        for start in range(0, len(rows["input_ids"]), size)
    ]


@contextlib.contextmanager
def _auxiliary_losses(subject: Subject) -> Iterator[Callable[[Any], None]]:
    """Yield a function to call with each microbatch before its forward. If the subject's loss is a
    mean over sequences, it sets the coefficients of MoE and MTP losses to their values times the
    number of sequences in the microbatch ÷ the number of its positions. The values are restored at
    exit.

    Megatron multiplies each loss by the positions of its microbatch, and divides by the number that
    the loss functions return. If that counts sequences, the result is positions / sequences times
    too large.
    """
    modules = [module for chunk in subject.chunks for module in chunk.modules()]
    with contextlib.ExitStack() as stack:
        factors = []
        for name in ("moe_aux_loss_coeff", "mtp_loss_scaling_factor"):
            # 0.12 keeps a copy of the second factor in the block of MTP layers.
            for owner in (subject.config, *(module for module in modules if name in vars(module))):
                value = getattr(owner, name, None)
                if value and subject.loss_kind == "sequence":
                    set_for(stack, owner, name, value)  # restored when the stack closes
                    factors.append((owner, name, value))

        def weigh(microbatch: Any) -> None:
            rows, positions = microbatch["input_ids"].shape
            sequences = microbatch.get("sequences", rows)
            for owner, name, value in factors:
                setattr(owner, name, value * sequences / (rows * positions))

        yield weigh


def _schedule(
    subject: Subject, microbatches: Sequence[Rows | Packed], forward_step: Any, **options: Any
) -> Any:
    """Run Megatron's forward-backward schedule over microbatches, and return its result."""
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
    """Return the log-probs [B, T] of rows, computed by Megatron's schedule without gradients; None
    on pipeline stages before the last.
    """

    def forward_step(data: Any, chunk: Any) -> Any:
        microbatch = next(data)
        return subject.forward(chunk, microbatch), lambda output, non_loss_data: -output

    pieces = microbatches(subject, rows)
    with torch.no_grad():
        logprobs = _schedule(
            subject, pieces, forward_step, forward_only=True, collect_non_loss_data=True
        )
    return all_positions(torch.cat(logprobs)) if logprobs else None
