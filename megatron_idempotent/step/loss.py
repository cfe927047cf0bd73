"""Checks arguments of a step's calls, calls its loss, and sums the loss's results.

Legend: B rows, n sequences of a microbatch, T positions of a row, or all tokens of a pack.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from megatron_idempotent.fp8.packing import TokenAlignment
from megatron_idempotent.megatron.expert_replay import ReplayMode
from megatron_idempotent.window.agreement import describe

from .microbatches import SAMPLE_MASK, TOKEN_MASK, TOKENS, Microbatch, kind_of

NonFinite = Literal["refuse", "skip", "update"]
"""The act of `finish` if a loss or the norm of the gradients is NaN or infinite: raise, drop the
gradients and go on, or update all the same."""

NothingValid = Literal["skip", "update"]
"""The act of `finish` if nothing is valid on any rank: leave all as it is, or let the optimizer
step with gradients that are divided by 1."""

Normalizer = Literal["tokens", "sequences", "groups", "microbatches", "none"]
"""Denominator of a metric: the valid tokens or sequences, groups or microbatches of all ranks in
the step; or "none", if it is not divided."""

Kind = Literal["token", "sequence", "group", "none"]
"""The unit of a loss's mean: valid tokens, valid sequences or groups of the step; or "none", if the
caller has divided already."""

ContextScope = Literal["part", "whole"]
"""Scope of a loss's sums under context parallelism: this rank's positions, which are added up over
the ranks, or whole rows, the same on each rank."""

_METRIC_NAMES: Mapping[Normalizer, str] = {
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
    {name: kind for kind, names in _METRIC_NAMES.items() for name in names.split()}
)
"""Denominators of the usual policy-gradient metrics, by name, for sums that a loss returns.

Metrics that go into the loss, such as a penalty, are not among them: they are divided as the loss
is. Names are common ones, and those of NeMo-RL, SkyRL and verl.

A loss adds its own: `{**POLICY_GRADIENT_NORMALIZERS, "is_oob_ratio": "sequences"}`.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepCounts:
    """Holds the counts of a step, such as valid tokens, summed over all ranks.
    If the step's `divisor` is a function, it is called with this object.

    Example: `divisor=lambda counts: counts.groups`.
    """

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
        """The unit whose number divides the gradients: valid tokens, valid sequences or groups,
        counted over the step on all ranks; "none" if the loss is divided already.
        """

    @property
    def normalizers(self) -> Mapping[str, Normalizer]:
        """Metric's name → its denominator.
        Metrics without an entry are divided as the gradients are.
        """

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


def context_scope(loss: StepLoss) -> ContextScope:
    """Return the loss's attribute `context_parallel`, by default "part".
    It says which positions of the rows the loss sums over: this context-parallel rank's ("part"),
    or those of all context-parallel ranks ("whole").
    """
    scope: ContextScope = getattr(loss, "context_parallel", "part")
    return scope


def counts_groups(loss: StepLoss) -> bool:
    """Return True if the loss's divisor, or that of one of its metrics, is the number of groups."""
    return loss.kind == "group" or "groups" in loss.normalizers.values()


def lacks_auxiliary_weight(loss: StepLoss) -> bool:
    """Return whether the loss needs an `auxiliary_weight` for auxiliary losses, and has none."""
    return loss.kind in ("group", "none") and getattr(loss, "auxiliary_weight", None) is None


def auxiliary_weight(loss: StepLoss, microbatch: Microbatch, number: int) -> float:
    """Return the number that a microbatch's auxiliary losses are multiplied by.

    They are means over `number` positions, or over its tokens if padding is left out.
    """
    weight = getattr(loss, "auxiliary_weight", None)
    if weight is not None:
        return float(weight(microbatch.inputs) if callable(weight) else weight)
    return float(number if loss.kind == "token" else microbatch.sequences)


class _Rule(NamedTuple):
    """Says which values an argument may have: in words, and by a function that checks a value."""

    takes: str
    accepts: Callable[[Any], bool]
    error: type[Exception] = ValueError


