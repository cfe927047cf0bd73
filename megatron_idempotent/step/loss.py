"""Defines the loss of a split step, adds up what it returns, and makes the step's result of it.

Legend: B rows, n sequences of a microbatch, T positions of a row, or all tokens of a pack.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from megatron_idempotent.window.agreement import describe

if TYPE_CHECKING:
    from .microbatches import Piece

Normalizer = Literal["tokens", "sequences", "groups", "microbatches", "none"]
"""Denominator of a metric: the valid tokens or sequences, groups or microbatches of all ranks in
the step; or "none", if it is not divided."""

Kind = Literal["token", "sequence", "group", "none"]
"""The unit of a loss's mean: valid tokens, valid sequences or groups of the step; or "none", if the
caller has divided already."""

Returned = Literal["part", "whole"]
"""Scope of a loss's sums under context parallelism: this rank's positions, which are added up over
the ranks, or whole rows, the same on each rank."""

_USUAL: Mapping[Normalizer, str] = {
    "tokens": "nll entropy approx_entropy kl approx_kl ppo_kl policy_kl_error gen_kl_error "
    "js_divergence_error token_mult_prob_error ratio probs_ratio probs_ratio_clamped "
    "clip_fraction clip_ratio pg_clipfrac pg_clipfrac_lower sampling_importance_ratio "
    "is_oob_ratio value_clip_fraction vf_clipfrac values_mean returns_mean returns_sq_mean "
    "residual_sq_mean",
    "sequences": "reward advantage return response_length sequence_ratio truncated",
    # The last one is a mean over its microbatch, with NeMo-RL.
    "none": "num_valid_samples num_valid_tokens num_unmasked_tokens samples tokens "
    "positive_nll_loss",
}
POLICY_GRADIENT_NORMALIZERS: Mapping[str, Normalizer] = MappingProxyType(
    {name: kind for kind, names in _USUAL.items() for name in names.split()}
)
"""Denominators of the usual policy-gradient metrics, by name, for sums that a loss returns.

Metrics that go into the loss, such as a penalty, are not among them: they are divided as the loss
is. Names are common ones, and those of NeMo-RL, SkyRL and verl.

A loss adds its own: `{**POLICY_GRADIENT_NORMALIZERS, "is_oob_ratio": "sequences"}`.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepCounts:
    """Holds the counts of all ranks in a step. Example: `divisor=lambda counts: counts.groups`."""

    tokens: float
    """Valid tokens."""
    sequences: float
    """Valid sequences."""
    groups: int
    """Different `group_ids` of valid sequences; 0 where the loss asks for no groups."""
    microbatches: int
    """Microbatches of all replicas."""
    reported: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Sums of what the loss reported over all microbatches, not divided, and extrema, by name."""


Divisor = float | Callable[[StepCounts], float]
"""The number that gradients are divided by, or a function that returns it for `StepCounts`."""


class StepLoss(Protocol):
    """Computes a loss as a sum over a microbatch, and says what the sum is divided by.

    A loss may have two more attributes. `outputs` names what it returns for each sample, beside its
    metrics: see `microbatch()`. `auxiliary_weight`, a number or a function of the microbatch,
    multiplies the microbatch's MoE and MTP losses before they are divided as the loss is; without
    it they are multiplied by the microbatch's positions (its tokens, if the model is told where
    padding is; its sequences, for kind "sequence"). Kinds "group" and "none" need it for a model
    with such losses.

    Example:
        class PolicyGradient:
            kind = "token"
            normalizers = {"nll": "tokens", "samples": "none"}
            outputs = ("logprobs",)

            def __call__(self, output, microbatch):
                # What counts here is what the step counts: valid tokens of valid samples.
                tokens_BT, mask_BT = microbatch["input_ids"], microbatch["token_mask"]
                targets_BT = tokens_BT.roll(-1, 1)
                valid_BT = torch.nn.functional.pad(mask_BT[:, 1:], (0, 1)) > 0
                valid_BT &= microbatch["sample_mask"][:, None] > 0
                stats = token_logprobs(logits=output, targets=targets_BT, token_mask=valid_BT)
                loss = -(stats.logprob * microbatch["advantages"][:, None]).sum()
                metrics = {"nll": -stats.logprob.sum(), "samples": len(output)}
                return loss, {**metrics, "logprobs": stats.logprob}
    """

    @property
    def kind(self) -> Kind:
        """The unit whose count on all ranks in the step divides the gradients."""

    @property
    def normalizers(self) -> Mapping[str, Normalizer]:
        """The denominator of each metric, by name; metrics without one use the gradients'."""

    def __call__(
        self, output: Any, microbatch: Any, /
    ) -> tuple[torch.Tensor | float, Mapping[str, Any]]:
        """Return the sum (not the mean) of the loss over one microbatch, a scalar, and its metrics.

        The step calls it on the last pipeline stage with the output of `forward`: logits, or
        TokenStats if `forward` calls `model_logprobs`. Under tensor parallelism logits
        [B, T, V / tp] are this rank's columns, for `token_logprobs(…, tp_group=…)`. Metrics are
        scalars, sums too unless their normalizer is "none"; those with `_min` or `_max` in their
        name are extrema and never divided. A microbatch with nothing valid may have the constant 0
        as its sum.

        Under context parallelism the microbatch has whole rows, and the output has this rank's
        positions (`own_positions`). Sums are over these; or over whole rows, if the loss has
        gathered them (`all_positions`) and says so: `context_parallel = "whole"`.
        """


