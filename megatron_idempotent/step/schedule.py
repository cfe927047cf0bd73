"""Replaces a Megatron schedule in a framework's code: its calls run in one open step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_idempotent.megatron.ddp import checked_chunks

from .loss import Kind, Normalizer, StepCounts
from .megatron import TrainStep
from .results import StepResult


class StepSchedule:
    """Is called in place of Megatron's schedule function, and accumulates the gradients of several
    calls into one optimizer step.

    Use it in code that calls `get_forward_backward_func()` with a forward step of its own. Each
    call that trains runs its microbatches in the open step of a `TrainStep`, opens one if none is
    open, and reduces nothing. `finish()` reduces once and updates. Calls with `forward_only` go to
    Megatron's schedule.

    Losses mean what they mean to Megatron. With two values, (loss, what is reported), a loss is a
    mean over the call's microbatches and over data-parallel ranks; under
    `calculate_per_token_loss` it is summed over ranks. With three, (sum, tokens, what is reported),
    it is divided by the microbatch's tokens before that; under `calculate_per_token_loss` sums are
    added up, and `finish()` divides by the tokens of all calls and ranks. In all other cases the
    losses of several calls are added up, so the caller has to divide each by the count of the whole
    step, as for a loss over a global batch. MoE, MTP and other auxiliary losses are a mean over the
    microbatches of a call, as Megatron has them.

    Args:
        model_chunks, optimizer, scheduler: as for `TrainStep`.
        auxiliary_weight: a function of what the data iterator yields. It returns the number that
            the microbatch's auxiliary losses, which are means over it, are multiplied by in its
            replica's gradient. None for Megatron's, 1 / num_microbatches. Under
            `calculate_per_token_loss` Megatron multiplies them by their tokens as well; None is 1
            there.
        options: those of `TrainStep`, but for `forward`, `shape` and `counts`.

    Raises:
        ValueError: as `TrainStep`.
        RuntimeError: as `TrainStep`.

    Example:
        schedule = StepSchedule(chunks, optimizer)
        for data_iterator in requests:  # where the code had get_forward_backward_func()(…)
            reported = schedule(data_iterator=data_iterator, model=chunks, **call)
        result = schedule.finish(lr=1e-6)
    """

    def __init__(
        self,
        model_chunks: Any,
        optimizer: Any = None,
        scheduler: Any = None,
        *,
        auxiliary_weight: Callable[[Any], float] | None = None,
        **options: Any,
    ) -> None:
        self._chunks = checked_chunks("StepSchedule()", model_chunks, optimizer)
        self._auxiliary_weight = auxiliary_weight
        self.step = TrainStep(
            self._chunks,
            optimizer,
            scheduler,
            forward=_forward,
            shape=_shape_of,
            counts=_shape_of,
            **options,
        )
        """The `TrainStep`, for `reading()`."""

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., tuple[Any, Callable[[Any], Any]]],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        forward_only: bool = False,
        **options: Any,
    ) -> list[Any]:
        """Run forward and backward of the next `num_microbatches` items of the data iterator; do
        not reduce gradients or update parameters.

        The arguments are those of Megatron's schedules; of an interleaved pipeline's iterators,
        which yield the same, the first one is read.

        Returns:
            The values that the loss function reported, one per microbatch, in order, on the ranks
            that have the loss; empty on others.

        Raises:
            ValueError: `model` has other chunks than the step.
            Exception: as `TrainStep.microbatch`; the step stays open until `abort()`.
        """
        if forward_only:
            outputs: list[Any] = get_forward_backward_func()(
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                model=model,
                num_microbatches=num_microbatches,
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                forward_only=True,
                **options,
            )
            return outputs
        chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        if [id(chunk) for chunk in chunks] != [id(chunk) for chunk in self._chunks]:
            raise ValueError(
                f"StepSchedule() was called with {len(chunks)} model chunks that are not the "
                f"{len(self._chunks)} that it was made with: make one for each model"
            )
        if isinstance(data_iterator, (list, tuple)):
            data_iterator = data_iterator[0]
        shape = micro_batch_size, seq_length
        batches = [
            _ScheduleBatch(next(data_iterator), shape, forward_step_func, num_microbatches, self)
            for _ in range(num_microbatches)
        ]
        self.step.microbatch(self.begin(), microbatches=batches)
        return [batch.reported[0] for batch in batches if batch.reported]

    def prepare(self) -> None:
        """Create the process groups over which ranks exchange their status.
        All ranks call it. See `TrainStep.prepare`.

        The schedule's first call makes the groups by itself. If ranks make that call at different
        times, call this on all of them before.
        """
        self.step.prepare()

    def begin(self) -> str:
        """Open a step if none is open, and return the id of the open step. All ranks call it for a
        new step.
        """
        if self.step.open_step_id is not None:
            return self.step.open_step_id
        per_token = get_model_config(self._chunks[0]).calculate_per_token_loss
        if per_token:
            return self.step.begin(_ScheduleLoss(), divisor=_tokens)
        # DDP averages over replicas. At the end, so that fp16 has the range that it has there.
        replicas = parallel_state.get_data_parallel_world_size()
        return self.step.begin(_ScheduleLoss(), divisor=float(replicas))

    def finish(
        self, *, global_batch_size: int | None = None, lr: float | None = None
    ) -> StepResult:
        """Reduce and update once, on all ranks: see `TrainStep.finish`.

        If that raises, `abort()` on all ranks, then run the calls of the step again, unless the
        message says that parameters are half updated.
        """
        return self.step.finish(self.begin(), global_batch_size=global_batch_size, lr=lr)

    def abort(self) -> None:
        """Drop the gradients that the calls since the last step have added, on all ranks."""
        self.step.abort()


class _ScheduleBatch:
    """Holds one microbatch that the framework's iterator yielded, and what the framework's loss
    function returned for that microbatch.
    """

    def __init__(
        self,
        batch: Any,
        shape: tuple[int, int],
        forward_step: Any,
        number: int,
        schedule: StepSchedule,
    ) -> None:
        self.batch, self.shape, self.forward_step = batch, shape, forward_step
        config = get_model_config(schedule._chunks[0])
        self.per_token = bool(config.calculate_per_token_loss)
        self.parts = parallel_state.get_context_parallel_world_size()
        # A schedule multiplies losses by the number of parts; DDP divides by it where it averages.
        self.factor = number / self.parts if self.per_token else float(number)
        self.auxiliary_weight = schedule._auxiliary_weight
        self.loss_func: Any = None
        self.reported: list[Any] = []


class _ScheduleLoss:
    """Implements `StepLoss`: calls the loss function that a framework's forward step returned."""

    kind: Kind = "none"
    normalizers: ClassVar[Mapping[str, Normalizer]] = {"num_tokens": "none"}

    def auxiliary_weight(self, batch: _ScheduleBatch) -> float:
        positions = batch.shape[0] * batch.shape[1] if batch.per_token else 1
        if batch.auxiliary_weight is not None:
            return batch.auxiliary_weight(batch.batch) * positions
        return float(positions) if batch.per_token else 1 / batch.factor

    def __call__(self, output: Any, batch: _ScheduleBatch) -> tuple[Tensor, dict[str, Any]]:
        loss, *tokens, reported = batch.loss_func(output)
        batch.reported.append(reported)
        if not tokens:
            return loss / batch.factor, {}
        if batch.per_token:
            return loss, {"num_tokens": tokens[0]}
        return loss / tokens[0].clamp(min=1) / (batch.factor * batch.parts), {}


def _tokens(counts: StepCounts) -> float:
    """Return the tokens that loss functions have reported on all ranks, at least 1.
    The gradients are divided by this number.
    """
    return max(counts.reported.get("num_tokens", 0.0), 1.0)


def _forward(model: Any, batch: Any) -> Any:
    output, batch.loss_func = batch.forward_step(iter([batch.batch]), model)
    return output


def _shape_of(batch: _ScheduleBatch) -> tuple[int, int]:
    return batch.shape