def is_number(value: Any) -> bool:
    """Return whether the value is an int or a float; a bool is neither here."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _are_names(value: Any) -> bool:
    is_listed = isinstance(value, Collection) and not isinstance(value, str)
    return is_listed and all(isinstance(name, str) for name in value)


def _optional(takes: str, accepts: Callable[[Any], bool]) -> _Rule:
    return _Rule(takes, lambda value: value is None or accepts(value))


def _one_of(choices: tuple[str, ...]) -> _Rule:
    return _Rule(f"one of {', '.join(map(repr, choices))}", lambda value: value in choices)


def _instance(kind: type) -> _Rule:
    return _Rule(f"a {kind.__name__}", lambda value: isinstance(value, kind))


_COUNTED = {TOKENS, SAMPLE_MASK, TOKEN_MASK}
_SIZE = _optional("a positive int", lambda value: type(value) is int and value >= 1)
_SWITCH = _Rule("True or False", lambda value: isinstance(value, bool), TypeError)
_READY_FUNCTION = _optional("a function of a ready microbatch", callable)
ARGUMENTS: Mapping[str, _Rule] = {
    "forward": _Rule(
        "a function of (model, microbatch), or nothing for the usual one", callable, TypeError
    ),
    "shared": _Rule(
        "a collection of names in batches, but for those by whose rows a step counts "
        f"({', '.join(sorted(_COUNTED))}),",
        lambda value: _are_names(value) and _COUNTED.isdisjoint(value),
    ),
    "shape": _READY_FUNCTION,
    "counts": _READY_FUNCTION,
    "alignment": _optional("a TokenAlignment", lambda value: isinstance(value, TokenAlignment)),
    "non_finite": _one_of(get_args(NonFinite)),
    "nothing_valid": _one_of(get_args(NothingValid)),
    "router_replay": _one_of(get_args(ReplayMode)),
    "undo": _SWITCH,
    "order_stable": _SWITCH,
    "clip_grad": _optional(
        "a positive number or None", lambda value: is_number(value) and value > 0
    ),
    "grad_scaler": _optional(
        "a torch.amp.GradScaler", lambda value: isinstance(value, torch.amp.GradScaler)
    ),
    **dict.fromkeys(("global_batch_size", "micro_batch_size"), _SIZE),
    **dict.fromkeys(("max_tokens_per_microbatch", "rank_batch_size"), _SIZE),
    "divisor": _optional(
        "a positive number, or a function of StepCounts that returns one,",
        lambda value: callable(value) or (is_number(value) and 0 < value < math.inf),
    ),
    "lr": _optional(
        "a finite number from 0 on", lambda value: is_number(value) and 0 <= value < math.inf
    ),
    "step_id": _instance(str),
    "microbatch_id": _optional("a str", lambda value: isinstance(value, str)),
    "last": _instance(bool),
}
"""The arguments of a step's calls, by name: what each takes."""

_LOSS_ATTRIBUTES: Mapping[str, tuple[Any, _Rule]] = {
    "kind": (None, _one_of(get_args(Kind))),
    "context_parallel": ("part", _one_of(get_args(ContextScope))),
    "normalizers": (
        None,
        _Rule(
            "a mapping from names of metrics, empty where all use the gradients', to one of "
            f"{', '.join(get_args(Normalizer))}",
            lambda value: (
                isinstance(value, Mapping)
                and _are_names(value)
                and all(kind in get_args(Normalizer) for kind in value.values())
            ),
        ),
    ),
    "outputs": ((), _Rule("a tuple of names", _are_names)),
    "auxiliary_weight": (
        None,
        _optional(
            "a finite number, or a function of a microbatch that returns one",
            lambda value: (
                callable(value) or (isinstance(value, (int, float)) and math.isfinite(value))
            ),
        ),
    ),
}
"""The attributes of a loss, by name: the value of one that is not there, and what each takes."""


def check_arguments(call: str, **values: Any) -> None:
    """Raise for the first argument whose value is not one that `ARGUMENTS` accepts for its name.

    Raises:
        ValueError, TypeError: names the argument, its value, and what it takes.
    """
    for name, value in values.items():
        rule = ARGUMENTS[name]
        if not rule.accepts(value):
            raise rule.error(f"{call}() takes {rule.takes} as {name}, got {value!r}")


def check_begin(begun_with: Mapping[str, Any], step_id: str | None) -> None:
    """Raise `ValueError` if a step cannot begin with these arguments; `RuntimeError` if torch
    records no gradient.
    """
    _check_loss(begun_with["loss"])
    check_arguments("begin", **{name: v for name, v in begun_with.items() if name != "loss"})
    if step_id is not None:
        check_arguments("begin", step_id=step_id)
    rows, tokens = begun_with["micro_batch_size"], begun_with["max_tokens_per_microbatch"]
    if rows is not None and tokens is not None:
        raise ValueError(
            f"begin() got micro_batch_size={rows!r}, max_tokens_per_microbatch={tokens!r}: "
            "microbatches are cut by rows or by tokens; give one of the two"
        )
    refuse_no_grad("begin")


