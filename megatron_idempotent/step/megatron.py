"""Runs a split step on Megatron's schedules, DDP and optimizers: `TrainStep`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_idempotent.fp8.packing import TokenAlignment
from megatron_idempotent.megatron.ddp import bucket_groups, start_held, trained
from megatron_idempotent.megatron.schedules import (
    are_held,
    open_windows,
    sums_tokens_of_context_ranks,
)
from megatron_idempotent.patching.settings import looks
from megatron_idempotent.window.abort import abort_window, checked, drop_collectives
from megatron_idempotent.window.agreement import (
    DEADLINE_S,
    collective_timeout,
    describe,
    is_poisoned,
    poison,
)
from megatron_idempotent.window.missed_collectives import gather_params

from .context_parallel import context_parallel_ranks
from .exact_sums import ExactSums
from .gpt import gpt_forward, tables_of
from .lifecycle import SplitStep
from .loss import StepLoss
from .megatron_needs import (
    check_patches,
    refuse_chunks,
    refuse_inexact,
    refuse_scheduler,
    refuse_strangers,
)
from .megatron_run import Forward, Runner, forget_inference
from .megatron_snapshot import MegatronSnapshot
from .megatron_update import CheckedUpdate
from .pieces import Piece, check_ids
from .records import NonFinite, NothingValid, Options, check_made_with, checked_options
from .results import Reported, Totals, Update
from .snapshot import (
    evaluating,
    first_not_finite,
    lr_and_weight_decay,
    set_learning_rate,
    size_of,
)
from .tenants import TenantState, check_neighbours


class MegatronBackend:
    """Implements `Backend` on this rank's model chunks, Megatron optimizer and scheduler."""

    def __init__(
        self,
        chunks: Any,
        optimizer: Any,
        scheduler: Any,
        forward: Forward,
        *,
        options: Options,
        undo: bool,
        order_stable: bool,
    ) -> None:
        self.chunks = checked("TrainStep()", chunks, optimizer)
        refuse_chunks(self.chunks)
        refuse_strangers(self.chunks, optimizer)
        refuse_scheduler(scheduler)
        if order_stable:
            refuse_inexact(self.chunks)
        self._sums = ExactSums(self.chunks) if order_stable else None
        name = options.tenant
        self.tenant = None if name is None else TenantState(name, self.chunks)
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._cuts_positions = forward is gpt_forward
        self._tables = tables_of(self.chunks)
        # Those on a device end the process there; a look at them before would wait for it.
        self._reads_ids = looks()
        self._runner = Runner(self.chunks, optimizer, forward, options.deadline_s)
        self._step = CheckedUpdate(self.chunks, optimizer, options.non_finite, keeps_undo=undo)
        self._shift: int | None = None
        self._snapshot: MegatronSnapshot | None = None
        self._released = False
        self._window = _Window(self._runner, name)

    @property
    def must_agree(self) -> dict[str, Any]:
        return {
            "calculate_per_token_loss": self._runner.per_token,
            "order_stable": self._sums is not None,
            "scheduler": type(self._scheduler).__name__,
        }

    @property
    def replica(self) -> int:
        return self._runner.replica

    @property
    def replicas(self) -> int:
        return int(parallel_state.get_data_parallel_world_size())

    @property
    def lowers_scale(self) -> bool:
        return self._step.lowers_scale

    @property
    def narrow(self) -> bool:
        # With calculate_per_token_loss Megatron sums too, and has the same bits.
        return not self._runner.per_token and any(each.fp16 for each in self._runner.configs)

    @property
    def device(self) -> Any:
        return self._runner.device

    @property
    def is_reporting_rank(self) -> bool:
        return self.has_losses and context_parallel_ranks()[0] == 0

    @property
    def has_losses(self) -> bool:
        return bool(
            parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == 0
        )

    @property
    def alignment(self) -> TokenAlignment:
        return TokenAlignment.of_config(self._runner.configs[0])

    @property
    def microbatch_multiple(self) -> int:
        return self._runner.microbatch_multiple

    @property
    def attention(self) -> float:
        # A layer has 12 x hidden x hidden weights, and 2 x hidden products for each token before.
        return 1.0 / (6 * int(self._runner.configs[0].hidden_size))

    @property
    def partially_updated(self) -> bool:
        return self._step.updating and self._step.undo is None

    def open(self) -> None:
        self.close()  # a step whose end was interrupted may still be here
        if are_held(self.chunks):
            raise RuntimeError(
                "begin(): an accumulation_window() or another TrainStep is open for these chunks, "
                "and gradients of two steps cannot be in one buffer: finish() or abort() it first. "
                "For adapters give each a DDP and a TrainStep(…, tenant=…) of its own"
            )
        windows = [each for each in open_windows if isinstance(each, _Window)]
        check_neighbours(self._window.tenant, self.chunks, windows)
        if self.tenant is not None:
            self.tenant.open()
        with self.in_force():
            self._open()

    def _open(self) -> None:
        self._snapshot = MegatronSnapshot(self.chunks, self._optimizer, self._scheduler)
        self._step.reset()
        self._released, self._shift, self._runner.shift = False, None, 0
        open_windows.append(self._window)
        modules = self._snapshot.modules
        forget_inference(modules.modules)
        for chunk in self.chunks:
            if not modules.training:
                chunk.train()
            chunk.zero_grad_buffer()
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        if self._sums is not None:
            self._sums.open()

    def in_force(self) -> AbstractContextManager[None]:
        """Give modules and process the tenant's state in a `with`; without a tenant do nothing."""
        return nullcontext() if self.tenant is None else self.tenant.in_force()

    def accept_loss(self, loss: StepLoss) -> None:
        self._runner.accept_loss(loss)

    def accept(self, lists: Sequence[Sequence[Piece]]) -> None:
        self._refuse_frozen()
        self._refuse_autocast()
        if self._cuts_positions:
            _check_positions(lists, self._runner.configs[0])
            check_ids(self._tables, lists, read=self._reads_ids)
        self._runner.accept(lists)

    def _refuse_frozen(self) -> None:
        """Raise `RuntimeError` if nothing is trained any more of what DDP was built with.

        Upstream asserts then, as it waits for gradients. A tenant's parameters are trained in its
        calls, whatever `requires_grad` says.
        """
        held = [chunk.param_to_bucket_group for chunk in self.chunks]
        frozen = not any(param.requires_grad for each in held for param in each)
        if frozen and any(held) and self.tenant is None:
            raise RuntimeError(
                f"all {sum(map(len, held))} parameters that DDP was built with are frozen now "
                "(requires_grad=False), and it waits for their gradients: freeze parameters before "
                "you build DDP and the optimizer, and read a model that is not trained in reading()"
            )

    def _refuse_autocast(self) -> None:
        """Raise `RuntimeError` where Megatron's backward would meet weights of another type."""
        of = self.device.type
        whole = self._runner.configs[0].params_dtype == torch.float32
        if whole and torch.is_autocast_enabled(of):
            raise RuntimeError(
                f"microbatch() got a model in float32 inside of torch.autocast({of!r}), which "
                f"computes in {torch.get_autocast_dtype(of)}, where Megatron's layers take the "
                "type of their config: leave the context, or build the model with bf16=True"
            )

    def lockstep_group(self) -> tuple[bool, Any]:
        return self._runner.lockstep_group()

    def divide_losses(self, shift: int) -> None:
        if self._shift is not None:
            for chunk in self.chunks:
                chunk.scale_gradients(2.0 ** (self._shift - shift))
        self._shift = self._runner.shift = shift

    def run(
        self, pieces: Sequence[Piece], loss: StepLoss, *, reduce: bool, ghosts: bool
    ) -> list[Reported]:
        # Exact sums are reduced when all of them are there.
        reduce = reduce and self._sums is None
        self._released = self._released or reduce
        with self.in_force():
            return self._runner.run(pieces, loss, reduce=reduce, ghosts=ghosts)

    def check_ready(self, increment: int | None) -> None:
        if self._optimizer is None:
            raise RuntimeError("finish(): TrainStep() was made without an optimizer")
        if increment is None and self._scheduler is not None:
            raise ValueError(
                "finish() got no global_batch_size, nor did begin(), and the scheduler advances by "
                "it: give it to either"
            )
        if any(config.finalize_model_grads_func is None for config in self._runner.configs):
            raise RuntimeError(
                "finish(): config.finalize_model_grads_func is None, so gradients would never be "
                "reduced: set it (megatron_idempotent.wire_train_config does)"
            )

    def join(self, *, wait: bool = True) -> None:
        with collective_timeout(self._runner.groups(), self._runner.deadline_s):
            for chunk in self.chunks:
                gather_params(chunk, wait=wait)

    def size_of_parameters(self) -> Any:
        return size_of(each for chunk in self.chunks for each in trained(chunk))

    def bad_parameter(self) -> str | None:
        return first_not_finite(
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

    def update(
        self, totals: Totals, local: float, increment: int | None, timeout_s: float
    ) -> Update:
        with collective_timeout(self._runner.groups(), timeout_s), self.in_force():
            self._finalize(totals, local)
            grad_norm, skipped = self._step.run()
        if skipped is None and self._scheduler is not None:
            self._scheduler.step(increment=increment)
        return Update(skipped=skipped, grad_norm=grad_norm)

    def _finalize(self, totals: Totals, local: float) -> None:
        if self._sums is not None:
            self._sums.put()
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_grad_reduce and not self._released:
                start_held(chunk)  # else finalizing dispatches by itself
        finalize = self._runner.configs[0].finalize_model_grads_func
        counted = self._runner.per_token and totals.is_counted
        tokens = self._num_tokens(local, totals.is_whole) if counted else None
        finalize(self.chunks, tokens, **self._runner.finalize_options)
        if not counted:
            # Unless it sums, DDP has divided by the number of ranks; the losses by 2 ** shift.
            size = 1
            if not self._runner.per_token:
                size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
            for chunk in self.chunks:
                chunk.scale_gradients(size * 2.0**self._runner.shift / totals.normalizer)

    def set_lr(self, lr: float) -> None:
        set_learning_rate(self._optimizer, lr)

    def rates(self) -> tuple[float, float] | None:
        return lr_and_weight_decay(self._optimizer)

    def skip(self) -> None:
        with self.in_force():
            abort_window(self.chunks, self._optimizer)
        self.close()

    def close(self) -> None:
        self._forget()
        if self.tenant is not None:
            # Here all ranks come in one order. The first forward of a tenant may be before another
            # one's on this rank and after it on others, and gathers pair up by order alone.
            self.join(wait=False)

    def _forget(self) -> None:
        if self.tenant is not None:
            self.tenant.close(None if self._snapshot is None else self._snapshot.modules)
        self._snapshot = None
        self._step.reset()
        if self._sums is not None:
            self._sums.close()
        if self._window in open_windows:
            open_windows.remove(self._window)

    def restore(self) -> None:
        if self._snapshot is None:
            return  # another step is open for these chunks, and this one never was
        with self.in_force():
            self._restore(self._snapshot)
        self._forget()

    def _restore(self, snapshot: MegatronSnapshot) -> None:
        if is_poisoned():
            drop_collectives(self.chunks)
        try:
            abort_window(self.chunks, self._optimizer)
        except RuntimeError as lost:  # from the wait for what a peer has not joined
            poison(f"a reduction of an aborted step did not end: {describe(lost)}")
            drop_collectives(self.chunks)
            abort_window(self.chunks, self._optimizer)
        if self._step.undo is not None:
            self._step.undo.restore()
        snapshot.restore()

    def _num_tokens(self, local: float, whole: bool) -> Any:
        """Return the scalar tensor that finalizing sums over ranks.

        Context-parallel ranks are given the same rows, so that only the first of them counts, where
        finalizing sums over them too.
        """
        counts = context_parallel_ranks()[0] == 0 or not sums_tokens_of_context_ranks()
        counted = local if counts else 0.0
        # As the schedules count. Counts of a caller may have fractions, on some of the ranks that
        # are to sum numbers of one type.
        kind = torch.int if whole else torch.float64
        return torch.tensor(counted, device=self.device).to(kind)


def _check_positions(lists: Sequence[Sequence[Piece]], config: Any) -> None:
    """Raise `ValueError` unless ranks can share the positions, and each sequence of a pack."""
    _, size = context_parallel_ranks()
    sharing = size * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    for piece in (each for pieces in lists for each in pieces):
        length = piece.shape[1]
        if size > 1 and length % (2 * size):
            raise ValueError(
                f"microbatch() got rows of {length} positions for {size} context-parallel ranks: "
                f"pad them to a multiple of {2 * size}"
            )
        if length % sharing:
            raise ValueError(
                f"microbatch() got {length} positions for {sharing} ranks that share them by "
                f"sequence parallelism: pad them to a multiple of {sharing}"
            )
        starts = () if piece.segments is None else piece.segments.starts
        for index, start in enumerate(starts):
            if size > 1 and start % (2 * size):
                raise ValueError(
                    f"microbatch() got a pack whose sequence {index} begins at {start}, for "
                    f"{size} context-parallel ranks: pad each to a multiple of {2 * size}, as "
                    "TokenAlignment.of_config(config) says"
                )


class _Window:
    """Refuses other training on the chunks of an open step; patched schedules call it first.

    See `megatron/schedules.py`.
    """

    def __init__(self, runner: Runner, tenant: str | None) -> None:
        self._runner = runner
        self.chunks, self.tenant = runner.chunks, tenant

    def holds(self, chunk: Any) -> bool:
        return any(chunk is mine for mine in self.chunks)

    def run(self, schedule: Callable[..., Any], **call: Any) -> Any:
        if call.get("forward_only", False) or self._runner.running:
            return schedule(**call)
        raise RuntimeError(
            "a TrainStep is open for these chunks, and a schedule was called to train them: it "
            "would reduce in the middle of the step. Use step.microbatch(), or finish() or "
            "abort() the step first"
        )


class TrainStep(SplitStep):
    """Runs one Megatron optimizer step in any number of pieces, and is safe to stop anywhere.

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
            checked if the optimizer computes it, see docs/train-step.md.
        nothing_valid: what `finish()` does if nothing is valid on any rank. "skip" leaves
            parameters, optimizer state and scheduler as they are; "update" divides gradients,
            which are zero, by 1, so that momentum and weight decay move parameters.
        deadline_s: how long a rank waits for the others when ranks agree, and for their
            parameters, in seconds.
        undo: copy parameters and optimizer state to the host before each update, so that one that
            fails half-way can be aborted too. Without it a step that fails inside of the inner
            optimizer ends in an error that asks for a checkpoint.
        tenant: a name, the same on all ranks, if several `TrainStep`s over the same modules are
            open at the same time, each with a DDP and parameters of its own: see "Several adapters
            at once" in docs/train-step.md.
        order_stable: add gradients of microbatches up exactly, so that the same microbatches give
            the same bits on any number of replicas, in any order and any calls; see "The same bits
            on any number of replicas" in docs/train-step.md. The same on all ranks.

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

    def __init__(
        self,
        model_chunks: Any,
        optimizer: Any = None,
        scheduler: Any = None,
        *,
        forward: Forward = gpt_forward,
        shared: Collection[str] = (),
        shape: Callable[[Any], tuple[int, int]] | None = None,
        counts: Callable[[Any], Any] | None = None,
        alignment: TokenAlignment | None = None,
        non_finite: NonFinite = "refuse",
        nothing_valid: NothingValid = "skip",
        deadline_s: float = DEADLINE_S,
        undo: bool = False,
        tenant: str | None = None,
        order_stable: bool = False,
    ) -> None:
        check_made_with("TrainStep", forward, undo=undo, order_stable=order_stable)
        options = checked_options(
            deadline_s, non_finite, shared, shape, counts, nothing_valid, alignment, tenant
        )
        backend = MegatronBackend(
            model_chunks,
            optimizer,
            scheduler,
            forward,
            options=options,
            undo=undo,
            order_stable=order_stable,
        )
        check_patches(backend.chunks)
        super().__init__(backend, options)
        self._chunks = backend.chunks
        self._in_force = backend.in_force

    @contextmanager
    def reading(self) -> Iterator[list[Any]]:
        """Yields the chunks for log-probs, evaluation or export, whether or not a step is open.

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
        with self._in_force(), evaluating(self._chunks):
            yield self._chunks
