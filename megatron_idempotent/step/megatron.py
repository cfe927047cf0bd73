"""Runs a split step on Megatron's schedules, DDP and optimizers: `TrainStep`.

Legend: B rows, T positions of a row or of a pack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_idempotent.fp8.packing import TokenAlignment
from megatron_idempotent.megatron import moe
from megatron_idempotent.megatron.ddp import (
    bits,
    bucket_groups,
    checked_chunks,
    reducing_on_host,
    start_held,
    trained,
)
from megatron_idempotent.megatron.expert_replay import (
    ROUTED_EXPERTS,
    ExpertReplay,
    ReplayMode,
    Span,
)
from megatron_idempotent.megatron.optimizers import count_outdated
from megatron_idempotent.megatron.schedules import (
    are_held,
    open_windows,
    sums_tokens_of_context_ranks,
)
from megatron_idempotent.patching.needs import check_applied
from megatron_idempotent.window.abort import abort_window, drop_collectives
from megatron_idempotent.window.agreement import (
    collective_timeout,
    describe,
    is_poisoned,
    poison,
)
from megatron_idempotent.window.missed_collectives import gather_params

from . import snapshot
from .backend import Forward
from .exact_sums import ExactSums
from .lifecycle import SplitStep
from .loss import StepLoss, StepTotals, Update, lacks_auxiliary_weight
from .megatron_checks import NEEDS, refuse_chunks, refuse_strangers
from .megatron_run import MegatronModel, forget_inference
from .microbatches import (
    ATTENTION_MASK,
    LENGTHS,
    POSITIONS,
    TOKEN_MASK,
    TOKENS,
    Batch,
    Calls,
    Microbatch,
    check_ids,
    field_of,
    is_packed,
    on_host,
    refuse_faults,
)
from .pack_layout import (
    context_parallel_ranks,
    has_auxiliary_losses,
    own_positions,
    packed_inputs,
    padding_inputs,
)
from .packs import real_tokens


def gpt_forward(model: Any, microbatch: Batch) -> torch.Tensor:
    """Call a `GPTModel` with `gpt_inputs`, and return its output.

    That is logits [B, T, V] on the last pipeline stage ([1, T, V] for a pack), hidden states on
    the others.
    """
    output: torch.Tensor = model(**gpt_inputs(model, microbatch))
    return output


def gpt_inputs(model: Any, microbatch: Batch) -> dict[str, Any]:
    """Return the arguments that a `GPTModel` is called with for a microbatch.

    Rows are `input_ids` [B, T], with `position_ids` (0..T-1 if there are none), an
    `attention_mask`, and `lengths` [B] if they are padded at the end. A pack is `input_ids` [1, T]
    or [T] with a `Pack`, Megatron's `PackedSeqParams`, or `cu_seqlens` and, where sequences are
    padded, `cu_seqlens_padded`. Padding after a sequence belongs to it in attention, which is
    causal, so that no token sees it. Routers (from 0.16 on) and MTP heads are told where the
    padding of a `Pack` or of rows with `lengths` is, so that their losses count tokens alone.
    Routers with quantile balancing are not told, which Megatron refuses, and those with an expert
    bias only with `expert-bias-refuses-padding`.

    Under context parallelism a microbatch has whole rows and packs, and the model is given this
    rank's `own_positions`; a mask [B, 1, T, T] is cut to the rank's queries.

    Args:
        model: a chunk, in any wrappers.
        microbatch: one microbatch of a step.

    Raises:
        ValueError: a pack of more than one row, or positions that context-parallel ranks cannot
            share.

    Example:
        stats = model_logprobs(model, **gpt_inputs(model, microbatch), targets=targets)
    """
    if is_packed(microbatch):
        return packed_inputs(model, microbatch)
    tokens, config = microbatch[TOKENS], get_model_config(model)
    positions, mask = microbatch.get(POSITIONS), microbatch.get(ATTENTION_MASK)
    lengths = microbatch.get(LENGTHS)
    padded = lengths is not None and has_auxiliary_losses(config)
    if positions is None or padded:
        place_T = torch.arange(tokens.shape[1], device=tokens.device)
        positions = place_T.expand_as(tokens) if positions is None else positions
    parts = {TOKENS: tokens, POSITIONS: positions}
    if padded:
        real_BT = place_T < torch.as_tensor(lengths, device=tokens.device)[:, None]
        # In a microbatch of padding alone all counts as real: a mean over no tokens is NaN.
        parts |= padding_inputs(config, real_BT | ~real_BT.any())
    if config.context_parallel_size > 1:
        if mask is not None and mask.dim() == 4 and mask.shape[2] == tokens.shape[1]:
            mask = own_positions(mask, dim=2)
        parts = {name: own_positions(value) for name, value in parts.items()}
    return {**parts, ATTENTION_MASK: mask}


class MegatronBackend(MegatronModel):
    """Runs a step on this rank's model chunks, Megatron optimizer and scheduler."""

    def __init__(self, step: TrainStep) -> None:
        chunks = checked_chunks("TrainStep()", step.model_chunks, step.optimizer)
        refuse_chunks(chunks, order_stable=step.order_stable)
        refuse_strangers(chunks, step.optimizer)
        remedy = "pass an OptimizerParamScheduler, or an object with step() and without __slots__"
        snapshot.check_scheduler(step, remedy, "step", "__dict__")
        super().__init__(chunks, step, step.optimizer, step.scheduler)
        self._sums = ExactSums(self.chunks) if step.order_stable else None
        self.may_overlap = self._sums is None
        if step.router_replay != "off":
            self.replay = ExpertReplay(self.chunks, mode=step.router_replay, of="TrainStep()")
        self._last_shift: int | None = None
        self._window = _StepWindow(self)
        self._context_rank, self._context_ranks = context_parallel_ranks()
        self.replicas = int(parallel_state.get_data_parallel_world_size())
        self.has_losses = bool(
            parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == 0
        )
        self.is_reporting_rank = self.has_losses and self._context_rank == 0
        stages = int(parallel_state.get_pipeline_model_parallel_world_size())
        self.microbatch_multiple = stages if len(self.chunks) > 1 else 1
        # A layer has 12 x hidden x hidden weights, and 2 x hidden products for each token of the
        # context.
        self.attention = 1.0 / (6 * int(self.configs[0].hidden_size))
        self.lowers_scale = self._own_update.lowers_scale

    @property
    def must_agree(self) -> dict[str, Any]:
        return {
            "calculate_per_token_loss": self.per_token,
            "order_stable": self._sums is not None,
            "router_replay": self.replay and self.replay.mode,
            **super().must_agree,
        }

    @property
    def narrow(self) -> bool:
        # With calculate_per_token_loss Megatron sums too, and has the same bits.
        return not self.per_token and any(config.fp16 for config in self.configs)

    @property
    def alignment(self) -> TokenAlignment:
        return self.options.alignment or TokenAlignment.of_config(self.configs[0])

    def _refuse_other_step(self) -> None:
        if are_held(self.chunks):
            raise RuntimeError(
                "begin(): an accumulation_window() or another TrainStep is open for these chunks, "
                "and gradients of two steps cannot be in one buffer: finish() or abort() it first"
            )
        steps = [window for window in open_windows if isinstance(window, _StepWindow)]
        if any(window.shares_modules(self.chunks) for window in steps):
            raise RuntimeError(
                "begin(): a TrainStep is open for another DDP over the same modules, and to abort "
                "one of the two would undo what the other has done: finish() or abort() the open "
                "one first"
            )

    def _keep(self) -> list[snapshot.Restore]:
        self.modules = [module for chunk in self.chunks for module in chunk.modules()]
        return [
            snapshot.keep_modules(self.modules),
            *snapshot.keep_megatron(
                self.chunks, self.optimizer, self._scheduler, auxiliary=self.has_auxiliary
            ),
        ]

    def _start(self) -> None:
        # A new window each time: an interrupted call may have left the last one marked as running.
        self._window = _StepWindow(self)
        open_windows.append(self._window)
        self._last_shift, self.shift = None, 0
        forget_inference(self.modules)
        snapshot.switch_to_training(self.chunks, self.modules)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        if self._sums is not None:
            self._sums.open()

    def writes(self) -> snapshot.Writes:
        parameters = tuple(param._version for param in self._ddp_parameters())
        return snapshot.Writes(self.gradient_writes(), parameters, reducing_on_host(self.chunks))

    def gradient_bits(self) -> Any:
        # Exact sums move gradients out of these buffers after each backward.
        return None if self._sums is not None else sum(map(bits, self.chunks))

    def accept_loss(self, loss: StepLoss) -> None:
        if self.has_auxiliary and lacks_auxiliary_weight(loss):
            names = ", ".join(moe.auxiliary_losses(self.configs[0]))
            if names:
                raise ValueError(
                    f"begin() got a loss of kind {loss.kind!r} for a model with {names}, whose "
                    "losses are means over a microbatch: give the loss an `auxiliary_weight`, the "
                    "number that each of these means is multiplied by before the divisor applies"
                )

    def accept(self, calls: Calls) -> None:
        self._refuse_frozen()
        self._refuse_autocast()
        if self.forward is gpt_forward:
            refuse_faults(calls, partial(_position_fault, self.configs[0], self._context_ranks))
            check_ids(self.sizes, calls, read=self._reads_ids)
        if self.replay is not None:
            refuse_faults(calls, partial(_route_fault, self.replay, read=self._reads_ids))
        stages = self.microbatch_multiple
        for microbatches in calls:
            if len(microbatches) % stages:
                raise ValueError(
                    f"{len(microbatches)} microbatches of equal size for an interleaved pipeline "
                    f"of {stages} stages, whose schedule takes multiples of {stages}: pad the "
                    "batch with rows whose sample_mask is 0"
                )

    def _ddp_parameters(self) -> Iterator[Any]:
        """Yield the parameters that DDP was built with, whose gradients it reduces."""
        return (param for chunk in self.chunks for param in chunk.param_to_bucket_group)

    def _refuse_frozen(self) -> None:
        """Raise `RuntimeError` if all parameters that DDP was built with are frozen now.

        Upstream asserts then, as it waits for gradients.
        """
        if any(param.requires_grad for param in self._ddp_parameters()):
            return
        number = len(list(self._ddp_parameters()))
        if number:
            raise RuntimeError(
                f"all {number} parameters that DDP was built with are frozen now "
                "(requires_grad=False), and it waits for their gradients: freeze parameters before "
                "you build DDP and the optimizer, and read a model that is not trained in reading()"
            )

    def _refuse_autocast(self) -> None:
        """Raise `RuntimeError` for a float32 model inside of `torch.autocast`.
        Its backward would meet weights of another type.
        """
        device = self.device.type
        is_float32 = self.configs[0].params_dtype == torch.float32
        if is_float32 and torch.is_autocast_enabled(device):
            raise RuntimeError(
                f"microbatch() got a model in float32 inside of torch.autocast({device!r}), which "
                f"computes in {torch.get_autocast_dtype(device)}, where Megatron's layers take the "
                "type of their config: leave the context, or build the model with bf16=True"
            )

    def divide_losses(self, shift: int) -> None:
        if self._last_shift is not None:
            for chunk in self.chunks:
                chunk.scale_gradients(2.0 ** (self._last_shift - shift))
        self._last_shift = self.shift = shift

    def check_ready(self, increment: int | None) -> None:
        if self.optimizer is None:
            raise RuntimeError("finish(): TrainStep() was made without an optimizer")
        if increment is None and self._scheduler is not None:
            raise ValueError(
                "finish() got no global_batch_size, nor did begin(), and the scheduler advances by "
                "it: give it to either"
            )
        if any(config.finalize_model_grads_func is None for config in self.configs):
            raise RuntimeError(
                "finish(): config.finalize_model_grads_func is None, so gradients would never be "
                "reduced: set it (megatron_idempotent.wire_train_config does)"
            )

    def join(self, *, wait: bool = True) -> None:
        with collective_timeout(self.groups(), self.deadline_s):
            for chunk in self.chunks:
                gather_params(chunk, wait=wait)

    def parameter_norm(self) -> Any:
        return snapshot.sum_of_norms(param for chunk in self.chunks for param in trained(chunk))

    def outdated_main_parameters(self) -> Any:
        return count_outdated(self.optimizer, self.device)

    def bad_parameter(self) -> str | None:
        return snapshot.first_not_finite(
            (name, parameter)
            for chunk in self.chunks
            for name, parameter in chunk.module.named_parameters()
            if parameter in chunk.param_to_bucket_group
        )

    def check_gradients(self) -> None:
        self._refuse_frozen()
        if self._sums is not None:
            self._sums.check()
        for chunk in self.chunks:
            options = chunk.ddp_config
            large = getattr(options, "check_for_large_grads", False)
            for group in bucket_groups(chunk):
                # In a reduction one rank would raise, and the others wait for it.
                if (options.check_for_nan_in_grad or large) and group.grad_reduce_handle is None:
                    group.check_grads(
                        check_for_nan_or_inf=options.check_for_nan_in_grad, check_for_large=large
                    )

    def update(self, totals: StepTotals, increment: int | None, timeout_s: float) -> Update:
        with collective_timeout(self.groups(), timeout_s):
            self._finalize(totals)
            grad_norm, skipped = self._own_update.run()
        if skipped is None and self._scheduler is not None:
            self._scheduler.step(increment=increment)
        return Update(skipped=skipped, grad_norm=grad_norm)

    def _finalize(self, totals: StepTotals) -> None:
        if self._sums is not None:
            self._sums.put()
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_grad_reduce and not self._is_reducing:
                start_held(chunk)  # else finalizing dispatches by itself
        finalize = self.configs[0].finalize_model_grads_func
        counted = self.per_token and totals.is_counted
        tokens = None
        if counted:
            # Context-parallel ranks are given the same rows, so that only the first of them counts,
            # where finalizing sums over them too.
            is_counting_rank = self._context_rank == 0 or not sums_tokens_of_context_ranks()
            # An int, as schedules count. A caller's counts may have fractions on some of the ranks,
            # and all ranks have to sum numbers of one type.
            dtype = torch.int if totals.is_integral else torch.float64
            count = totals.own_count if is_counting_rank else 0.0
            tokens = torch.tensor(count, device=self.device).to(dtype)
        finalize(self.chunks, tokens, **self.finalize_options)
        if not counted:
            # Unless it sums, DDP has divided by the number of ranks; the losses by 2 ** shift.
            ranks = 1
            if not self.per_token:
                ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
            for chunk in self.chunks:
                chunk.scale_gradients(ranks * 2.0**self.shift / totals.normalizer)

    def close(self) -> None:
        super().close()
        if self._sums is not None:
            self._sums.close()
        if self._window in open_windows:
            open_windows.remove(self._window)

    def _drop_gradients(self) -> None:
        abort_window(self.chunks, self.optimizer)

    def _drop_failed(self) -> None:
        if is_poisoned():
            drop_collectives(self.chunks)
        # An abort clears the logs of other models too; the snapshot has this model's alone.
        restore_logs = None if self.has_auxiliary else snapshot.keep_logs()
        try:
            self._drop_gradients()
        except RuntimeError as lost:  # from the wait for a gather that a peer has not joined
            poison(f"a reduction of an aborted step did not end: {describe(lost)}")
            drop_collectives(self.chunks)
            self._drop_gradients()
        if restore_logs is not None:
            restore_logs()


