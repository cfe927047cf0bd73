"""Computes a step from its definition, in float64: no layout, no schedule, no DDP.

A small GPT is written out with plain torch functions of a dictionary of parameters, under the
names that Megatron gives them; the model has the parts whose parameters are there. Legend: B rows,
T positions, H hidden size, A heads, V vocabulary, E experts, N tokens, M tokens of a microbatch.
Tokens go to the experts that Megatron's router chooses, and experts have its auxiliary loss.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from megatron_idempotent.proof.cpu import tiny

from .layouts import EXPERTS, LAYERS, LossKind
from .protocol import MICRO_BATCH, Rows

Parameters = Mapping[str, Tensor]

MTP_FACTOR = 0.5
"""`mtp_loss_scaling_factor`."""
INNER = "transformer_layer"
"""The name of the MTP layer's transformer layer, as releases before 0.17 have it."""
TOPK = 2
"""Experts of each token."""
COEFFICIENT = 0.25
"""`moe_aux_loss_coeff`: the loss makes up about as much of the gradient as the tokens' own."""
MARGIN = 0.1
"""The least difference between the last logit that takes a token and the first that does not.

The logits are below 3, of which the roundings of a step in float32 are 0.07 at most (2.4 %): a
token goes to the same experts in the model and here. In bfloat16 independent roundings leave all of
these margins, as tests/proof/certify/test_oracle.py finds."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """Holds the right gradient and loss of a step, computed in float64.

    Example: `truth_of(parameters, rows).grad_norm`.
    """

    gradient: dict[str, Tensor]
    """The gradient of the step's loss by parameter; float64.

    The loss is the mean over all positions that count, each times the scale of its row, plus the
    auxiliary losses of all microbatches: each is a mean over tokens, times the number of these in
    its microbatch, divided by the number of positions of the step that count. Experts' is a mean
    over all positions, padding of packs included, and that of MTP one over positions that count.

    A loss of kind "sequence" is the mean over all sequences that count, of which each is the mean
    over its positions that count. A token of an auxiliary loss then weighs a part of a sequence:
    1 / T in rows of T positions, and the number of sequences / S in a pack of S tokens.

    With `balance_mean` experts' loss is divided by the number of all positions of the step."""
    grad_norm: float
    loss: float
    """The mean over all positions, or sequences, that count, without auxiliary losses."""
    loss_size: float
    """The same mean with absolute values of scales: roundings of the loss are relative to it."""
    count: float
    """The number of positions that count, or of sequences with such positions."""
    terms: float
    """The number of tokens' terms in the gradient: the positions that count, once more those of
    MTP, and all positions of each router."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PackSeen:
    """Holds one pack of sequences on which a model was trained. S is the number of its tokens,
    those of padding included.
    """

    tokens_S: Tensor
    positions_S: Tensor
    counts_S: Tensor
    """1 where a position predicts a token that counts."""
    real_S: Tensor | None = None
    """False for padding, which routers leave out; None if the model got no padding mask."""
    starts: tuple[int, ...]
    """The indices where segments begin, and S. A segment is a sequence with its padding, or an end
    that is padding alone."""
    lengths: tuple[int, ...]
    """Tokens of each segment that attend to others; tokens after them attend to nothing."""
    sequences: int


def truth_of(
    parameters: Parameters,
    rows: Iterable[Rows],
    *,
    packs: Iterable[PackSeen] | None = None,
    kind: LossKind = "token",
    balance_mean: bool = False,
    mtp_sum: bool = False,
    share: tuple[int, int] = (0, 1),
    add: Callable[[Tensor], object] = lambda tensor: tensor,
) -> Truth:
    """Compute the right loss and gradient of a step over all its rows, in float64.

    Args:
        parameters: all parameters of the whole model, by Megatron's names.
        rows: the rows of all replicas and calls, in any order; each call's are cut into
            microbatches of MICRO_BATCH rows in their order.
        packs: the packs that all rows are in, if auxiliary losses are of packs.
        kind: the unit of the loss's mean.
        balance_mean: True if experts' loss is a mean over all positions of the step.
        mtp_sum: True if the loss of the MTP layer is the sum over the positions that it predicts,
            in the place of their mean times the positions that count.
        share: this rank's number and that of all ranks, of which each computes a part.
        add: a function that adds a tensor up over these ranks, in place.
    """
    leaves = {name: value.detach().double().requires_grad_() for name, value in parameters.items()}
    rank, ranks = share
    total, count, sizes = torch.zeros((), dtype=torch.float64), 0.0, 0.0
    auxiliary = _Auxiliary(leaves, kind=kind, balance_mean=balance_mean, mtp_sum=mtp_sum)
    pieces = [piece for call_rows in rows for piece in _equal_lengths(call_rows)]
    for tokens_BT, mask_BT, scale_B1 in pieces[rank::ranks]:
        gpt = Gpt(leaves)
        x_BTH = gpt.hidden(tokens_BT)
        number_B = mask_BT.sum(1)
        positions, weight_BT = float(number_B.sum()), mask_BT
        if kind == "sequence":
            weight_BT = mask_BT / number_B.clamp(min=1)[:, None]
        losses_BT = gpt.negative_logprobs(x_BTH, tokens_BT, 1) * weight_BT
        total = total + (losses_BT * scale_B1).sum()
        sizes += float((losses_BT.detach() * scale_B1.abs()).sum())
        count += float((number_B > 0).sum()) if kind == "sequence" else positions
        auxiliary.terms += positions
        if packs is None:
            auxiliary.of_rows(gpt, x_BTH, tokens_BT, mask_BT)
    for pack in list(packs or ())[rank::ranks]:
        auxiliary.of_pack(leaves, pack)
    numbers = [count, auxiliary.routed, auxiliary.terms, float(total.detach()), sizes]
    sums = torch.tensor(numbers, dtype=torch.float64)
    add(sums)
    count, routed, terms, loss, sizes = sums.tolist()
    if count:
        summed = (total + auxiliary.predicted) / count
        summed = summed + auxiliary.balanced / (routed if balance_mean else count)
        if summed.requires_grad:  # else this rank has no rows
            summed.backward()
    gradients = (torch.zeros_like(v) if v.grad is None else v.grad for v in leaves.values())
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    add(flat)
    parts = torch.split(flat, [value.numel() for value in leaves.values()])
    return Truth(
        gradient={
            name: part.view_as(leaves[name]) for name, part in zip(leaves, parts, strict=True)
        },
        grad_norm=float(flat.norm()),
        loss=loss / (count or 1.0),
        loss_size=sizes / (count or 1.0),
        count=count,
        terms=terms,
    )


def _equal_lengths(rows: Rows) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (tokens [B, T], mask of the positions that count, scales [B, 1]): of all rows together
    or, if rows have lengths, of one row at a time without padding.
    """
    tokens_BT, mask_BT = rows["input_ids"], counted(rows).double()
    scale_B1 = rows["scale"].double()[:, None]
    if "lengths" not in rows:
        if len(tokens_BT):
            yield tokens_BT, mask_BT, scale_B1
        return
    for row, length in enumerate(rows["lengths"].tolist()):
        span = slice(row, row + 1)
        yield tokens_BT[span, :length], mask_BT[span, :length], scale_B1[span]


