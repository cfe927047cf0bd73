"""Inputs and results of a split step, and its options."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, Protocol, get_args

import torch

Normalizer = Literal["tokens", "sequences", "none"]
"""Denominator of a metric: valid tokens or sequences of all ranks in the step, or none at all."""

Kind = Literal["token", "sequence"]
"""The unit of a loss's mean: the step's valid tokens, or its valid sequences."""

NonFinite = Literal["refuse", "skip", "update"]
"""The act of `finish` where a loss or the norm of the gradients is NaN or infinite: raise, drop the
gradients and go on, or update all the same."""

Batch = Mapping[str, Any]
"""Tensors, lists and tuples with an item per row; scalars, and what a step shares, are for all."""

TOKENS, SAMPLE_MASK, TOKEN_MASK = "input_ids", "sample_mask", "token_mask"
"""Names in a batch of what makes its rows, and of what in them counts."""

COUNTS = "counts"
"""Name in a ready microbatch of its valid sequences and tokens, where the caller has counted."""

RESERVED = ("loss", "lr", "wd", "global_valid_seqs", "global_valid_toks", "rank", "replica")
"""Names that the step puts into each row by itself, so that a loss may not report them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options that both engines are made with. Example: `checked_options(20.0, "refuse", ())`."""

    deadline_s: float
    non_finite: NonFinite
    shared: frozenset[str]
    """Names in batches that all rows share."""
    shape: Callable[[Any], tuple[int, int]] | None = None
    """Gives rows and positions of a ready microbatch; None to look at its `input_ids`."""
    counts: Callable[[Any], Any] | None = None
    """Gives valid sequences and tokens of a ready microbatch; None to count them."""


class StepLoss(Protocol):
    """A loss that is a sum, with what the sum is to be divided by.

    Example:
        class PolicyGradient:
            kind = "token"
            normalizers = {"nll": "tokens", "samples": "none"}

            def __call__(self, output, microbatch):
                # What counts here is what the step counts: valid tokens of valid samples.
                tokens_BT, mask_BT = microbatch["input_ids"], microbatch["token_mask"]
                targets_BT = tokens_BT.roll(-1, 1)
                valid_BT = torch.nn.functional.pad(mask_BT[:, 1:], (0, 1)) > 0
                valid_BT &= microbatch["sample_mask"][:, None] > 0
                stats = token_logprobs(logits=output, targets=targets_BT, token_mask=valid_BT)
                loss = -(stats.logprob * microbatch["advantages"][:, None]).sum()
                return loss, {"nll": -stats.logprob.sum(), "samples": len(output)}
    """

    @property
    def kind(self) -> Kind:
        """The divisor of gradients: the valid tokens or the valid sequences of all ranks."""

    @property
    def normalizers(self) -> Mapping[str, Normalizer]:
        """Denominator by name of metric; metrics that are not named use that of the gradient."""

    def __call__(
        self, output: Any, microbatch: Batch, /
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor | float]]:
        """The sum (not the mean) of the loss over one microbatch, a scalar, and its metrics.

        Called on the last pipeline stage with what `forward` made there: logits, or where that is
        `model_logprobs`, TokenStats. Under tensor parallelism logits [B, T, V / tp] are this rank's
        columns, for `token_logprobs(…, tp_group=…)`. Metrics are scalars, sums too unless their
        normalizer is "none"; those with `_min` or `_max` in their name are extrema and never
        divided.
        """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """The counts that one `microbatch()` added. Example: `step.microbatch(step_id, batch).rows`."""

    microbatch_id: str
    rows: int
    """Sequences of the batch, masked ones included."""
    microbatches: int
    """Forward and backward passes that this rank made for them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The result of a step; equal on all ranks. Example: `step.finish(step_id).metrics`."""

    step_id: str
    updated: bool
    """True if the optimizer changed parameters."""
    skipped: str | None
    """Why it did not: nothing valid in the step, gradients that overflowed under a loss scale (and
    what became of the scale), or `non_finite="skip"`."""
    grad_norm: float | None
    """Norm before clipping, of gradients divided by the normalizer; None where not computed."""
    global_valid_sequences: float
    global_valid_tokens: float
    microbatches: int
    """Microbatches of all data-parallel ranks together."""
    auxiliary_loss_scale: float
    """1 / microbatches of this rank: what Megatron's logging of MoE and MTP losses wants, in
    `track_moe_metrics(loss_scale=…)`. It and `reported_by` may differ between ranks."""
    lr: float
    """The learning rate of this step, before the scheduler moved on."""
    weight_decay: float
    metrics: Mapping[str, float]
    """Over all microbatches of all ranks: sums divided by their normalizer, minima, maxima."""
    rows: tuple[Mapping[str, float], ...]
    """One per microbatch of all replicas, by the rank that reports it and then in order; each
    normalised as `metrics` is, and with `lr`, `wd`, `global_valid_seqs`, `global_valid_toks`,
    `rank` (the global rank that reports for its replica) and `replica` (its data-parallel rank)."""
    reported_by: int = dataclasses.field(default=0, compare=False)
    """Global rank of this process."""

    @property
    def own_rows(self) -> tuple[Mapping[str, float], ...]:
        """The rows that this rank reports: joined over all ranks, each row of the step once.

        One rank of each replica reports; the others have none.
        """
        return tuple(row for row in self.rows if row["rank"] == self.reported_by)


def _check_loss(loss: Any) -> None:
    kinds, normalizers = get_args(Kind), get_args(Normalizer)
    if not callable(loss) or getattr(loss, "kind", None) not in kinds:
        raise ValueError(
            f"begin() got {loss!r} as loss, with kind {getattr(loss, 'kind', None)!r}: pass a "
            f"callable object whose `kind` is one of {', '.join(kinds)}"
        )
    named = getattr(loss, "normalizers", None)
    if not isinstance(named, Mapping):
        raise ValueError(
            f"begin() got a loss whose `normalizers` is {named!r}: give it a mapping from names of "
            f"metrics to one of {', '.join(normalizers)}; empty where all use the gradient's"
        )
    wrong = {
        name: value
        for name, value in named.items()
        if not isinstance(name, str) or value not in normalizers
    }
    if wrong:
        raise ValueError(
            f"begin() got a loss with normalizers {wrong!r}: give names of metrics one of "
            f"{', '.join(normalizers)}"
        )


def check_begin(begun_with: Mapping[str, Any], step_id: str | None) -> None:
    """Raise `ValueError` unless a step can begin with these arguments."""
    _check_loss(begun_with["loss"])
    for name in ("global_batch_size", "micro_batch_size", "rank_batch_size"):
        value = begun_with[name]
        if value is None and name != "global_batch_size":
            continue
        if type(value) is not int or value < 1:
            raise ValueError(f"begin() takes a positive int as {name}, got {value!r}")
    if step_id is not None and not isinstance(step_id, str):
        raise ValueError(f"begin() takes a str as step_id, got {step_id!r}")


def checked_options(
    deadline_s: Any, non_finite: Any, shared: Any, shape: Any = None, counts: Any = None
) -> Options:
    """Put the options together.

    Raises:
        ValueError: a deadline that is no positive number, an unknown `non_finite`, `shared` that
            is no collection of names, or names what is counted, or a `shape` or `counts` that
            cannot be called.
    """
    for name, function in (("shape", shape), ("counts", counts)):
        if function is not None and not callable(function):
            raise ValueError(f"{name} takes a function of a ready microbatch, got {function!r}")
    if non_finite not in get_args(NonFinite):
        known = ", ".join(map(repr, get_args(NonFinite)))
        raise ValueError(f"non_finite must be one of {known}, got {non_finite!r}")
    names = not isinstance(shared, str) and isinstance(shared, Collection)
    if not names or not all(isinstance(name, str) for name in shared):
        raise ValueError(f"shared must be a collection of names in batches, got {shared!r}")
    counted = {TOKENS, SAMPLE_MASK, TOKEN_MASK}.intersection(shared)
    if counted:
        raise ValueError(
            f"shared names {sorted(counted)}, by whose rows a step counts: leave them out"
        )
    return Options(
        deadline_s=_checked_deadline(deadline_s),
        non_finite=non_finite,
        shared=frozenset(shared),
        shape=shape,
        counts=counts,
    )


def _checked_deadline(deadline_s: Any) -> float:
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, (int, float)):
        raise ValueError(f"deadline_s is a number of seconds, got {deadline_s!r}")
    if not deadline_s > 0:
        raise ValueError(f"deadline_s must be positive, got {deadline_s!r}")
    return float(deadline_s)


def skipped_for(grad_norm: float, rule: NonFinite) -> str | None:
    """Return why the update is to be skipped; None where it is to be made.

    All ranks decide the same, because the norm is that of all ranks.

    Raises:
        RuntimeError: the norm is not finite, and the rule is to refuse that.
    """
    if math.isfinite(grad_norm) or rule == "update":
        return None
    found = f"the norm of the gradients is {grad_norm}"
    if rule == "skip":
        return f"{found}, and non_finite='skip'"
    raise RuntimeError(
        f"{found}, and the update would spread that to all parameters; no rank has begun it. "
        "non_finite='skip' drops such steps"
    )