def _check_loss(loss: Any) -> None:
    if isinstance(loss, type):
        raise ValueError(
            f"begin() got the class {loss.__name__} as loss, of which a call makes an object and "
            f"no loss: pass an object of it, {loss.__name__}(…)"
        )
    if not callable(loss):
        raise ValueError(f"begin() takes a callable object as loss, got {loss!r}")
    for name, (default, rule) in _LOSS_ATTRIBUTES.items():
        value = getattr(loss, name, default)
        if not rule.accepts(value):
            raise ValueError(
                f"begin() got {loss!r} as loss, whose `{name}` is {value!r}: give it {rule.takes}"
            )


def refuse_no_grad(call: str) -> None:
    """Raise `RuntimeError` if torch records no gradient now, as in `no_grad` and
    `inference_mode`.
    """
    if not torch.is_grad_enabled():
        context = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise RuntimeError(
            f"{call}() was called inside of torch.{context}(), where a step would have no "
            "gradient: leave that context around the call"
        )


def call_divisor(divisor: Callable[[StepCounts], float], counts: StepCounts) -> float:
    """Call the caller's divisor function with the step's counts, and return its number. It may be
    0, which means that nothing is valid.

    Raises:
        ValueError: it returned no finite number from 0 on.
    """
    value = call_user("divisor", divisor, counts)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not is_number(value) or not (0 <= value < math.inf):
        raise ValueError(
            f"divisor({counts}) returned {value!r}: return a finite number from 0 on, the same on "
            "all ranks"
        )
    return float(value)


RESERVED = ("loss", "lr", "wd", "global_valid_seqs", "global_valid_toks", "rank", "replica")
"""Names that the step puts into each row by itself, so that a loss may not report them."""

Metrics = Mapping[str, Any]
"""The sum of a loss over a microbatch, as "loss", and its metrics; tensors are on the device."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossResult:
    """Holds the metrics and outputs that a loss returned for one microbatch.

    Example: `evaluate(loss, output, microbatch)[1]`.
    """

    metrics: Metrics
    outputs: Mapping[str, Sequence[Tensor]]
    """A tensor for each of the n sequences, without its graph, by name."""


OWN_BACKWARD = (
    "the loss ran a backward through the model by itself, and the step's own would add gradients a "
    "second time: return the sum alone, and leave its backward to the step"
)
_REMEDIES: Mapping[type[BaseException], str] = {
    StopIteration: "which a `for` around the step would take for its end: give its next() a "
    "default, or put what it reads into the batch",
    SystemExit: "which would end this rank while others wait for it: raise an exception that says "
    "why, abort() on all ranks, and exit then",
}


def call_user(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that the user gave, and return its result. Error messages name the function
    `name`.

    Raises:
        RuntimeError: it raised StopIteration or SystemExit, and not from a signal's handler.
    """
    try:
        return function(*args)
    except tuple(_REMEDIES) as error:
        handlers = [getattr(signal.getsignal(n), "__code__", None) for n in signal.valid_signals()]
        if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise
        remedy = next(text for kind, text in _REMEDIES.items() if isinstance(error, kind))
        raise RuntimeError(f"{name} raised {describe(error)}, {remedy}") from error