def returned_by(loss: StepLoss) -> Returned:
    """Return the loss's `context_parallel`, "part" if it has none."""
    found: Returned = getattr(loss, "context_parallel", "part")
    return found


def _wrong_with(loss: Any) -> str | None:
    """Describe what keeps a step from being begun with the loss; None if nothing does."""
    kinds, normalizers = get_args(Kind), get_args(Normalizer)
    if isinstance(loss, type):
        return (
            f"the class {loss.__name__} as loss, of which a call makes an object and no loss: pass "
            f"an object of it, {loss.__name__}(…)"
        )
    if not callable(loss) or getattr(loss, "kind", None) not in kinds:
        return (
            f"{loss!r} as loss, with kind {getattr(loss, 'kind', None)!r}: pass a callable object "
            f"whose `kind` is one of {', '.join(kinds)}"
        )
    if returned_by(loss) not in get_args(Returned):
        known = ", ".join(map(repr, get_args(Returned)))
        return f"a loss with context_parallel {returned_by(loss)!r}: give it one of {known}"
    named = getattr(loss, "normalizers", None)
    if not isinstance(named, Mapping):
        return (
            f"a loss whose `normalizers` is {named!r}: give it a mapping from names of metrics to "
            f"one of {', '.join(normalizers)}; empty where all use the gradient's"
        )
    wrong = {n: v for n, v in named.items() if not isinstance(n, str) or v not in normalizers}
    if wrong:
        known = ", ".join(normalizers)
        return f"a loss with normalizers {wrong!r}: give names of metrics one of {known}"
    outputs = getattr(loss, "outputs", ())
    listed = isinstance(outputs, Collection) and not isinstance(outputs, str)
    if not listed or not all(isinstance(name, str) for name in outputs):
        return f"a loss whose `outputs` is {outputs!r}: give it a tuple of names"
    weight = getattr(loss, "auxiliary_weight", None)
    number = isinstance(weight, (int, float)) and math.isfinite(weight)
    if weight is not None and not number and not callable(weight):
        return (
            f"a loss whose `auxiliary_weight` is {weight!r}: give it a finite number, or a "
            "function of a microbatch that returns one"
        )
    return None


def check_begin(begun_with: Mapping[str, Any], step_id: str | None) -> None:
    """Raise `ValueError` unless a step can begin with these arguments."""
    if (told := _wrong_with(begun_with["loss"])) is not None:
        raise ValueError(f"begin() got {told}")
    check_divisor("begin", begun_with["divisor"])
    sizes = "micro_batch_size", "max_tokens_per_microbatch"
    for name in ("global_batch_size", *sizes, "rank_batch_size"):
        check_size("begin", name, begun_with[name])
    if all(begun_with[name] is not None for name in sizes):
        told = ", ".join(f"{name}={begun_with[name]!r}" for name in sizes)
        raise ValueError(
            f"begin() got {told}: microbatches are cut by rows or by tokens; give one of the two"
        )
    if step_id is not None:
        check_type("begin", "step_id", step_id, str)
    refuse_no_grad("begin")


