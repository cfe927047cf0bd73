"""Defines the loss of a split step: what it returns, and what its sums are divided by.

Legend: B rows, T positions of a row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, Protocol, get_args

import torch

from .pieces import Piece
from .records import check_size

Normalizer = Literal["tokens", "sequences", "groups", "microbatches", "none"]
"""Denominator of a metric: the valid tokens or sequences, groups or microbatches of all ranks in
the step; or "none", if it is not divided."""

Kind = Literal["token", "sequence", "group", "none"]
"""The unit of a loss's mean: valid tokens, valid sequences or groups of the step; or "none", if the
caller has divided already."""

Returned = Literal["part", "whole"]
"""Scope of a loss's sums under context parallelism: this rank's positions, which are added up over
the ranks, or whole rows, the same on each rank."""

POLICY_GRADIENT_NORMALIZERS: Mapping[str, Normalizer] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "nll",
                "entropy",
                "approx_entropy",
                "kl",
                "approx_kl",
                "policy_kl_error",
                "gen_kl_error",
                "js_divergence_error",
                "token_mult_prob_error",
                "ratio",
                "probs_ratio",
                "probs_ratio_clamped",
                "clip_fraction",
                "clip_ratio",
                "pg_clipfrac",
                "pg_clipfrac_lower",
                "ppo_kl",
                "sampling_importance_ratio",
                "is_oob_ratio",
                "value_clip_fraction",
                "vf_clipfrac",
                "values_mean",
                "returns_mean",
                "returns_sq_mean",
                "residual_sq_mean",
            ),
            "tokens",
        ),
        **dict.fromkeys(
            ("reward", "advantage", "return", "response_length", "sequence_ratio", "truncated"),
            "sequences",
        ),
        **dict.fromkeys(
            (
                "num_valid_samples",
                "num_valid_tokens",
                "num_unmasked_tokens",
                "samples",
                "tokens",
                "positive_nll_loss",  # a mean over its microbatch, with NeMo-RL
            ),
            "none",
        ),
    }
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
    it they are multiplied by the microbatch's positions (its tokens, if the model is told where the
    padding of a pack is; its sequences, for kind "sequence"). Kinds "group" and "none" need it for
    a model with such losses.

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
    """Returns the loss's `context_parallel`, "part" if it has none."""
    found: Returned = getattr(loss, "context_parallel", "part")
    return found


def check_loss(loss: Any) -> None:
    """Raise `ValueError` unless a step can be begun with the loss."""
    kinds, normalizers = get_args(Kind), get_args(Normalizer)
    if isinstance(loss, type):
        raise ValueError(
            f"begin() got the class {loss.__name__} as loss, of which a call makes an object and "
            f"no loss: pass an object of it, {loss.__name__}(…)"
        )
    if not callable(loss) or getattr(loss, "kind", None) not in kinds:
        raise ValueError(
            f"begin() got {loss!r} as loss, with kind {getattr(loss, 'kind', None)!r}: pass a "
            f"callable object whose `kind` is one of {', '.join(kinds)}"
        )
    if returned_by(loss) not in get_args(Returned):
        raise ValueError(
            f"begin() got a loss with context_parallel {returned_by(loss)!r}: give it one of "
            f"{', '.join(map(repr, get_args(Returned)))}"
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
    outputs = getattr(loss, "outputs", ())
    if isinstance(outputs, str) or not all(isinstance(name, str) for name in outputs):
        raise ValueError(
            f"begin() got a loss whose `outputs` is {outputs!r}: give it a tuple of names"
        )
    weight = getattr(loss, "auxiliary_weight", None)
    number = isinstance(weight, (int, float)) and math.isfinite(weight)
    if weight is not None and not number and not callable(weight):
        raise ValueError(
            f"begin() got a loss whose `auxiliary_weight` is {weight!r}: give it a finite number, "
            "or a function of a microbatch that returns one"
        )


def check_begin(begun_with: Mapping[str, Any], step_id: str | None) -> None:
    """Raise `ValueError` unless a step can begin with these arguments."""
    check_loss(begun_with["loss"])
    check_divisor("begin", begun_with["divisor"])
    sizes = "micro_batch_size", "max_tokens_per_microbatch"
    for name in ("global_batch_size", *sizes, "rank_batch_size"):
        check_size("begin", name, begun_with[name])
    if all(begun_with[name] is not None for name in sizes):
        told = ", ".join(f"{name}={begun_with[name]!r}" for name in sizes)
        raise ValueError(
            f"begin() got {told}: microbatches are cut by rows or by tokens; give one of the two"
        )
    if step_id is not None and not isinstance(step_id, str):
        raise ValueError(f"begin() takes a str as step_id, got {step_id!r}")


def needs_groups(loss: StepLoss) -> bool:
    """Returns whether groups have to be counted for the loss or one of its metrics."""
    return loss.kind == "group" or "groups" in loss.normalizers.values()


def needs_weight(loss: StepLoss) -> bool:
    """Returns whether the loss needs an `auxiliary_weight` for auxiliary losses, and has none."""
    given = getattr(loss, "auxiliary_weight", None) is not None
    return loss.kind in ("group", "none") and not given


def auxiliary_weight(loss: StepLoss, piece: Piece, number: int) -> float:
    """Returns the number that a microbatch's auxiliary losses are multiplied by.

    They are means over `number` positions, or over its tokens if padding is left out.
    """
    given = getattr(loss, "auxiliary_weight", None)
    if given is not None:
        return float(given(piece.batch) if callable(given) else given)
    return float(number if loss.kind == "token" else piece.sequences)


def check_divisor(what: str, divisor: Any) -> None:
    """Raise `ValueError` unless the divisor is None, a positive number or a function."""
    if divisor is None or callable(divisor):
        return
    number = isinstance(divisor, (int, float)) and not isinstance(divisor, bool)
    if not number or not (0 < divisor < math.inf):
        raise ValueError(
            f"{what}() got divisor={divisor!r}: give a positive number, or a function of "
            "StepCounts that returns one"
        )


def divided_by(divisor: Callable[[StepCounts], float], counts: StepCounts) -> float:
    """Returns what a divisor's function returns for the counts; 0 says that nothing is valid.

    Raises:
        ValueError: it returned no finite number from 0 on.
    """
    found = divisor(counts)
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        found = found.item()
    number = isinstance(found, (int, float)) and not isinstance(found, bool)
    if not number or not (0 <= found < math.inf):
        raise ValueError(
            f"divisor({counts}) returned {found!r}: return a finite number from 0 on, the same on "
            "all ranks"
        )
    return float(found)
