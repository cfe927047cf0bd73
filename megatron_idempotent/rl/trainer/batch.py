"""Defines training batches: makes them from samples, and splits them into chunks.

Shapes: B sequences, T positions. The target at position t is token t + 1, predicted from tokens 0
to t.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch

from megatron_idempotent.rl.engines import Sample


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A training batch: token sequences, padded on the right to one length, with log-probs,
    advantages and masks.

    `tokens_BT`, `targets_BT` and `lengths_B` are int64, the others float32. Every tensor with
    positions, except `tokens_BT`, is aligned with the targets.

    Example: `batch.rows(torch.arange(8))` has the first eight sequences.
    """

    tokens_BT: torch.Tensor
    """The input tokens of the model."""
    targets_BT: torch.Tensor
    """The tokens to predict: `tokens_BT` shifted by one position."""
    old_logprobs_BT: torch.Tensor
    """Log-probs of the targets, for the ratio in the loss; 0 outside of responses."""
    advantages_B: torch.Tensor
    """The advantage of each sequence's response."""
    loss_mask_BT: torch.Tensor
    """1 on response tokens, 0 elsewhere."""
    reference_logprobs_BT: torch.Tensor | None = None
    """Log-probs under the reference of the KL penalty; None without a penalty."""
    weights_BT: torch.Tensor | None = None
    """Importance weights of the tokens; None if `old_logprobs_BT` are the engine's."""
    lengths_B: torch.Tensor | None = None
    """The number of tokens of each sequence, prompt and response, up to T + 1; packing needs it."""
    routed_experts: torch.Tensor | None = None
    """The experts [B, T + 1, layers, topk] that the engine selected for each token, on the host;
    None without router replay. Tokens without recorded experts have 0 everywhere."""

    def __len__(self) -> int:
        return int(self.tokens_BT.shape[0])

    def rows(self, index: torch.Tensor | slice) -> Batch:
        """Return a batch of the sequences at `index`: a slice, or an int64 vector in any order."""
        return self._map(lambda tensor: tensor[index])

    def padded(self, rows: int) -> Batch:
        """Return the batch with rows of zeros appended, up to `rows` rows; the appended rows do not
        affect the loss.
        """
        more = rows - len(self)
        if not more:
            return self
        return self._map(
            lambda tensor: torch.cat([tensor, tensor.new_zeros(more, *tensor.shape[1:])])
        )

    def on_device(self) -> Batch:
        """Return a copy with all tensors on this rank's device, except the routed experts; batches
        are made and split on the host.
        """
        # Routed experts stay on the host, which checks them and uses a few rows at a time.
        moved = dataclasses.replace(self, routed_experts=None)._map(lambda tensor: tensor.cuda())
        return dataclasses.replace(moved, routed_experts=self.routed_experts)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        tensors = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        changed = {name: change(tensor) for name, tensor in tensors.items() if tensor is not None}
        return dataclasses.replace(self, **changed)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a batch of padded rows, by the names that `TrainStep.microbatch`
        and the loss read.

        `token_mask` is [B, T + 1]: an entry for the first token, which is never predicted, followed
        by the T targets.
        """
        tensors = {
            **self._by_target(),
            "input_ids": self.tokens_BT,
            "advantages": self.advantages_B,
            "token_mask": torch.nn.functional.pad(self.loss_mask_BT, (1, 0)),
        }
        if self.routed_experts is not None:
            tensors["routed_experts"] = self.routed_experts[:, :-1]
        return tensors

    def _by_target(self) -> dict[str, torch.Tensor]:
        """Return the tensors [B, T] with a value for each target, such as old log-probs, by the
        names that the loss reads.
        """
        tensors = {
            "targets": self.targets_BT,
            "old_logprobs": self.old_logprobs_BT,
            "reference_logprobs": self.reference_logprobs_BT,
            "weights": self.weights_BT,
        }
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def sequences(self) -> dict[str, torch.Tensor]:
        """Return the batch's tensors, by name, for a `TrainStep` that packs entire sequences.

        `input_ids` and `token_mask` are [B, T + 1], with an entry per token. Tensors that are
        aligned with the targets are padded to [B, T + 1] with a last 0; `response_mask`, the loss
        mask, is one of them.

        Raises:
            ValueError: `lengths_B` is None.
        """
        if self.lengths_B is None:
            raise ValueError(
                f"a batch of {len(self)} sequences without lengths_B cannot be packed; give the "
                "tokens of each, or set optimizer.max_tokens_per_microbatch to 0"
            )
        pad = torch.nn.functional.pad
        by_target = self._by_target() | {"response_mask": self.loss_mask_BT}
        sequences = {
            **{name: pad(tensor, (0, 1)) for name, tensor in by_target.items()},
            "input_ids": torch.cat([self.tokens_BT, self.targets_BT[:, -1:]], dim=1),
            "token_mask": pad(self.loss_mask_BT, (1, 0)),
            "advantages": self.advantages_B,
            "lengths": self.lengths_B,
        }
        if self.routed_experts is not None:
            sequences["routed_experts"] = self.routed_experts
        return sequences


Row = tuple[tuple[int, ...], Sample, float]
"""A training sequence: the prompt's tokens, a response, and its advantage."""