def _route_fault(replay: ExpertReplay, microbatch: Microbatch, *, read: bool) -> str | None:
    """Describe how a microbatch's expert routes do not fit its tokens; None if they do."""
    routes = field_of(microbatch.inputs, ROUTED_EXPERTS)
    is_read = isinstance(routes, torch.Tensor) and (read or on_host(routes))
    spans = _spans_with_routes(microbatch) if is_read else None
    return replay.fault(routes, microbatch.shape, spans)


def _spans_with_routes(microbatch: Microbatch) -> list[Span]:
    """Return the spans of tokens that need expert routes, as (row, first, end).
    A token needs a route if a real token of its sequence follows it.
    """
    if microbatch.spans is not None:
        return [(0, start, start + max(length - 1, 0)) for start, length in microbatch.spans]
    rows, width = microbatch.shape
    mask_BT = field_of(microbatch.inputs, ATTENTION_MASK)
    firsts, counts = [0] * rows, [width] * rows
    if field_of(microbatch.inputs, LENGTHS) is not None or getattr(mask_BT, "ndim", 0) == 2:
        firsts, counts = real_tokens(microbatch.inputs, rows)
    elif (mask_BT := field_of(microbatch.inputs, TOKEN_MASK)) is not None:
        place_T = torch.arange(1, 1 + mask_BT.shape[1], device=mask_BT.device)
        counts = torch.where(mask_BT > 0, place_T, 0).amax(1).tolist()
    return [
        (row, first, first + max(count - 1, 0))
        for row, (first, count) in enumerate(zip(firsts, counts, strict=True))
    ]