def needs_groups(loss: StepLoss) -> bool:
    """Return whether groups have to be counted for the loss or one of its metrics."""
    return loss.kind == "group" or "groups" in loss.normalizers.values()


def needs_weight(loss: StepLoss) -> bool:
    """Return whether the loss needs an `auxiliary_weight` for auxiliary losses, and has none."""
    given = getattr(loss, "auxiliary_weight", None) is not None
    return loss.kind in ("group", "none") and not given


def auxiliary_weight(loss: StepLoss, piece: Piece, number: int) -> float:
    """Return the number that a microbatch's auxiliary losses are multiplied by.

    They are means over `number` positions, or over its tokens if padding is left out.
    """
    given = getattr(loss, "auxiliary_weight", None)
    if given is not None:
        return float(given(piece.batch) if callable(given) else given)
    return float(number if loss.kind == "token" else piece.sequences)


def is_number(value: Any) -> bool:
    """Return whether the value is an int or a float, which a bool is not here."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_type(what: str, name: str, value: Any, kind: type) -> None:
    """Raise `ValueError` unless the value is of the type."""
    if not isinstance(value, kind):
        raise ValueError(f"{what}() takes a {kind.__name__} as {name}, got {value!r}")


def refuse_no_grad(what: str) -> None:
    """Raise `RuntimeError` where torch records no gradient."""
    if not torch.is_grad_enabled():
        context = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise RuntimeError(
            f"{what}() was called inside of torch.{context}(), where a step would have no "
            "gradient: leave that context around the call"
        )


def check_size(what: str, name: str, value: Any) -> None:
    """Raise `ValueError` unless the value is None or a positive integer."""
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{what}() takes a positive int as {name}, got {value!r}")


def check_divisor(what: str, divisor: Any) -> None:
    """Raise `ValueError` unless the divisor is None, a positive number or a function."""
    if divisor is None or callable(divisor):
        return
    if not is_number(divisor) or not (0 < divisor < math.inf):
        raise ValueError(
            f"{what}() got divisor={divisor!r}: give a positive number, or a function of "
            "StepCounts that returns one"
        )


def divided_by(divisor: Callable[[StepCounts], float], counts: StepCounts) -> float:
    """Return what a divisor's function returns for the counts; 0 says that nothing is valid.

    Raises:
        ValueError: it returned no finite number from 0 on.
    """
    found = called("divisor", divisor, counts)
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        found = found.item()
    if not is_number(found) or not (0 <= found < math.inf):
        raise ValueError(
            f"divisor({counts}) returned {found!r}: return a finite number from 0 on, the same on "
            "all ranks"
        )
    return float(found)


RESERVED = ("loss", "lr", "wd", "global_valid_seqs", "global_valid_toks", "rank", "replica")
"""Names that the step puts into each row by itself, so that a loss may not report them."""

# Per microbatch: what the loss reported, with tensors still on the device.
Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """Holds what a loss has returned for one microbatch.

    Example: `evaluate(loss, output, piece)[1]`.
    """

    row: Row
    """The loss's sum, as "loss", and its metrics."""
    outputs: Mapping[str, Sequence[Tensor]]
    """A tensor for each of the n sequences, without its graph, by name."""


OWN_BACKWARD = (
    "the loss ran a backward through the model by itself, and the step's own would add gradients a "
    "second time: return the sum alone, and leave its backward to the step"
)
_ENDS: Mapping[type[BaseException], str] = {
    StopIteration: "which a `for` around the step would take for its end: give its next() a "
    "default, or put what it reads into the batch",
    SystemExit: "which would end this rank while others wait for it: raise an exception that says "
    "why, abort() on all ranks, and exit then",
}