def evaluate(
    loss: StepLoss, output: Any, microbatch: Microbatch
) -> tuple[Tensor | None, LossResult]:
    """Call the loss on a microbatch's output.
    Return the loss's sum, and a `LossResult` with its metrics and outputs.

    The sum is a scalar that a backward can start at, or None for the constant 0. Metrics and
    outputs are copied or detached, so that later changes do not reach them.

    Raises:
        ValueError: it returned something else than a sum and metrics, the sum is neither a scalar
            with its graph nor the constant 0, a metric is no scalar or has no name or one that the
            step uses itself, or an output is missing or has not one entry for each sequence or
            token.
        RuntimeError: see `call_user`.
    """
    returned: Any = call_user("the loss", loss, output, microbatch.inputs)
    is_sequence = isinstance(returned, (tuple, list))
    if not is_sequence or len(returned) != 2 or not hasattr(returned[1], "items"):
        kinds = f"({', '.join(map(_kind, returned))})" if is_sequence else _kind(returned)
        raise ValueError(
            f"the loss returned {kinds}: return two values, the sum over the microbatch and a "
            "mapping from names of metrics to their sums, {} if there are none"
        )
    total, values = returned
    nameless = [name for name in values if not isinstance(name, str)]
    if nameless:
        raise ValueError(f"the loss reported metrics named {_listed(nameless)}: names are str")
    reserved = [name for name in RESERVED if name in values]
    if reserved:
        raise ValueError(
            f"the loss reported metrics named {_listed(reserved)}, which the step puts into each "
            f"row itself, as {_listed(RESERVED)}: give them other names"
        )
    has_graph = isinstance(total, Tensor) and total.requires_grad
    # Another constant is a mistake: a graph that was lost, and gradients that would be zero.
    if not _is_scalar(total) or (not has_graph and float(total) != 0.0):
        value = f", the constant {float(total):g}" if _is_scalar(total) else ""
        raise ValueError(
            f"the loss returned {kind_of(total)} with requires_grad={has_graph}{value}: return "
            "the sum over the microbatch, a scalar with the graph that it was computed by, or the "
            "constant 0 where nothing is valid"
        )
    output_names = tuple(getattr(loss, "outputs", ()))
    missing = [name for name in output_names if name not in values]
    if missing:
        raise ValueError(
            f"the loss names {_listed(missing)} in its `outputs`, and has returned "
            f"{_listed(values) or 'no metric'}: return them beside the metrics"
        )
    metrics = {"loss": _detached_copy(total)}
    for name, value in values.items():
        if name in output_names:
            continue
        if not _is_scalar(value):
            raise ValueError(
                f"the loss reported {name!r} as {kind_of(value)}: metrics are numbers or tensors "
                "of one element, summed over the microbatch; name it in the loss's `outputs` if "
                "each sample has one"
            )
        metrics[name] = _detached_copy(value)
    outputs = {name: _by_sequence(name, values[name], microbatch) for name in output_names}
    return total.reshape(()) if has_graph else None, LossResult(metrics=metrics, outputs=outputs)


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _is_scalar(value: Any) -> bool:
    is_one = isinstance(value, Tensor) and value.numel() == 1
    return is_one or isinstance(value, (int, float))


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(repr, names))


def _detached_copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _by_sequence(name: str, value: Any, microbatch: Microbatch) -> tuple[Tensor, ...]:
    """Split `value`, an output of the loss, into a tuple with a tensor for each sequence. `value`
    has an item for each sequence or, if the microbatch is a pack, possibly for each token.
    """
    spans, number = microbatch.spans, microbatch.entries
    is_listed = isinstance(value, (list, tuple)) and len(value) == number
    if is_listed and all(isinstance(entry, Tensor) for entry in value):
        return tuple(entry.detach() for entry in value)
    if isinstance(value, Tensor) and value.dim():
        value = value.detach()
        if spans is not None:
            tokens_T = value[0] if value.dim() > 1 and len(value) == 1 else value
            if len(tokens_T) == microbatch.positions:
                return tuple(tokens_T[start : start + length] for start, length in spans)
        if len(value) == number:
            return tuple(value.unbind())
    or_tokens = f", or {microbatch.positions}, one for each token of the pack" if spans else ""
    raise ValueError(
        f"the loss returned the output {name!r} as {kind_of(value)} for {number} sequences: "
        f"return a tensor or list whose first dimension is {number}{or_tokens}"
    )


def as_numbers(rows: Sequence[Metrics]) -> tuple[dict[str, float], ...]:
    """Return the metrics with floats as values; all come from the device in one transfer."""
    tensors = [
        value.detach().reshape(()).to(torch.float64)
        for row in rows
        for value in row.values()
        if isinstance(value, Tensor)
    ]
    numbers = iter(torch.stack(tensors).tolist() if tensors else ())
    return tuple(
        {
            name: next(numbers) if isinstance(value, Tensor) else float(value)
            for name, value in row.items()
        }
        for row in rows
    )