def _position_fault(config: Any, context_ranks: int, microbatch: Microbatch) -> str | None:
    """Describe how a microbatch's rows, or the sequences of its pack, cannot be divided evenly
    among context-parallel and sequence-parallel ranks; None if they can.
    """
    multiple = 2 * context_ranks
    tensor_ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    sharing = context_ranks * tensor_ranks
    length = microbatch.shape[1]
    if context_ranks > 1 and length % multiple:
        return (
            f"has rows of {length} positions for {context_ranks} context-parallel ranks: pad them "
            f"to a multiple of {multiple}"
        )
    if length % sharing:
        return (
            f"has {length} positions for {sharing} ranks that share them by sequence parallelism: "
            f"pad them to a multiple of {sharing}"
        )
    for index, (start, _) in enumerate(microbatch.spans or ()):
        if context_ranks > 1 and start % multiple:
            return (
                f"is a pack whose sequence {index} begins at {start}, for {context_ranks} "
                f"context-parallel ranks: pad each to a multiple of {multiple}, as "
                "TokenAlignment.of_config(config) says"
            )
    return None


class _StepWindow:
    """Refuses training by other code on the chunks of an open step. For these chunks, Megatron's
    patched schedules call this object's `run`, which raises unless the call is the step's own or
    forward-only.

    See `megatron/schedules.py`.
    """

    def __init__(self, backend: MegatronBackend) -> None:
        self._backend = backend
        self.chunks = backend.chunks

    def holds(self, chunk: Any) -> bool:
        return any(chunk is own_chunk for own_chunk in self.chunks)

    def shares_modules(self, chunks: Sequence[Any]) -> bool:
        """Return whether `chunks` have modules in common with the step's chunks.
        The two may be in different DDP wrappers.
        """
        own_ids = {id(module) for chunk in self.chunks for module in chunk.modules()}
        return any(id(module) in own_ids for chunk in chunks for module in chunk.modules())

    def run(self, schedule: Callable[..., Any], **call: Any) -> Any:
        if call.get("forward_only", False) or self._backend.running:
            return schedule(**call)
        raise RuntimeError(
            "a TrainStep is open for these chunks, and a schedule was called to train them: it "
            "would reduce in the middle of the step. Use step.microbatch(), or finish() or "
            "abort() the step first"
        )