def counted(rows: Rows) -> Tensor:
    """Return a mask [B, T]: 1 where position t's next token counts in the loss, and 0 at the last
    position.
    """
    mask_BT = rows["token_mask"] * rows["sample_mask"][:, None]
    return functional.pad(mask_BT[:, 1:], (0, 1))


def negative_logprobs(parameters: Parameters, tokens_BT: Tensor) -> Tensor:
    """Return -log p [B, T] of the token after each position; at the last position, of the row's
    first token.
    """
    gpt = Gpt(parameters)
    return gpt.negative_logprobs(gpt.hidden(tokens_BT), tokens_BT, 1)


class Gpt:
    """Computes a GPT of LAYERS layers in plain torch, with layer norms, GELU, and learned positions
    or none.

    Example: `Gpt(parameters).hidden(tokens_BT)`.
    """

    def __init__(self, parameters: Parameters) -> None:
        """Take the parameters by Megatron's names. Forwards append each router's logits [B, T, E]
        to `routed`.
        """
        self._parameters = parameters
        self._attending: int | None = None
        self.routed: list[Tensor] = []

    def hidden(
        self, tokens_BT: Tensor, *, positions_T: Tensor | None = None, attending: int | None = None
    ) -> Tensor:
        """Run the model on tokens; return the hidden states [B, T, H] after the last norm.

        Positions are counted from 0 unless given. Those from `attending` on attend to nothing.
        """
        self._attending = attending
        x_BTH = self.embedded(tokens_BT, positions_T)
        for index in range(LAYERS):
            x_BTH = self.layer(x_BTH, f"decoder.layers.{index}")
        return self.norm(x_BTH, "decoder.final_layernorm")

    def negative_logprobs(self, x_BTH: Tensor, tokens_BT: Tensor, offset: int) -> Tensor:
        """Return -log p [B, T] of the token `offset` positions after each position, from hidden
        states; beyond the end of a row, of tokens from its beginning.
        """
        output = "output_layer.weight"
        if output not in self._parameters:  # tied
            output = "embedding.word_embeddings.weight"
        logits_BTV = functional.linear(x_BTH, self._parameters[output])
        targets_BT1 = tokens_BT.roll(-offset, 1)[..., None]
        return -logits_BTV.log_softmax(-1).gather(-1, targets_BT1)[..., 0]

    def embedded(self, tokens_BT: Tensor, positions_T: Tensor | None = None) -> Tensor:
        """Return the embeddings [B, T, H] of tokens, plus those of their positions if the model has
        any.
        """
        x_BTH = self._parameters["embedding.word_embeddings.weight"][tokens_BT]
        learned = self._parameters.get("embedding.position_embeddings.weight")
        if learned is None:
            return x_BTH
        return x_BTH + (learned[: x_BTH.shape[1]] if positions_T is None else learned[positions_T])

    def layer(self, x_BTH: Tensor, prefix: str) -> Tensor:
        """Apply the transformer layer whose parameters' names begin with `prefix` to the hidden
        states x; return the new hidden states.
        """
        batch, length, _ = x_BTH.shape
        later = torch.ones(length, length, dtype=torch.bool, device=x_BTH.device).triu(1)
        normed = self.norm(x_BTH, f"{prefix}.input_layernorm")
        mixed = self.linear(normed, f"{prefix}.self_attention.linear_qkv")
        # Each head has its query, key and value one after the other.
        q, k, v = mixed.view(batch, length, tiny.HEADS, 3, -1).permute(3, 0, 2, 1, 4)
        scores_BATT = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        attended = scores_BATT.masked_fill(later, -math.inf).softmax(-1) @ v
        if self._attending is not None:
            attended = attended * (torch.arange(length) < self._attending)[:, None]
        x_BTH = x_BTH + self.linear(
            attended.transpose(1, 2).reshape(batch, length, -1),
            f"{prefix}.self_attention.linear_proj",
        )
        normed = self.norm(x_BTH, f"{prefix}.pre_mlp_layernorm")
        if f"{prefix}.mlp.router.weight" in self._parameters:
            return x_BTH + mixture(self._parameters, f"{prefix}.mlp", normed, self.routed)
        inner = functional.gelu(self.linear(normed, f"{prefix}.mlp.linear_fc1"))
        return x_BTH + self.linear(inner, f"{prefix}.mlp.linear_fc2")

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Apply the linear layer `name` to x: times its weight, plus its bias if there is one."""
        bias = self._parameters.get(f"{name}.bias")
        return functional.linear(x, self._parameters[f"{name}.weight"], bias)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Apply the layer norm `name` to x."""
        weight, bias = self._parameters[f"{name}.weight"], self._parameters[f"{name}.bias"]
        return functional.layer_norm(x, weight.shape, weight, bias)


