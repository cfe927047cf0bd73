"""Runs a split step on FSDP2's `fully_shard` and torch's optimizers: `FSDPTrainStep`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron_idempotent.fp8.packing import TokenAlignment
from megatron_idempotent.window.agreement import collective_timeout

from . import snapshot
from .backend import Backend, Forward
from .fsdp_run import (
    FSDPCall,
    Shards,
    Watch,
    check_internals,
    keep_gradients,
    keep_scaler,
    keep_scheduler,
    vocabulary_of,
)
from .lifecycle import SplitStep
from .loss import LossResult, StepLoss, StepTotals, Update, reason_to_skip
from .microbatches import TOKENS, Batch, Calls, Microbatch, check_ids
from .packs import NO_ALIGNMENT


class FSDPBackend(Backend):
    """Runs a step on this rank's FSDP2 model, torch optimizer and scheduler.

    Its gradients are not `narrow`, because a GradScaler finds the scale at which sums are in range.
    `gradient_bits` returns None, because gradients are unsharded before the reduction, and no
    offload restores unsharded gradients.
    """

    options: FSDPTrainStep

    def __init__(self, step: FSDPTrainStep) -> None:
        self.shards = shards = _checked_shards(step.model, step.optimizer)
        remedy = "pass one of torch.optim.lr_scheduler, or add them"
        snapshot.check_scheduler(step, remedy, "step", "state_dict", "load_state_dict")
        super().__init__(step, step.optimizer, step.scheduler)
        self._own_update = snapshot.OpenUpdate(undo=step.undo)
        self._model = shards.model
        self._scaler = step.grad_scaler
        self._watch = Watch(self._model)
        self._sizes = vocabulary_of(self._model)
        self.lowers_scale = self._scaler is not None and bool(self._scaler.is_enabled())
        self.replica, self.replicas = shards.replica, shards.replicas
        self.has_losses = self.is_reporting_rank = shards.is_reporting_rank
        self._restore_flags: list[snapshot.Restore] = []

    @property
    def device(self) -> Any:
        return self.shards.device

    @property
    def must_agree(self) -> dict[str, Any]:
        own_settings = {"clip_grad": self.options.clip_grad, "grad_scaler": self.lowers_scale}
        return {**own_settings, **super().must_agree}

    @property
    def alignment(self) -> TokenAlignment:
        return self.options.alignment or NO_ALIGNMENT

    def _refuse_other_step(self) -> None:
        if self._watch.is_taken():
            raise RuntimeError(
                "begin(): another FSDPTrainStep is open for this model, and FSDP2 would reduce the "
                "gradients of both together: finish() or abort() it first"
            )

    def _keep(self) -> list[snapshot.Restore]:
        self.shards.drop()
        self._restore_flags = self.shards.keep_flags()
        self.modules = list(self._model.modules())
        copies = [
            *self._restore_flags,
            snapshot.keep_modules(self.modules),
            snapshot.keep_torch(),
            *snapshot.keep_groups(self.optimizer.param_groups),
        ]
        if self._scheduler is not None:
            copies.append(keep_scheduler(self._scheduler))
        if self._scaler is not None:
            copies.append(keep_scaler(self._scaler, self.device))
        return copies

    def _start(self) -> None:
        self._watch.install()
        self._model.set_is_last_backward(True)
        self._model.train()

    def writes(self) -> snapshot.Writes:
        return self.shards.writes()

    def accept(self, calls: Calls) -> None:
        """Raise `ValueError` for packs and unknown token ids if `forward` is the default one.
        A `forward` of the caller's own accepts everything.
        """
        if self.options.forward is not tokens_forward:
            return
        if any(microbatch.spans is not None for call in calls for microbatch in call):
            raise ValueError(
                "packs, and FSDPTrainStep() no forward, without which a model would take a pack "
                "for one sequence: give it a forward that hands the pack's cu_seqlens and "
                "position_ids on to the model's attention"
            )
        check_ids(self._sizes, calls, read=self._reads_ids)

    def lockstep_group(self) -> tuple[bool, Any]:
        return True, None  # every layer's parameters are gathered from all ranks

    def run(
        self, microbatches: Sequence[Microbatch], loss: StepLoss, *, reduce: bool, dummies: bool
    ) -> list[LossResult]:
        self._is_reducing = self._is_reducing or reduce
        call = FSDPCall(self.shards, self._watch, self.options.forward, self._scaler)
        results = []
        with ExitStack() as stack:
            # Half, so that a rank whose peer has left the model still meets it below.
            stack.enter_context(
                collective_timeout(self.shards.process_groups(), self.options.deadline_s / 2)
            )
            if dummies:
                # Buffers and random states stay as if no dummy microbatch had been run.
                stack.callback(snapshot.keep_torch())
                stack.callback(snapshot.keep_modules(self.modules))
            snapshot.switch_to_training([self._model], self.modules)
            for number, microbatch in enumerate(microbatches, start=1):
                last = reduce and number == len(microbatches)
                self._model.set_requires_gradient_sync(last)
                result = call.run(microbatch, None if dummies else loss)
                if call.stopped:
                    break
                if result is not None:
                    results.append(result)
        call.agree(self.options.deadline_s)
        return results

    def check_ready(self, increment: int | None) -> None:
        strangers = stranger_shapes(self.shards, self.optimizer)
        if strangers:
            raise RuntimeError(
                f"finish(): {len(strangers)} of the optimizer's parameters are not the model's any "
                f"more, such as one of shape {strangers[0]}, so it would not update the model: "
                "load weights in place (not with assign=True)"
            )

    def parameter_norm(self) -> Any:
        return snapshot.sum_of_norms(self.shards.trained())

    def bad_parameter(self) -> str | None:
        self.shards.reshard()
        return snapshot.first_not_finite(
            (name, parameter.to_local())
            for name, parameter in self._model.named_parameters()
            if isinstance(parameter, DTensor) and parameter.requires_grad
        )

    def update(self, totals: StepTotals, increment: int | None, timeout_s: float) -> Update:
        with collective_timeout(self.shards.process_groups(), timeout_s):
            if not self._is_reducing:
                self.shards.reduce()
            self.shards.multiply(1.0 / totals.normalizer)
            grad_norm, skipped = self._clipped()
        if skipped is not None:
            return Update(skipped=skipped, grad_norm=grad_norm)
        self._own_update.reset()
        self._own_update.begin([], [self.optimizer])
        if self._scaler is None or not math.isfinite(grad_norm or 0.0):
            # The scaler has been updated for such gradients already, and would unscale them again.
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        if self._scheduler is not None:
            self._scheduler.step()
        return Update(skipped=None, grad_norm=grad_norm)

    def _clipped(self) -> tuple[float | None, str | None]:
        """Clip the gradients; return their norm before clipping, and why to skip the update.
        The reason is None if the update is to be made.

        The norm is None if gradients overflowed, and the loss scale is lower now.

        Raises:
            RuntimeError: the norm is not finite, no lower scale would change that, and the step
                refuses it.
        """
        scale = None if self._scaler is None else self._scaler.get_scale()
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        # This reshards: an evaluation may have left unsharded copies, which the update would not
        # change.
        parameters = [p for p in self.shards.parameters() if p.grad is not None]
        norm = total_norm([p.grad for p in parameters if p.grad is not None])
        grad_norm = float(norm)
        if not math.isfinite(grad_norm):
            if self._scaler is not None:
                self._scaler.update()
                new_scale = self._scaler.get_scale()
                if new_scale < scale:
                    return (
                        None,
                        f"gradients overflowed; the loss scale is {new_scale:g} now, not {scale:g}",
                    )
            skipped = reason_to_skip(grad_norm, self.options.non_finite)
            if skipped is not None:
                return grad_norm, skipped
        if self.options.clip_grad is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.options.clip_grad, norm)
        return grad_norm, None

    def close(self) -> None:
        for restore in self._restore_flags:  # a step that has ended keeps its other changes
            restore()
        self._restore_flags = []
        super().close()
        self._watch.remove()

    def _drop_gradients(self) -> None:
        self.shards.drop()


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients on all ranks together, a scalar. All ranks take part.

    It is the norm of one norm per device mesh, each computed as `clip_grad_norm_` does.
    """
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        assert isinstance(gradient, DTensor)
        by_mesh.setdefault(gradient.device_mesh, []).append(gradient)
    norms = []
    for group in by_mesh.values():
        norm = torch.nn.utils.get_total_norm(group)
        assert isinstance(norm, DTensor)
        norms.append(norm.full_tensor())
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def stranger_shapes(shards: Shards, optimizer: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the optimizer's parameters that are not in the model."""
    model_ids = {id(parameter) for parameter in shards.parameters()}
    return [
        tuple(parameter.shape)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in model_ids
    ]


def tokens_forward(model: Any, microbatch: Batch) -> torch.Tensor:
    """Call the model with the microbatch's `input_ids` [B, T], and return its output: the default
    `forward`.
    """
    output: torch.Tensor = model(microbatch[TOKENS])
    return output


@dataclasses.dataclass(eq=False, repr=False)
class FSDPTrainStep(SplitStep):
    """Runs one optimizer step, whose batches come in any number of `microbatch()` calls, as with
    `TrainStep`, on a model that torch's `fully_shard` shards; needs no Megatron.

    The gradient is, bit for bit, that of one loop over all microbatches in the same order that
    reduces in the last backward. The loss is summed, and the gradient divided by what is valid on
    all ranks, whatever FSDP2 divides by. Gradients are reduced once. Until then they are
    accumulated unsharded, as with `set_requires_gradient_sync(False)`, in the reduce dtype: each
    rank needs the memory of a whole model's gradients.

    Ranks meet in every layer, where its parameters are gathered, so all of them take part in each
    `microbatch()`; those with fewer rows than others send zeros through the model. A failure
    in the loss, or in `forward` before or after the model, stops the step on all ranks. So does one
    in the model if all ranks have it at the same place; else the others may wait in a collective,
    and the session is poisoned.

    Args:
        model: the root that `fully_shard` was applied to, on a 1-D or 2-D mesh, with or without
            tensor parallelism; all of its parameters that need gradients are sharded.
        optimizer: a torch optimizer of its parameters, made after `fully_shard`.
        scheduler: its `step()` follows each update, and its `state_dict()` is what `abort()` goes
            back to; may be None.
        forward: a function of (model, microbatch) that returns the output, a tensor.
        shared: names in batches that are the same for all rows, see `TrainStep`.
        shape, counts: functions of a ready microbatch, see `TrainStep`.
        alignment: multiples of tokens that packs of a budget are padded to; None for no padding.
        non_finite: what `finish()` does if a loss or the norm of the gradients is NaN or infinite,
            and no scaler lowers its scale for it, see `TrainStep`.
        nothing_valid: what `finish()` does if nothing is valid on any rank, see `TrainStep`.
        clip_grad: largest norm of the gradient; None to leave it as it is.
        grad_scaler: a `torch.amp.GradScaler` for half precision: a step whose gradients overflow
            is skipped, and its scale is lowered.
        deadline_s: how long a rank waits for the others where ranks agree, in seconds.
        undo: copy parameters and optimizer state to the host before each update, so that one that
            fails half-way can be aborted too.

    Raises:
        ValueError: a model that is not sharded, or not all of it; an optimizer of other parameters;
            a scheduler that cannot be put back.
        TypeError: `forward` is no function, or `undo` is neither True nor False.
        RuntimeError: a torch whose FSDP2 lacks what a step relies on; the error names it.

    Example:
        step = FSDPTrainStep(model, optimizer, scheduler)
        step_id = step.begin(loss, global_batch_size=256, micro_batch_size=4)
        for batch in stream:
            step.microbatch(step_id, batch)
        result = step.finish(step_id)
    """

    model: Any
    optimizer: Any
    scheduler: Any = None
    forward: Forward = dataclasses.field(default=tokens_forward, kw_only=True)
    clip_grad: float | None = dataclasses.field(default=1.0, kw_only=True)
    grad_scaler: Any = dataclasses.field(default=None, kw_only=True)

    def _make_backend(self) -> FSDPBackend:
        backend = FSDPBackend(self)
        self._shards = backend.shards
        return backend

    @contextmanager
    def reading(self) -> Iterator[list[Any]]:
        """Context manager that yields the model for log-probs, evaluation or export, also while a
        step is open.

        It comes in a list, as `TrainStep` gives its chunks. Inside, parameters are DTensors with
        the values of the last update; modules are in eval mode and no gradient is recorded.
        Afterwards modes, buffers, random states and gradients are what they were. All
        ranks take part in a forward and in `full_tensor()`.

        Example:
            with step.reading() as [model]:
                weights = {n: p.full_tensor() for n, p in model.named_parameters()}
        """
        model = self._shards.model
        restore_gradients = keep_gradients(self._shards)
        self._shards.reshard()
        try:
            with snapshot.evaluating([model]):
                yield [model]
        finally:
            # Forwards leave modules unsharded, which an update would make stale.
            self._shards.settle()
            restore_gradients()


def _checked_shards(model: Any, optimizer: Any) -> Shards:
    if not isinstance(model, FSDPModule):
        raise ValueError(
            f"FSDPTrainStep() got a {type(model).__name__} that is not fully sharded: apply "
            "torch.distributed.fsdp.fully_shard to its layers, and then to the model itself"
        )
    check_internals(model)
    shards = Shards(model)
    if shards.is_part:
        raise ValueError(
            f"FSDPTrainStep() got a {type(model).__name__} that has run as a part of a larger "
            "sharded model: pass that model"
        )
    shards.settle()  # a forward may have left parameters whole
    unsharded = [
        name
        for name, parameter in shards.model.named_parameters()
        if parameter.requires_grad and not isinstance(parameter, DTensor)
    ]
    if unsharded:
        raise ValueError(
            f"FSDPTrainStep() got a model with {len(unsharded)} parameters that are not sharded, "
            f"whose gradients nothing reduces, such as {unsharded[0]!r}: leave them out of "
            "ignored_params, or freeze them"
        )
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(
            f"FSDPTrainStep() got a {type(optimizer).__name__} as optimizer: pass a "
            "torch.optim.Optimizer of the sharded parameters"
        )
    strangers = stranger_shapes(shards, optimizer)
    if strangers:
        raise ValueError(
            f"FSDPTrainStep() got an optimizer of which {len(strangers)} parameters are not the "
            f"model's, such as one of shape {strangers[0]}: make it after fully_shard, which "
            "replaces parameters"
        )
    return shards