def pack_rows(rows: Sequence[Row], *, positions: int, pad_id: int, replays: bool = False) -> Batch:
    """Make a padded batch with one sequence per row: prompt, response and padding with `pad_id`.

    `positions` is T. With `replays`, the batch has the experts that the engine selected.

    Raises:
        ValueError: a sequence has more than T + 1 tokens, or lacks its experts.
    """
    tokens, old_logprobs, loss_mask, lengths = [], [], [], []
    for prompt_tokens, sample, _ in rows:
        length = len(prompt_tokens) + len(sample.tokens)
        if length > positions + 1:
            raise ValueError(
                f"a sequence has {length} tokens, and positions is {positions}, with room for "
                f"{positions + 1}; raise positions"
            )
        # The target at position t is token t + 1, so a response starts one position early.
        before, after = [0.0] * (len(prompt_tokens) - 1), [0.0] * (positions + 1 - length)
        tokens.append([*prompt_tokens, *sample.tokens, *([pad_id] * len(after))])
        old_logprobs.append([*before, *sample.logprobs, *after])
        loss_mask.append([*before, *([1.0] * len(sample.tokens)), *after])
        lengths.append(length)
    # Few tensor operations: each waits for the GIL while other threads compute.
    tokens_BT = torch.tensor(tokens, dtype=torch.int64).view(len(rows), positions + 1)
    old_logprobs_BT, loss_mask_BT = (
        torch.tensor(values, dtype=torch.float32).view(len(rows), positions)
        for values in (old_logprobs, loss_mask)
    )
    return Batch(
        tokens_BT=tokens_BT[:, :-1].contiguous(),
        targets_BT=tokens_BT[:, 1:].contiguous(),
        old_logprobs_BT=old_logprobs_BT,
        advantages_B=torch.tensor([advantage for _, _, advantage in rows]),
        loss_mask_BT=loss_mask_BT,
        lengths_B=torch.tensor(lengths, dtype=torch.int64),
        routed_experts=_routes(rows, lengths, positions + 1) if replays and rows else None,
    )


def _routes(rows: Sequence[Row], lengths: Sequence[int], width: int) -> torch.Tensor:
    """Return the experts that the engine selected for each token, [B, width, layers, topk]. They
    are 0 for the last token, for padding, and for samples without a response.
    """
    routes_of_rows = [sample.routed_experts for _, sample, _ in rows]
    like = next((routes for routes in routes_of_rows if routes is not None), None)
    if like is None:
        raise ValueError(
            f"none of {len(rows)} samples has routed_experts, and router_replay needs them; have "
            "the engine return them"
        )
    shape = (len(rows), width, like.layers, like.topk)
    experts = torch.zeros(shape, dtype=getattr(torch, like.dtype))
    for row, ((_, sample, _), length) in enumerate(zip(rows, lengths, strict=True)):
        if not sample.tokens:
            continue  # it has no tokens to train on
        routes = sample.routed_experts
        needed = (length - 1, like.layers, like.topk, like.dtype)
        actual = routes and (routes.tokens, routes.layers, routes.topk, routes.dtype)
        if routes is None or actual != needed:
            raise ValueError(
                f"row {row}, sample {sample.request_id!r}, has routed experts {actual} (tokens, "
                f"layers, experts of a token, type), and its tokens but the last need {needed}; "
                "have all engines return those of prompt and response"
            )
        experts[row, : length - 1] = torch.from_numpy(routes.numbers().copy())
    return experts


def chunks(batch: Batch, *, size: int, seed: int, index: int) -> Iterator[Batch]:
    """Yield batches of `size` sequences, which together have each sequence of `batch` once, in a
    random order.

    The order depends on `seed` and `index`, the rollout's index. `size` must divide the number of
    sequences.
    """
    assert len(batch) % size == 0, f"{len(batch)} sequences in chunks of {size}"
    # A separate generator: the default one is Megatron's.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    order = torch.randperm(len(batch), generator=generator)
    for start in range(0, len(batch), size):
        yield batch.rows(order[start : start + size])