class _Auxiliary:
    """Adds up the auxiliary losses of routers and MTP layers over a step's microbatches."""

    def __init__(
        self, parameters: Parameters, *, kind: LossKind, balance_mean: bool, mtp_sum: bool
    ) -> None:
        self._kind, self._balance_mean, self._mtp_sum = kind, balance_mean, mtp_sum
        self._mtp = "mtp.layers.0.eh_proj.weight" in parameters
        self.predicted = torch.zeros((), dtype=torch.float64)
        """Adds up the loss of MTP layers, to be divided as the step's loss is."""
        self.balanced = torch.zeros((), dtype=torch.float64)
        """Adds up the loss of experts, each microbatch's times its positions."""
        self.routed = 0.0
        """The positions that each router has seen."""
        self.terms = 0.0

    def of_rows(self, gpt: Gpt, x_BTH: Tensor, tokens_BT: Tensor, mask_BT: Tensor) -> None:
        """Add the auxiliary losses of a forward over rows, in microbatches of MICRO_BATCH rows."""
        unit = 1 / mask_BT.shape[1] if self._kind == "sequence" else 1.0
        if self._mtp:
            losses_and_mask = after_the_next(gpt, x_BTH, tokens_BT, mask_BT)
            pieces = (torch.split(tensor, MICRO_BATCH) for tensor in (*losses_and_mask, mask_BT))
            for losses_BT, after_BT, own_BT in zip(*pieces, strict=True):
                self._predict(losses_BT, after_BT, own_BT, unit)
        for logits_BTE in gpt.routed:
            for piece_BTE in torch.split(logits_BTE, MICRO_BATCH):
                self._balance(piece_BTE, unit)
            self.terms += mask_BT.numel()
        self.routed += mask_BT.numel()

    def of_pack(self, parameters: Parameters, pack: PackSeen) -> None:
        """Add the auxiliary losses of a pack: run the model on its segments one by one; the losses
        are means over the tokens of all segments.
        """
        predictions: list[tuple[Tensor, Tensor, Tensor]] = []
        routed: list[list[Tensor]] = []
        ends = pack.starts[1:]
        for start, end, length in zip(pack.starts, ends, pack.lengths, strict=False):
            if start == end:
                continue
            tokens_1L = pack.tokens_S[None, start:end]
            gpt = Gpt(parameters)
            x_1LH = gpt.hidden(tokens_1L, positions_T=pack.positions_S[start:end], attending=length)
            if self._mtp:
                mask_1L = pack.counts_S[None, start:end]
                predictions.append((*after_the_next(gpt, x_1LH, tokens_1L, mask_1L), mask_1L))
            routed.append(gpt.routed)
        real_S = torch.ones_like(pack.tokens_S, dtype=torch.bool)
        if pack.real_S is not None:
            real_S = pack.real_S
        number = int(real_S.sum())
        unit = pack.sequences / number if self._kind == "sequence" else 1.0
        if predictions:
            losses_1S, after_1S, own_1S = (
                torch.cat(segments, 1) for segments in zip(*predictions, strict=True)
            )
            self._predict(losses_1S, after_1S, own_1S, unit)
        for layer in zip(*routed, strict=True):
            self._balance(torch.cat(layer, 1)[:, real_S], unit)
            self.terms += number
        self.routed += number

    def _predict(
        self, losses_BT: Tensor, predicted_BT: Tensor, mask_BT: Tensor, unit: float
    ) -> None:
        """Add a microbatch's MTP loss, times MTP_FACTOR and `unit`, to `predicted`. With `mtp_sum`
        that loss is the sum of the tokens' losses, otherwise their mean times the number of
        positions that count.
        """
        total, number = losses_BT.sum(), float(mask_BT.sum())
        if not self._mtp_sum:
            total = number * total / predicted_BT.sum().clamp(min=1)
        self.predicted = self.predicted + unit * MTP_FACTOR * total
        self.terms += number

    def _balance(self, logits_BTE: Tensor, unit: float) -> None:
        factor = 1.0 if self._balance_mean else unit
        self.balanced = self.balanced + factor * balance(logits_BTE)


