"""Makes the inputs of the `token_logprobs` benchmark, and the exact outputs and gradients.

This runs on a rank. Shapes: N tokens, V columns of the vocabulary on this rank, H features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

Entropy = Literal["none", "metric", "grad"]
#: Standard deviation of the logits, at which the entropy is a few nats and no exponential is a
#: subnormal number.
_SPREAD = 3.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One case of the benchmark: the sizes, the dtype and the outputs for which all implementations
    are compared, on the same inputs.

    Example:
        Case(form="logits", ranks=2, dtype="float32", entropy="grad", tokens=2048, vocabulary=32768)
    """

    form: Literal["logits", "hidden"]
    ranks: int
    """Number of ranks over which the vocabulary is split."""
    dtype: str
    entropy: Entropy
    tokens: int
    vocabulary: int
    """Size of the vocabulary over all ranks."""
    features: int = 1024
    kept: float = 1.0
    """Fraction of the tokens that the token mask selects; implementations without a token mask
    compute all tokens."""

    @property
    def references(self) -> tuple[str, str]:
        """The names of two implementations of this library. The times of all implementations are
        divided by the time of each of these two.
        """
        return ("borrow", "consume") if self.form == "logits" else ("hidden", "logits, consume")

    def __str__(self) -> str:
        outputs = {
            "none": "log-probs",
            "metric": "log-probs, entropy as a metric",
            "grad": "log-probs and entropy with gradient",
        }[self.entropy]
        share = f", {self.kept:.0%} kept" if self.kept < 1 else ""
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        form = "logits" if self.form == "logits" else f"hidden states, H={self.features}"
        return f"from {form}, {ranks}, {self.dtype}, N={self.tokens}{share}: {outputs}"


class Given(NamedTuple):
    """The inputs of one run of an implementation. The implementation may overwrite the logits."""

    inputs: tuple[Any, ...]
    """`(logits [N, V],)`, or `(hidden [N, H], weight [V, H])`."""
    targets: Any
    """Token ids [N], from 0 to the size of the entire vocabulary - 1."""
    kept: Any
    """The token mask, bool [N]; None to select all tokens."""
    group: Any
    """The tensor-parallel process group; None for one rank."""
    entropy: Entropy


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One implementation of log-probs and entropy that the benchmark compares."""

    name: str
    run: Callable[[Given], tuple[Any, Any]]
    """Returns log-probs [N], and entropies [N] or None; only selected tokens are compared."""
    entropies: tuple[Entropy, ...] = ("none", "metric", "grad")


class Inputs:
    """The inputs of a case: entire inputs, the same on all ranks, and this rank's part of them."""

    def __init__(self, case: Case, group: Any, tokens: int) -> None:
        import torch

        torch.manual_seed(1)
        self.case, self.group = case, group
        dtype = getattr(torch, case.dtype)
        self.targets_N = torch.randint(0, case.vocabulary, (tokens,))
        self.kept_N = None if case.kept == 1 else torch.rand(tokens) < case.kept
        self.of_logprob_N, self.of_entropy_N = torch.randn(2, tokens)
        if self.kept_N is not None:
            self.of_logprob_N *= self.kept_N
            self.of_entropy_N *= self.kept_N
        if case.form == "logits":
            self.whole = {"logits": (torch.randn(tokens, case.vocabulary) * _SPREAD).to(dtype)}
        else:
            scale = _SPREAD / case.features**0.5
            weight_VH = torch.randn(case.vocabulary, case.features) * scale
            hidden_NH = torch.randn(tokens, case.features)
            self.whole = {"hidden": hidden_NH.to(dtype), "weight": weight_VH.to(dtype)}
        self.part = [self._part_of(name, whole) for name, whole in self.whole.items()]

    def _part_of(self, name: str, whole: Any) -> Any:
        """Return this rank's part of an input: its columns of logits, its rows of the weight, or
        all hidden states.

        Hidden states are the same on all ranks.
        """
        import torch

        if self.case.ranks == 1 or name == "hidden":
            return whole
        rank = torch.distributed.get_rank()
        return whole.chunk(self.case.ranks, -1 if name == "logits" else 0)[rank].contiguous()

    def fresh(self) -> Given:
        """Return this rank's inputs for one run of an implementation, as tensors for which autograd
        computes gradients.

        Logits are the output of an autograd function, hidden states and weight are leaves.
        """
        if self.case.form == "logits":
            inputs: tuple[Any, ...] = (as_output(self.part[0]),)
        else:
            inputs = tuple(each.detach().requires_grad_() for each in self.part)
        return Given(inputs, self.targets_N, self.kept_N, self.group, self.case.entropy)

    def total(self, logprob_N: Any, entropy_N: Any) -> Any:
        """Return the scalar whose gradient is computed: the sum of the outputs times random
        weights.
        """
        total = (logprob_N * self.of_logprob_N).sum()
        if self.case.entropy == "grad":
            total = total + (entropy_N * self.of_entropy_N).sum()
        return total

    def truth(self) -> tuple[Any, Any, list[Any]]:
        """Compute log-probs and entropies in float64 from the entire inputs; return them, and the
        gradients of this rank's part of the inputs.
        """
        import torch

        whole = {name: each.double().requires_grad_() for name, each in self.whole.items()}
        logits_NV = whole["logits"] if "logits" in whole else whole["hidden"] @ whole["weight"].t()
        logp_NV = logits_NV.log_softmax(-1)
        entropy_N = -(logp_NV.exp() * logp_NV).sum(-1)
        logprob_N = logp_NV.gather(-1, self.targets_N[:, None]).squeeze(-1)
        found = torch.autograd.grad(self.total(logprob_N, entropy_N), list(whole.values()))
        gradients = [self._part_of(name, each) for name, each in zip(whole, found, strict=True)]
        return logprob_N.detach(), entropy_N.detach(), gradients


def as_output(values: Any) -> Any:
    """Return a copy of a tensor that autograd treats as the output of a layer: it is not a leaf,
    and keeps no gradient.
    """
    import torch

    class Output(torch.autograd.Function):
        """Returns a copy of `values` that is neither a leaf nor a view, and does not keep its
        gradient.
        """

        @staticmethod
        def forward(_ctx: Any, _weight: Any) -> Any:
            return values.clone()

        @staticmethod
        def backward(_ctx: Any, _gradient: Any) -> Any:
            return torch.zeros((), device=values.device)

    apply: Any = Output.apply
    return apply(torch.zeros((), device=values.device, requires_grad=True))