def called(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function of the user's returns; `name` is its name in errors.

    Raises:
        RuntimeError: it raised what ends a loop or a process, and not from a signal's handler.
    """
    try:
        return function(*args)
    except tuple(_ENDS) as error:
        handlers = [getattr(signal.getsignal(n), "__code__", None) for n in signal.valid_signals()]
        if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise
        end = next(text for kind, text in _ENDS.items() if isinstance(error, kind))
        raise RuntimeError(f"{name} raised {describe(error)}, {end}") from error


def evaluate(loss: StepLoss, output: Any, piece: Piece) -> tuple[Tensor | None, Reported]:
    """Call the loss on a microbatch's output; return its sum, and what it has reported.

    The sum is a scalar that a backward can start at, or None for the constant 0. What it reported
    is taken over, so that later changes do not reach it.

    Raises:
        ValueError: it returned something else than a sum and metrics, the sum is neither a scalar
            with its graph nor the constant 0, a metric is no scalar or has no name or one that the
            step uses itself, or an output is missing or has not one entry for each sequence or
            token.
        RuntimeError: see `called`.
    """
    returned: Any = called("the loss", loss, output, piece.batch)
    two = isinstance(returned, (tuple, list)) and len(returned) == 2
    if not two or not hasattr(returned[1], "items"):
        told = _kind(returned)
        if isinstance(returned, (tuple, list)):
            told = f"({', '.join(map(_kind, returned))})"
        raise ValueError(
            f"the loss returned {told}: return two values, the sum over the microbatch and a "
            "mapping from names of metrics to their sums, {} if there are none"
        )
    total, metrics = returned
    names = tuple(getattr(loss, "outputs", ()))
    nameless = [name for name in metrics if not isinstance(name, str)]
    if nameless:
        raise ValueError(
            f"the loss reported metrics named {', '.join(map(repr, nameless))}: names are str"
        )
    taken = [name for name in RESERVED if name in metrics]
    if taken:
        raise ValueError(
            f"the loss reported metrics named {', '.join(map(repr, taken))}, which the step puts "
            f"into each row itself, as {', '.join(map(repr, RESERVED))}: give them other names"
        )
    has_graph = isinstance(total, Tensor) and total.requires_grad
    scalar = isinstance(total, (int, float)) or (isinstance(total, Tensor) and total.numel() == 1)
    # Another constant is a mistake: a graph that was lost, and gradients that would be zero.
    if not scalar or (not has_graph and float(total) != 0.0):
        shape = tuple(total.shape) if isinstance(total, Tensor) else type(total).__name__
        value = f", the constant {float(total):g}" if scalar else ""
        raise ValueError(
            f"the loss returned shape {shape} with requires_grad={has_graph}{value}: return the "
            "sum over the microbatch, a scalar with the graph that it was computed by, or the "
            "constant 0 where nothing is valid"
        )
    missing = [name for name in names if name not in metrics]
    if missing:
        raise ValueError(
            f"the loss names {', '.join(map(repr, missing))} in its `outputs`, and has returned "
            f"{', '.join(map(repr, metrics)) or 'no metric'}: return them beside the metrics"
        )
    row = {"loss": _kept(total)}
    for name, value in metrics.items():
        if name in names:
            continue
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"the loss reported {name!r} of shape {tuple(value.shape)}: metrics are "
                    "scalars, summed over the microbatch; name it in the loss's `outputs` if each "
                    "sample has one"
                )
        elif not isinstance(value, (int, float)):
            raise ValueError(
                f"the loss reported {name!r} as {type(value).__name__}: metrics are numbers or "
                "tensors of one element"
            )
        row[name] = _kept(value)
    outputs = {name: _by_sample(name, metrics[name], piece) for name in names}
    return total.reshape(()) if has_graph else None, Reported(row=row, outputs=outputs)


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _by_sample(name: str, value: Any, piece: Piece) -> tuple[Tensor, ...]:
    """Split a value that has an entry for each sequence, or for each token of a pack."""
    segments = piece.segments
    number = piece.sequences if segments is None else len(segments.lengths)
    if isinstance(value, (list, tuple)) and all(isinstance(each, Tensor) for each in value):
        if len(value) == number:
            return tuple(each.detach() for each in value)
        told = f"{len(value)} tensors"
    elif isinstance(value, Tensor) and value.dim():
        value = value.detach()
        if segments is not None:
            flat = value[0] if value.dim() > 1 and len(value) == 1 else value
            if len(flat) == piece.positions:
                spans = zip(segments.starts, segments.lengths, strict=True)
                return tuple(flat[start : start + length] for start, length in spans)
        if len(value) == number:
            return tuple(value.unbind())
        told = f"shape {tuple(value.shape)}"
    else:
        told = type(value).__name__
    tokens = "" if segments is None else f", or {piece.positions}, one for each token of the pack"
    raise ValueError(
        f"the loss returned the output {name!r} as {told} for {number} sequences: return a tensor "
        f"or list whose first dimension is {number}{tokens}"
    )


def as_numbers(rows: Sequence[Row]) -> tuple[dict[str, float], ...]:
    """Return the rows with floats as values; all come from the device in one transfer."""
    found = [(index, name, value) for index, row in enumerate(rows) for name, value in row.items()]
    tensors = [
        value.detach().reshape(()).to(torch.float64)
        for _, _, value in found
        if isinstance(value, Tensor)
    ]
    numbers = iter(torch.stack(tensors).tolist() if tensors else ())
    result: tuple[dict[str, float], ...] = tuple({} for _ in rows)
    for index, name, value in found:
        result[index][name] = next(numbers) if isinstance(value, Tensor) else float(value)
    return result


def over_all(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the rows' metrics as one row: minima and maxima by name, everything else summed."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    return {
        name: (min if "_min" in name else max if "_max" in name else sum)(values)
        for name, values in found.items()
    }


_OF_GRADIENT: Mapping[Kind, Normalizer] = {
    "token": "tokens",
    "sequence": "sequences",
    "group": "groups",
    "none": "none",
}


class Totals:
    """Sums counts and metrics of a step over all ranks; `counts` has what is valid."""

    def __init__(
        self,
        loss: StepLoss,
        counts: Iterable[tuple[float, float]],
        rows: Sequence[tuple[int, int, Mapping[str, float]]],
        groups: Iterable[Sequence[int]] = (),
    ) -> None:
        """Sum `counts` and `groups`, one per rank, and `rows`, each with its rank and replica.

        Under context parallelism several ranks of a replica have rows of the same microbatches.
        """
        self._told = rows
        number: dict[int, int] = {}
        parts: dict[tuple[int, int], list[tuple[int, Mapping[str, float]]]] = {}
        for rank, replica, row in rows:
            index = number[rank] = number.get(rank, -1) + 1
            parts.setdefault((replica, index), []).append((rank, row))
        # One row for each microbatch, under the first rank: rows of its parts are added up.
        add = returned_by(loss) == "part"
        self._rows = [
            (told[0][0], replica, over_all(row for _, row in told) if add else told[0][1])
            for (replica, _), told in parts.items()
        ]
        sequences = tokens = 0.0
        self.is_whole = True
        """True if no rank's counts have fractions."""
        for here in counts:
            self.is_whole = self.is_whole and all(each == int(each) for each in here)
            sequences += here[0]
            tokens += here[1]
        self.counts = StepCounts(
            tokens=tokens,
            sequences=sequences,
            groups=len({each for ids in groups for each in ids}),
            microbatches=len(self._rows),
            reported=over_all(row for _, _, row in self._rows),
        )
        self.divisor: float | None = None
        """The number that gradients are divided by, if one was given instead of a count."""
        self._kind: Kind = loss.kind
        self._normalizers = loss.normalizers

    @property
    def is_counted(self) -> bool:
        """True if the normalizer is a sum of valid tokens or sequences over ranks, and not 0."""
        return self.divisor is None and self._kind in ("token", "sequence") and bool(self._count)

    @property
    def is_empty(self) -> bool:
        """True if nothing is valid on any rank."""
        return not self._count or not self._rows

    @property
    def normalizer(self) -> float:
        """The number that gradients are divided by; 1 where nothing is valid."""
        return self._count or 1.0

    @property
    def _count(self) -> float:
        return self._counted(_OF_GRADIENT[self._kind]) if self.divisor is None else self.divisor

    def _counted(self, kind: Normalizer) -> float:
        return 1.0 if kind == "none" else float(getattr(self.counts, kind))

    def bad_losses(self) -> dict[int, str]:
        """Name the first loss of each rank that is NaN or infinite, by global rank."""
        found: dict[int, str] = {}
        number: dict[int, int] = {}
        for rank, _, row in self._told:
            number[rank] = number.get(rank, 0) + 1
            if not math.isfinite(row["loss"]):
                found.setdefault(
                    rank, f"the loss of its microbatch {number[rank]} is {row['loss']}"
                )
        return found

    def rows(self, **also: float) -> tuple[dict[str, float], ...]:
        """Return each microbatch's metrics, divided by their normalizers, and the step's counts.

        Each row also has the items of `also`, its rank and its replica.
        """
        everywhere = {
            **also,
            "global_valid_seqs": self.counts.sequences,
            "global_valid_toks": self.counts.tokens,
        }
        return tuple(
            {
                **{name: value * self._scale(name) for name, value in row.items()},
                **everywhere,
                "rank": rank,
                "replica": replica,
            }
            for rank, replica, row in self._rows
        )

    def metrics(self) -> dict[str, float]:
        """Return metrics over the whole step: extrema by name, all else summed and divided."""
        return {name: value * self._scale(name) for name, value in self.counts.reported.items()}

    def _scale(self, name: str) -> float:
        if "_min" in name or "_max" in name:
            return 1.0
        kind = self._normalizers.get(name)
        # With nothing valid the sums are sums of nothing.
        return 1.0 / ((self._count if kind is None else self._counted(kind)) or 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """Tells what an optimizer step did.

    Example: `Update(skipped=None, grad_norm=1.5)`.
    """

    skipped: str | None
    """The reason for which no parameter was updated; None if they were."""
    grad_norm: float | None
    """Norm of the gradients before clipping; None where it was not computed."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """Says what one `microbatch()` has run. Example: `step.microbatch(step_id, batch).rows`."""

    microbatch_id: str
    rows: int
    """The number of the batch's sequences, masked ones included."""
    microbatches: int
    """The number of microbatches that this rank ran for the batch."""
    outputs: Mapping[str, tuple[Tensor, ...]] = dataclasses.field(default_factory=dict, repr=False)
    """A tensor for each sequence, in the order given, by the names in the loss's `outputs`. Only
    ranks that have the loss (those of the last pipeline stage) have any."""
    reported: tuple[Row, ...] = dataclasses.field(default=(), repr=False)
    """The sum and the metrics that the loss returned for each microbatch, on ranks that have it."""

    def metrics(self) -> dict[str, float]:
        """Return sums over this rank's microbatches, not divided by anything, and extrema by name.

        It waits for the device, as `finish()` does once for the whole step. Empty on ranks that do
        not have the loss.
        """
        return over_all(as_numbers(self.reported))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Says what a step has done, on all ranks alike. Example: `step.finish(step_id).metrics`."""

    step_id: str
    updated: bool
    """True if the optimizer changed parameters."""
    skipped: str | None
    """The reason for which no update was made: nothing was valid in the step, gradients overflowed
    under a loss scale (and what became of the scale), or `non_finite="skip"`; else None."""
    grad_norm: float | None
    """Norm before clipping, of gradients divided by the normalizer; None if not computed."""
    global_valid_sequences: float
    global_valid_tokens: float
    microbatches: int
    """Microbatches of all data-parallel ranks together."""
    auxiliary_loss_scale: float
    """1 / microbatches of this rank, for Megatron's logging of MoE and MTP losses:
    `track_moe_metrics(loss_scale=…)`. This and `reported_by` may differ between ranks."""
    lr: float
    """The learning rate of this step, before the scheduler moved on."""
    weight_decay: float
    metrics: Mapping[str, float]
    """Metrics over all microbatches of all ranks: sums ÷ their normalizer, minima, maxima."""
    rows: tuple[Mapping[str, float], ...]
    """A row per microbatch of all replicas, by the rank that reports it and then in order; each is
    normalised as `metrics` is, and has `lr`, `wd`, `global_valid_seqs`, `global_valid_toks`,
    `rank` (the global rank that reports for its replica) and `replica` (its data-parallel rank)."""
    reported_by: int = dataclasses.field(default=0, compare=False)
    """Global rank of this process."""
    replica: int = dataclasses.field(default=0, compare=False)
    """Data-parallel rank of this process."""

    @property
    def own_rows(self) -> tuple[Mapping[str, float], ...]:
        """The rows that this rank reports; over all ranks together, each row of the step once.

        One rank of each replica reports; the others have no rows.
        """
        return tuple(row for row in self.rows if row["rank"] == self.reported_by)

    @property
    def replica_rows(self) -> tuple[Mapping[str, float], ...]:
        """The rows of this rank's replica, in the order of its microbatches; on all its ranks."""
        return tuple(row for row in self.rows if row["replica"] == self.replica)
