"""Runs an adapter's steps on a rank, and compares each with its definition.

Legend: B rows, T positions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_idempotent.megatron import moe
from megatron_idempotent.megatron.optimizers import unchained

from .draws import Draw
from .layouts import Layout
from .models import ADAM, SGD, LayoutModel
from .oracle import TrueUpdate, Truth, negative_logprobs, truth_of
from .parameters import ParameterPart, compared, copied_for_adam, not_of_adam
from .protocol import Adapter, Calls, Finished, Rows, Wrong, why_not
from .ranks import bits_of
from .rows import LayoutRows, T
from .tolerances import of_gradient, of_logprobs


class Bench(LayoutModel, LayoutRows):
    """Runs an adapter's training steps on this rank, and compares each step with a reference
    computed in float64. `parameters` has the whole model's parameters after the last step.
    """

    def __init__(
        self, adapter: Adapter, layout: Layout, *, draw: Draw | None = None, thorough: bool = False
    ) -> None:
        """Build the layout's model and give it to the adapter. `draw` is the check's random source,
        equal on all ranks.
        """
        super().__init__(adapter, layout)
        self.draw = draw or Draw(0, layout.name)
        self.thorough = thorough
        self.step_name = ""
        """The name of the current step in errors; "" for one without a name."""
        kind, options = ("sgd", SGD) if self.double else ("adam", ADAM)
        self.update = TrueUpdate(kind, lr=self.rate, **options)
        self.parameters = self.gather_parameters()
        self.of_bound = 0.0
        """The largest part of its bound that an error had so far."""
        self.bits = ""
        """A digest of the parameters after the steps of `same-bits`."""

    def offers(self, *methods: str) -> bool:
        """Return whether the adapter has all of these methods; an attribute that is None counts as
        missing.
        """
        return all(callable(getattr(self.adapter, name, None)) for name in methods)

    def declares(self, check: str) -> bool:
        """Return whether the adapter declares in `cannot` that a check fails on this layout."""
        return why_not(getattr(self.adapter, "cannot", {}), check, self.layout) is not None

    @property
    def multiple(self) -> int:
        """The number of microbatches of each call must be a multiple of this: the number of
        pipeline stages if there are virtual stages, else 1.
        """
        return self.layout.sizes["pp"] if self.layout.sizes["vpp"] > 1 else 1

    def take(
        self, calls_of: Calls, *, between: Callable[[], object] | None = None, cause: str = ""
    ) -> None:
        """Run one step of the adapter; raise `Wrong` unless the step's parameters, gradient norm
        and loss are right for the rows of all replicas.

        `between` is called before each microbatch and after the last. `cause` names what came
        before the step, for errors.
        """
        self.step_name = cause and f"the step after {cause}"
        optimizer = None if self.double else self.subject.optimizer  # in float64 it is SGD
        kept_before = copied_for_adam(optimizer)
        finished = self.step(calls_of, between=between)
        kept_after = copied_for_adam(optimizer)
        self.expect(finished, calls_of)
        if finished.updated and not self.double:
            chunks = self.subject.chunks
            names = {p: name for chunk in chunks for name, p in chunk.module.named_parameters()}
            faults = (
                not_of_adam(old, new, names[new.parameter], lr=self.rate, **ADAM)
                for old, new in zip(kept_before, kept_after, strict=True)
            )
            self.stop_at(next(filter(None, faults), None))
        self.step_name = ""

    def step(self, calls_of: Calls, *, between: Callable[[], object] | None = None) -> Finished:
        """Run one step of the adapter, and return its `Finished` without a comparison. If the step
        raises on a rank, call the adapter's `abort()` there, and re-raise the error.

        Other ranks would wait without the abort.
        """
        try:
            finished = self.drive(calls_of(self.replica), between=between)
        except Exception as error:
            self.adapter.abort()
            self._refuse_clipping(error)
            raise
        return self.checked(finished)

    def drive(
        self,
        rows_of_calls: Sequence[Rows],
        *,
        between: Callable[[], object] | None = None,
        failing_call: int | None = None,
    ) -> Any:
        """Call the adapter's `begin`, its `microbatch` with each call's rows, and its `finish`;
        return what `finish` returns.

        `between` is called before each microbatch and after the last. The loss of `failing_call`
        fails.
        """
        between = between or (lambda: None)
        self.adapter.begin()
        for call, rows in enumerate(rows_of_calls):
            between()
            self.adapter.microbatch(rows, fail=call == failing_call)
        between()
        return self.adapter.finish()

    def checked(self, finished: Any) -> Finished:
        """Check the type of what an adapter's `finish` returned; return it with gradient norm and
        loss as floats.

        Raises:
            Wrong: the result has the wrong type.
        """
        if not isinstance(finished, Finished):
            if inspect.iscoroutine(finished):
                finished.close()  # nobody awaits it
            raise Wrong(
                f"finish() returns {in_words(finished)}: the adapter has to return "
                "certify.Finished(updated=…, grad_norm=…, loss=…)"
            )
        numbers: dict[str, Any] = {"grad_norm": finished.grad_norm, "loss": finished.loss}
        for name, value in numbers.items():
            try:
                numbers[name] = None if value is None else float(value)
            except (TypeError, ValueError):
                raise Wrong(
                    f"finish() returns {in_words(value)} as {name}: the adapter has to return a "
                    "number, or None"
                ) from None
        return dataclasses.replace(finished, **numbers)

    def unwatched(self, steps: Sequence[Calls]) -> None:
        """Run several steps without waiting for parameter gathers in between; then compare each
        step with its reference in float64.

        The parameters after a step are read in the next step's forward. Reading them earlier would
        wait for gathers, which the framework itself has to wait for.
        """
        if self.layout.fsdp2 or self.packs_seen is not None:
            # FSDP2 leaves no gathers pending between steps; packs are noted for one step at a time.
            for calls_of in steps:
                self.take(calls_of)
            return
        parts_used: list[list[ParameterPart]] = []
        finished = []
        for calls_of in steps:
            used: list[ParameterPart] = []

            def copy(chunk: int, to: list[ParameterPart] = used) -> None:
                to += self._own_parts(synced=False, chunks=[chunk])

            with self.forwards.reading(copy):
                finished.append(self.step(calls_of))
            parts_used.append(used)
        names_used = [{part.name for part in used} for used in parts_used]
        own_names = {part.name for part in self._own_parts(synced=False)}
        if not all(self.gather(all(names == own_names for names in names_used))):
            return  # the adapter has its own forwards, which hooks do not see
        self._same(
            self.gather_parameters(parts_used[0]),
            "a look at what the first forward has computed with",
        )
        for index, calls_of in enumerate(steps):
            parameters = self.gather_parameters(
                parts_used[index + 1] if index + 1 < len(parts_used) else None
            )
            self.expect(finished[index], calls_of, parameters=parameters)

    def expect(
        self,
        finished: Finished,
        calls_of: Calls,
        *,
        parameters: dict[str, Tensor] | None = None,
    ) -> None:
        """Raise `Wrong` unless a finished step has the right parameters, gradient norm and loss for
        the rows of all replicas.

        `parameters` are the whole model's after the step; None to gather them now. A step in which
        nothing counts has a gradient of zero, and may be skipped.

        Raises:
            Wrong: parameters, norm or loss differ by more than roundings can explain.
        """
        everybody = [rows for replica in range(self.layout.replicas) for rows in calls_of(replica)]
        truth = self._truth(everybody)
        if not truth.count and not finished.updated:
            self.unchanged("a step that was skipped")
            return
        coasting = self.update.without(self.parameters)
        expected = self.update.next(self.parameters, truth.gradient)
        if not finished.updated:
            raise Wrong("finish() says that it has not updated")
        if self.forwards.evaluated is not None:
            raise Wrong(
                f"the step trains in eval mode: {self.forwards.evaluated} was left in it, in which "
                "dropout is off; call train() before the forward"
            )
        if parameters is None:
            parameters = self.gather_parameters()
        self._compare_parameters(parameters, expected, coasting, truth, finished, everybody)
        allowed = self.tolerance(truth)
        # A mean over nothing is no number.
        loss = finished.loss if truth.count else None
        for name, value, right, size in (
            ("gradient norm", finished.grad_norm, truth.grad_norm, truth.grad_norm),
            ("loss", loss, truth.loss, truth.loss_size),
        ):
            if value is not None and not self._within(abs(value - right), allowed * size):
                raise Wrong(f"finish() reports the {name} {value:.6g}; {right:.6g} is right")
        self.parameters = parameters

    def _truth(self, everybody: Sequence[Rows]) -> Truth:
        packs = None
        if self.packs_seen is not None:
            packs = self.packs_seen.of_rows(everybody, replica=self.replica, gather=self.gather)
        return truth_of(
            self._computing,
            everybody,
            packs=packs,
            kind=self.layout.loss_kind,
            balance_mean=getattr(self.adapter, "balance_mean", False),
            mtp_sum="mtp" in self.layout.flags and moe.adds_up_mtp_losses(self.subject.config),
            share=(self.rank, self.ranks),
            add=self.add_up,
        )

    def hold_logprobs(self, rows: Rows, lengths_B: Tensor, logprobs_BT: Any) -> None:
        """Raise `Wrong` unless the adapter's log-probs, at all positions with a next token, are
        within a bound of those computed in float64.

        Raises:
            Wrong: other values, no tensor [B, T], or None on all ranks of a replica.
        """
        fault, shape = None, rows["input_ids"].shape
        if logprobs_BT is not None and (
            not isinstance(logprobs_BT, Tensor) or logprobs_BT.shape != shape
        ):
            fault = (
                f"logprobs() returns {in_words(logprobs_BT)}: the adapter has to return a tensor "
                f"[B, T], here {[*shape]}, on ranks of the last stage, and None on others"
            )
        elif logprobs_BT is not None:
            parameters = {name: value.double() for name, value in self._computing.items()}
            right_BT = -negative_logprobs(parameters, rows["input_ids"])
            has_next_BT = torch.arange(1, T + 1, device=lengths_B.device) < lengths_B[:, None]
            right_N, their_N = (
                values_BT.detach().double()[has_next_BT] for values_BT in (right_BT, logprobs_BT)
            )
            error = float((their_N - right_N).norm() / right_N.norm())
            if not error <= of_logprobs(self.layout):
                fault = f"log-probs differ from the model's by {100 * error:.3g} % of their norm"
        answered = {
            replica
            for replica, has_logprobs in self.gather((self.replica, logprobs_BT is not None))
            if has_logprobs
        }
        if self.replica not in answered:
            fault = (
                "logprobs() returns None on all ranks of a replica: the adapter has to return a "
                "tensor [B, T] on ranks of the last stage"
            )
        self.stop_at(fault)

    @property
    def _computing(self) -> dict[str, Tensor]:
        """The whole model's parameters as the model computes with them: in 16-bit layouts the main
        parameters, rounded to 16 bits.
        """
        if not self.half:
            return self.parameters
        dtype = self.subject.config.params_dtype
        return {name: value.to(dtype) for name, value in self.parameters.items()}

    def tolerance(self, truth: Truth) -> float:
        """Return the largest allowed error of a step's gradient, relative to its norm."""
        return of_gradient(self.layout, truth)

    def away_and_back(self, *, freeing: bool = True) -> None:
        """Call the adapter's `offload` and `onload` between two steps; raise `Wrong` if a parameter
        changes.

        Raises:
            Wrong: `freeing`, and no memory was freed; or a tensor is not back on the device.
        """
        self.memories.away_and_back(freeing=freeing)
        self.unchanged("offload() and onload()")

    def digest(self) -> str:
        """Return 16 hexadecimal digits of a hash of the whole model's parameters, the same on all
        ranks.
        """
        sha = hashlib.sha256()
        for name in sorted(self.parameters):
            sha.update(name.encode())
            sha.update(bits_of(self.parameters[name]).numpy().tobytes())
        return sha.hexdigest()[:16]

    def unchanged(self, cause: str) -> None:
        """Raise `Wrong` if a parameter of the whole model differs from what it was after the last
        step. `cause` says in the error what may have changed it.
        """
        self._same(self.gather_parameters(), cause)

    def hold_export(self, exported: Any) -> None:
        """Raise `Wrong` unless the parameters that the adapter exported, on all ranks together, are
        all of the model's parameters with their current values.

        Raises:
            Wrong: values differ, or no rank exports a parameter.
        """
        if exported is None:
            exported = getattr(self.adapter, "exported", None)
        names, fault = compared(exported, self._own_parts(synced=False), self.parameters)
        exports = self.gather((names, isinstance(exported, (Mapping, list, tuple))))
        exported_names = set[str]().union(*(of_rank for of_rank, _ in exports))
        # One rank may export for all. A result without tensors, such as a path, is not compared.
        if any(container for _, container in exports) and (
            missing := self.parameters.keys() - exported_names
        ):
            raise Wrong(
                f"export() gives {len(exported_names)} of {len(self.parameters)} parameters on all "
                f"ranks together, and lacks {min(missing)}"
            )
        self.stop_at(fault and f"export() gives other weights than the model has: {fault}")

    def _same(self, parameters: Mapping[str, Tensor], cause: str) -> None:
        if moved := names_moved(parameters, self.parameters):
            raise Wrong(f"{cause} has changed {len(moved)} parameters, the first is {moved[0]}")

    def _compare_parameters(
        self,
        actual: Mapping[str, Tensor],
        expected: Mapping[str, Tensor],
        coasting: Mapping[str, Tensor],
        truth: Truth,
        finished: Finished,
        everybody: Sequence[Rows],
    ) -> None:
        """Raise `Wrong` unless `actual`, the parameters after a step, are within a bound of
        `expected`. `coasting` are the parameters that a step with a zero gradient would have given:
        the difference to them is what the gradient has moved.
        """
        names = list(expected)

        def between(end: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> Tensor:
            return torch.cat([(end[n].double() - start[n].double()).flatten() for n in names])

        moved, right = between(actual, coasting), between(expected, coasting)
        size, error = float(right.norm()), float((moved - right).norm())
        # The moments also hold the roundings of earlier gradients.
        earlier = float(between(coasting, self.parameters).norm())
        stored = torch.cat([actual[name].flatten() for name in names])
        rounding = float(stored.double().norm()) * torch.finfo(stored.dtype).eps
        if self._within(error, self.tolerance(truth) * (size + earlier) + 2 * rounding):
            return
        if not torch.isfinite(moved).all():
            raise Wrong("parameters are NaN or infinite after the step")
        if not size:
            raise Wrong("nothing counts in the step, and its gradient is not zero")
        self._refuse_clipping(None)
        if not between(actual, self.parameters).any():
            raise Wrong("the step has moved no parameter")
        factor = float(moved @ right) / size**2
        near = max(0.01, self.tolerance(truth))
        residual = float((moved - factor * right).norm())
        # Report a factor only if it explains the error: other errors must be smaller.
        if residual <= near * abs(factor) * size and residual < error / 2:
            clipped = self._clipped(finished, truth, factor)
            raise Wrong(f"the gradient is {factor:.4g} times the right one{clipped}")
        off = {}
        for name in names:
            right_size = float((expected[name] - coasting[name]).norm())
            error_here = float((actual[name].double() - expected[name]).norm())
            if error_here > near * right_size:
                off[name] = error_here / right_size if right_size else math.inf
        fault = f"the gradient is off by {100 * error / size:.3g} % of its norm"
        if off:
            first = next(iter(off))
            of_shards = (ranks for (name, _), ranks in self.holders.items() if name == first)
            holders = ", ".join(self.rank_names[rank] for ranks in of_shards for rank in ranks)
            fault += (
                f", in {len(off)} of {len(names)} parameters; the first is {first}, off by "
                f"{100 * off[first]:.3g} %, on {holders}"
            )
        raise Wrong(fault + self._miscounted(everybody, truth, moved, right, near))

    def _miscounted(
        self, everybody: Sequence[Rows], truth: Truth, moved: Tensor, right: Tensor, near: float
    ) -> str:
        """Return a hint for the error about a wrong gradient: which calls' rows count in it more or
        less than once, and how many times. Return "" if no such counts explain the gradient.

        All ranks take part. A step is the sum of its calls, each of which may have a factor.
        """
        if self.packs_seen is not None or len(everybody) < 2:
            return ""
        gradient = torch.cat([value.flatten() for value in truth.gradient.values()])
        alone = []
        for rows in everybody:
            piece = self._truth([rows])
            flat = torch.cat([value.flatten() for value in piece.gradient.values()])
            alone.append(flat * piece.count / max(truth.count, 1.0))
        of_calls = torch.stack(alone, 1) * float(right @ gradient / gradient.square().sum())
        factors = torch.linalg.pinv(of_calls.T @ of_calls) @ (of_calls.T @ moved)
        if float((of_calls @ factors - moved).norm()) > near * float(moved.norm()):
            return ""
        calls = len(everybody) // self.layout.replicas
        wrong = [
            f"of call {index % calls + 1} of replica {index // calls} count {factor:.3g} times"
            for index, factor in enumerate(factors.tolist())
            if abs(factor - 1) > 0.05 and alone[index].any()
        ]
        return f"; the rows {', '.join(wrong[:4])}" if wrong else ""

    def _clipped(self, finished: Finished, truth: Truth, factor: float) -> str:
        """Return a hint that the step may clip gradients, if the gradient is smaller than the right
        one although the reported norm is right; else return "".
        """
        norm = finished.grad_norm
        if not 0 < factor < 1 or norm is None:
            return ""
        if abs(norm - truth.grad_norm) > self.tolerance(truth) * truth.grad_norm:
            return ""
        return (
            f", and the norm that finish() reports is right; if the step clips to "
            f"{factor * norm:.3g}, build it without clipping, which certify does not judge"
        )

    def _refuse_clipping(self, cause: BaseException | None) -> None:
        """Raise `Wrong` if Megatron's optimizer is set to clip gradients: checks judge unclipped
        ones.
        """
        for optimizer in unchained(self.subject.optimizer):
            limit = getattr(getattr(optimizer, "config", None), "clip_grad", 0.0)
            if limit:
                raise Wrong(
                    f"the optimizer is set to clip gradients (clip_grad is {limit:g}): certify "
                    "judges the gradient itself, so build the step with clip_grad=0.0"
                ) from cause

    def _within(self, error: float, bound: float) -> bool:
        if not error <= bound:  # also if it is NaN
            return False
        self.of_bound = max(self.of_bound, error / bound if bound else 0.0)
        return True


def names_moved(current: Mapping[str, Tensor], previous: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the parameters whose values in `current` and `previous` differ."""
    return [name for name, value in current.items() if not torch.equal(value, previous[name])]


def in_words(value: Any) -> str:
    """Return a value's type in words, such as `a list` or `None`, for an error."""
    if isinstance(value, Tensor):
        return f"a tensor {[*value.shape]}"
    return "None" if value is None else f"a {type(value).__name__}"