def after_the_next(
    gpt: Gpt, x_BTH: Tensor, tokens_BT: Tensor, mask_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Return two tensors [B, T] of the MTP layer: -log p of the token two positions ahead, 0 where
    it does not count, and a mask that is 1 where it counts.

    Position t sees its hidden state and the next token, and predicts the one after that, where
    t + 1 counts; elsewhere the loss is 0.
    """
    prefix = "mtp.layers.0"
    # The last position has no next token, and gets token 0; no other position attends to it.
    next_BT = functional.pad(tokens_BT[:, 1:], (0, 1))
    both = gpt.norm(gpt.embedded(next_BT), f"{prefix}.enorm"), gpt.norm(x_BTH, f"{prefix}.hnorm")
    x_BTH = gpt.linear(torch.cat(both, -1), f"{prefix}.eh_proj")
    x_BTH = gpt.norm(gpt.layer(x_BTH, f"{prefix}.{INNER}"), f"{prefix}.final_layernorm")
    after_BT = functional.pad(mask_BT[:, 1:], (0, 1))
    return gpt.negative_logprobs(x_BTH, tokens_BT, 2) * after_BT, after_BT


class TrueUpdate:
    """Computes the parameters after each step of an optimizer: SGD with momentum, or Adam.

    Example: `TrueUpdate("sgd", lr=0.5, momentum=0.5).next(parameters, gradient)`.
    """

    def __init__(self, kind: str, *, lr: float, **options: float) -> None:
        """Take `momentum` for "sgd", or `beta1`, `beta2` and `epsilon` for "adam"."""
        self._kind, self._lr, self._options = kind, lr, options
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}
        self._steps = 0
        self.frozen: frozenset[str] = frozenset()
        """The names of parameters that steps leave as they are, with their moments."""

    def next(self, parameters: Parameters, gradient: Parameters) -> dict[str, Tensor]:
        """Take a step with `gradient`, which updates the moments; return the parameters after the
        step, in float64.
        """
        self._steps += 1
        return {
            name: value.detach().double()
            if name in self.frozen
            else value.detach().double() - self._lr * self._direction(name, gradient[name])
            for name, value in parameters.items()
        }

    def without(self, parameters: Parameters) -> dict[str, Tensor]:
        """Return the parameters as a step with a zero gradient would leave them. No step is taken:
        the moments stay the same.
        """
        zeros = {name: torch.zeros_like(value).double() for name, value in parameters.items()}
        twin = copy.copy(self)
        twin._moments = dict(self._moments)
        return twin.next(parameters, zeros)

    def _direction(self, name: str, gradient: Tensor) -> Tensor:
        options = self._options
        first, second = self._moments.get(name, (torch.zeros_like(gradient),) * 2)
        if self._kind == "sgd":
            first = options["momentum"] * first + gradient
            self._moments[name] = first, second
            return first
        beta1, beta2 = options["beta1"], options["beta2"]
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient.square()
        self._moments[name] = first, second
        root = (second / (1 - beta2**self._steps)).sqrt()
        return first / (1 - beta1**self._steps) / (root + options["epsilon"])


def mixture(
    parameters: Mapping[str, Tensor], prefix: str, x_BTH: Tensor, routed: list[Tensor]
) -> Tensor:
    """Return the experts' output for x [B, T, H], and append the router's logits to `routed`.

    A token goes to the experts with its largest logits, and gets the sum of their outputs, each
    times the softmax over these logits alone.

    Raises:
        RuntimeError: roundings could decide between two experts of a token.
    """
    logits_BTE = functional.linear(x_BTH, parameters[f"{prefix}.router.weight"])
    routed.append(logits_BTE)
    top = logits_BTE.detach().topk(TOPK + 1).values
    margin = float((top[..., -2] - top[..., -1]).min())
    if margin < MARGIN:
        raise RuntimeError(
            f"the router of {prefix} is undecided: two logits differ by {margin:.3g}, less than "
            f"{MARGIN:g}; give this check other rows"
        )
    values, experts = logits_BTE.topk(TOPK)
    share = torch.zeros_like(logits_BTE).scatter(-1, experts, values.softmax(-1)).flatten(0, 1)
    choice = torch.zeros_like(logits_BTE).scatter(-1, experts, 1.0).flatten(0, 1)
    x_NH = x_BTH.flatten(0, 1)
    mixed = torch.zeros_like(x_NH)
    for expert in range(EXPERTS):
        row_n = choice[:, expert].nonzero()[:, 0]
        first, second = (
            parameters[f"{prefix}.experts.local_experts.{expert}.linear_fc{n}.weight"]
            for n in (1, 2)
        )
        outputs = functional.linear(functional.gelu(functional.linear(x_NH[row_n], first)), second)
        mixed = mixed.index_add(0, row_n, outputs * share[row_n, expert, None])
    return mixed.view_as(x_BTH)


def balance(logits_BTE: Tensor) -> Tensor:
    """Return a router's load-balancing loss of one microbatch, times the number of positions in the
    microbatch.

    Of a microbatch of M tokens it is COEFFICIENT x E x the sum over experts of f x p: f is the
    share of the M x TOPK choices that took the expert, and p the mean over tokens of the expert's
    softmax over all experts.
    """
    logits_ME = logits_BTE.flatten(0, 1)
    tokens = len(logits_ME)
    choices = logits_ME.detach().topk(TOPK).indices
    f_E = torch.bincount(choices.flatten(), minlength=EXPERTS).to(logits_ME) / (tokens * TOPK)
    p_E = logits_ME.softmax(-1).mean(0)
    return tokens * COEFFICIENT * EXPERTS * (f_E * p_E).sum()


def decided(name: str, shape: Sequence[int]) -> Tensor:
    """Return what to add to the unsharded parameter `name`, so that routers choose experts by wide
    margins; zeros for most parameters.

    Each token of the vocabulary gets an order of the experts, written into the first E hidden
    values of its embedding so large that no layer changes it; routers read these values, and the
    last norm keeps them from the output layer. The first experts are preferred, because the
    auxiliary loss of balanced ones has no gradient.
    """
    added = torch.zeros(shape, dtype=torch.float64)
    expert_E = torch.arange(EXPERTS)
    if name == "embedding.word_embeddings.weight":
        generator = torch.Generator().manual_seed(11)
        scores = torch.rand(shape[0], EXPERTS, generator=generator, dtype=torch.float64)
        order = (scores - 0.15 * expert_E).argsort(descending=True)
        levels = torch.tensor([0.45, 0.3, -0.3, -0.45], dtype=torch.float64).expand(order.shape)
        added[:, :EXPERTS] = torch.zeros_like(levels).scatter(1, order, levels)
    elif name.endswith(".router.weight"):
        added[expert_E, expert_E] = 0.3
    elif name.endswith("final_layernorm.weight"):
        added[expert_E] = -0.9
    elif name.endswith(".eh_proj.weight"):  # the part that reads the next token's embedding
        added[expert_E, expert_E] = 0.5
    return added