@dataclasses.dataclass(eq=False, repr=False)
class TrainStep(SplitStep):
    """Runs one Megatron optimizer step, whose batches come in any number of `microbatch()` calls. A
    step may stop anywhere: `abort()` drops it, after a failed update only with `undo`.

    The gradient is, bit for bit, that of one schedule call with all microbatches in the same order.
    The loss is summed, and the gradient divided by what is valid on all ranks. Gradients are
    reduced and finalized once. MoE, MTP and other auxiliary losses are means over a microbatch.
    They are multiplied by its positions (by a pack's tokens, if the model is told of padding; by
    its sequences, for a loss of kind "sequence") and divided as the loss is. So does Megatron under
    `calculate_per_token_loss`; with that set or not, gradients are the same but for rounding.

    While a step is open, compute log-probs, evaluate and export inside of `reading()`.

    Args:
        model_chunks: this rank's chunks, wrapped in Megatron's `DistributedDataParallel`, and wired
            (`wire_train_config`).
        optimizer: what `get_megatron_optimizer` returned for them.
        scheduler: its `step(increment=global_batch_size)` follows each update; may be None.
        forward: a function of (chunk, microbatch) that returns the chunk's output; for models that
            take more than `gpt_forward` passes, such as images.
        shared: names in batches that are the same for all rows, whatever they hold: each microbatch
            is given them whole.
        shape: a function of a ready microbatch that returns its rows and positions; None for those
            of its `input_ids`.
        counts: a function of a ready microbatch that returns its valid sequences and tokens, as two
            numbers or a tensor [2]; None to count them by its masks.
        alignment: multiples of tokens that packs of a budget are padded to; None for those that the
            model's config needs.
        non_finite: what `finish()` does if a loss or the norm of the gradients is NaN or infinite.
            "refuse" raises `WindowAborted` on all ranks, before anything is updated; "skip" drops
            the gradients, and the result says why; "update" updates all the same, as Megatron does,
            and checks neither. An overflow under a loss scale is skipped in any case. The norm is
            checked if the optimizer computes it, see docs/train-step/failures.md.
        nothing_valid: what `finish()` does if nothing is valid on any rank. "skip" leaves
            parameters, optimizer state and scheduler as they are; "update" divides gradients,
            which are zero, by 1, so that momentum and weight decay move parameters.
        deadline_s: how long a rank waits for the others when ranks agree, and for their
            parameters, in seconds.
        undo: copy parameters and optimizer state to the host before each update, so that one that
            fails half-way can be aborted too. Without it a step that fails inside of the inner
            optimizer ends in an error that asks for a checkpoint.
        order_stable: add gradients of microbatches up exactly, so that the same microbatches give
            the same bits on any number of replicas, in any order and any calls; see
            docs/train-step/same-bits.md. The same on all ranks.
        router_replay: "replay" has MoE routers take the `routed_experts` of each microbatch, and
            "measure" counts where they choose others; see docs/router-replay.md. The same on all
            ranks.

    Raises:
        ValueError: chunks or an optimizer that are not Megatron's, an optimizer of other
            parameters, or a scheduler that cannot be put back.
        TypeError: `forward` is no function, or a switch is neither True nor False.
        RuntimeError: patches that a step on these chunks needs are not applied; the error names
            each, and what is lost without it.

    Example:
        step = TrainStep(chunks, optimizer, scheduler)
        step_id = step.begin(loss, global_batch_size=256, micro_batch_size=4)
        for batch in stream:
            step.microbatch(step_id, batch)
        result = step.finish(step_id)
    """

    model_chunks: Any
    optimizer: Any = None
    scheduler: Any = None
    forward: Forward = dataclasses.field(default=gpt_forward, kw_only=True)
    order_stable: bool = dataclasses.field(default=False, kw_only=True)
    router_replay: ReplayMode = dataclasses.field(default="off", kw_only=True)

    def _make_backend(self) -> MegatronBackend:
        backend = MegatronBackend(self)
        check_applied("TrainStep()", NEEDS, backend.chunks)
        self._chunks = backend.chunks
        self.replay = backend.replay
        return backend

    @contextmanager
    def reading(self) -> Iterator[list[Any]]:
        """Context manager that yields the chunks for log-probs, evaluation or export, also while a
        step is open.

        Inside, parameters are those of the last update on all ranks, also under
        overlap_param_gather; modules are in eval mode and no gradient is recorded. Afterwards
        modes, buffers and random states are what they were. If parameters are still to be gathered,
        the data-parallel ranks take part. The gather is the one that the next forward would start,
        so that ranks may also take part through `microbatch` or `finish`.

        Example:
            with step.reading() as chunks:
                weights = {n: p.clone() for n, p in chunks[0].module.named_parameters()}
        """
        self._backend.join()
        with snapshot.evaluating(self._chunks):
            yield self._chunks