def merge(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of several rows as one row: the minimum or maximum of a metric whose name
    has `_min` or `_max`, the sum of any other.
    """
    by_name: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            by_name.setdefault(name, []).append(value)
    return {
        name: (min if "_min" in name else max if "_max" in name else sum)(values)
        for name, values in by_name.items()
    }


_NORMALIZER_OF: Mapping[Kind, Normalizer] = {
    "token": "tokens",
    "sequence": "sequences",
    "group": "groups",
    "none": "none",
}


class StepTotals:
    """Sums a step's counts and metrics over all ranks.
    Its attribute `counts` has the summed counts.
    """

    def __init__(
        self,
        loss: StepLoss,
        counts: Sequence[tuple[float, float]],
        groups: Iterable[Sequence[int]],
        rows: Sequence[tuple[int, Sequence[Mapping[str, float]]]],
    ) -> None:
        """Add up the counts, groups and metrics of all ranks. By rank, `counts` has (valid
        sequences, valid tokens), `groups` the ids of the groups, and `rows` the replica and a row
        of metrics for each microbatch.

        Under context parallelism several ranks of a replica have rows of the same microbatches.
        """
        self._rank_rows = rows
        parts: dict[tuple[int, int], list[tuple[int, Mapping[str, float]]]] = {}
        for rank, (replica, rows_of_rank) in enumerate(rows):
            for index, row in enumerate(rows_of_rank):
                parts.setdefault((replica, index), []).append((rank, row))
        # One row for each microbatch, under the first rank: rows of its parts are added up.
        are_added = context_scope(loss) == "part"
        self._rows = [
            (ranks[0][0], replica, merge(row for _, row in ranks) if are_added else ranks[0][1])
            for (replica, _), ranks in parts.items()
        ]
        self.is_integral = all(number.is_integer() for pair in counts for number in pair)
        """True if no rank's counts have fractions."""
        self.counts = StepCounts(
            tokens=sum(tokens for _, tokens in counts),
            sequences=sum(sequences for sequences, _ in counts),
            groups=len({group for ids in groups for group in ids}),
            microbatches=len(self._rows),
            reported=merge(row for _, _, row in self._rows),
        )
        self.own_count = 0.0
        """The number of valid tokens of this rank's replica or, for a loss of another kind than
        "token", of valid sequences."""
        self.divisor: float | None = None
        """The number that gradients are divided by, if one was given instead of a count."""
        self.bad_parameters: Mapping[int, str] = {}
        """Descriptions of parameters that are not finite, by global rank."""
        self.lr, self.weight_decay = 0.0, 0.0
        """The learning rate and the weight decay of the step, the same on all ranks."""
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
        if self.divisor is not None:
            return self.divisor
        return self._counted(_NORMALIZER_OF[self._kind])

    def _counted(self, kind: Normalizer) -> float:
        return 1.0 if kind == "none" else float(getattr(self.counts, kind))

    def bad_losses(self) -> dict[int, str]:
        """Describe, by global rank, the first loss of each rank that is NaN or infinite."""
        faults: dict[int, str] = {}
        for rank, (_, rows) in enumerate(self._rank_rows):
            for number, row in enumerate(rows, start=1):
                if not math.isfinite(row["loss"]):
                    faults.setdefault(rank, f"the loss of its microbatch {number} is {row['loss']}")
        return faults

    def rows(self) -> tuple[dict[str, float], ...]:
        """Return each microbatch's metrics, divided by their normalizers, and the step's counts.

        Each row also has the step's `lr` and `wd`, its rank and its replica.
        """
        constants = {
            "lr": self.lr,
            "wd": self.weight_decay,
            "global_valid_seqs": self.counts.sequences,
            "global_valid_toks": self.counts.tokens,
        }
        return tuple(
            {
                **{name: value * self._scale(name) for name, value in row.items()},
                **constants,
                "rank": rank,
                "replica": replica,
            }
            for rank, replica, row in self._rows
        )

    def metrics(self) -> dict[str, float]:
        """Return metrics of the whole step by name: minima and maxima as they are, all others
        summed over microbatches and ranks and divided by their normalizers.
        """
        return {name: value * self._scale(name) for name, value in self.counts.reported.items()}

    def _scale(self, name: str) -> float:
        if "_min" in name or "_max" in name:
            return 1.0
        kind = self._normalizers.get(name)
        # With nothing valid the sums are sums of nothing.
        return 1.0 / ((self._count if kind is None else self._counted(kind)) or 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """Tells whether an optimizer step has updated parameters, and has the gradients' norm.

    Example: `Update(skipped=None, grad_norm=1.5)`.
    """

    skipped: str | None
    """The reason for which no parameter was updated; None if they were."""
    grad_norm: float | None
    """Norm of the gradients before clipping; None where it was not computed."""


def reason_to_skip(grad_norm: float, rule: NonFinite) -> str | None:
    """Return the reason to skip the update if `grad_norm` is NaN or infinite and `rule`, the step's
    option `non_finite`, is "skip"; None if the update is to be made.

    All ranks decide the same, because the norm is that of all ranks.

    Raises:
        RuntimeError: the norm is not finite, and the rule is "refuse".
    """
    if math.isfinite(grad_norm) or rule == "update":
        return None
    fault = f"the norm of the gradients is {grad_norm}"
    if rule == "skip":
        return f"{fault}, and non_finite='skip'"
    raise RuntimeError(
        f"{fault}, and the update would spread that to all parameters; no rank has begun it. "
        "non_finite='skip' drops such steps"
    )
