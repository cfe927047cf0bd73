"""Defines the batches between samples and loss: makes them of samples, and cuts them into chunks.

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
    """Holds sequences that are padded on the right to one length.

    `tokens_BT`, `targets_BT` and `lengths_B` are int64, the rest float32. All that has positions,
    except `tokens_BT`, is aligned with the targets.
    Example: `batch.rows(torch.arange(8))` has the first eight sequences.
    """

    tokens_BT: torch.Tensor
    """The tokens that the model reads."""
    targets_BT: torch.Tensor
    """The tokens that it predicts: `tokens_BT` one position later."""
    old_logprobs_BT: torch.Tensor
    """Log-probs of the targets, to which the loss takes the ratio; 0 outside responses."""
    advantages_B: torch.Tensor
    """The advantage of each sequence's response."""
    loss_mask_BT: torch.Tensor
    """1 on response tokens, 0 elsewhere."""
    reference_logprobs_BT: torch.Tensor | None = None
    """Log-probs under the reference of the KL penalty; None without a penalty."""
    weights_BT: torch.Tensor | None = None
    """Importance weights of the tokens; None if `old_logprobs_BT` are the engine's."""
    lengths_B: torch.Tensor | None = None
    """The tokens of each sequence, prompt and response, up to T + 1; packing needs them."""
    routed_experts: torch.Tensor | None = None
    """The experts [B, T + 1, layers, experts of a token] that the engine took for each token, on
    the host; None without router replay. Tokens without any have the same number throughout."""

    def __len__(self) -> int:
        return int(self.tokens_BT.shape[0])

    def rows(self, index: torch.Tensor) -> Batch:
        """Return a batch of the sequences at `index`, an int64 vector, in its order."""
        return self._each(lambda tensor: tensor[index])

    def padded(self, rows: int) -> Batch:
        """Return the batch with rows of zeros after its own, `rows` in all; no zero counts."""
        more = rows - len(self)
        if not more:
            return self
        return self._each(lambda each: torch.cat([each, each.new_zeros(more, *each.shape[1:])]))

    def on_device(self) -> Batch:
        """Return a copy on this rank's device; batches are made, cut and sent on the host."""
        # Routed experts are checked by the host, and only a few rows of them are needed at a time.
        moved = dataclasses.replace(self, routed_experts=None)._each(lambda tensor: tensor.cuda())
        return dataclasses.replace(moved, routed_experts=self.routed_experts)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        held = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        changed = {name: change(each) for name, each in held.items() if each is not None}
        return dataclasses.replace(self, **changed)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the batch as `TrainStep.microbatch` takes it, by name.

        `token_mask` [B, T + 1] has a place for each token of a sequence: the first one, which
        nothing predicts, and the T targets.
        """
        tensors = {
            "input_ids": self.tokens_BT,
            "targets": self.targets_BT,
            "old_logprobs": self.old_logprobs_BT,
            "advantages": self.advantages_B,
            "token_mask": torch.nn.functional.pad(self.loss_mask_BT, (1, 0)),
        }
        if self.reference_logprobs_BT is not None:
            tensors["reference_logprobs"] = self.reference_logprobs_BT
        if self.weights_BT is not None:
            tensors["weights"] = self.weights_BT
        if self.routed_experts is not None:
            tensors["routed_experts"] = self.routed_experts[:, :-1]
        return tensors

    def sequences(self) -> dict[str, torch.Tensor]:
        """Return the batch, by name, as a step takes it that packs whole sequences.

        `input_ids` and `token_mask` [B, T + 1] have a place for each token. All that is aligned
        with the targets is [B, T + 1] too, with 0 in the last place; so is `response_mask`, the
        loss mask.

        Errors: `ValueError` without `lengths_B`.
        """
        if self.lengths_B is None:
            raise ValueError(
                f"a batch of {len(self)} sequences without lengths_B cannot be packed; give the "
                "tokens of each, or set optimizer.max_tokens_per_microbatch to 0"
            )
        aligned = {**self.tensors(), "response_mask": self.loss_mask_BT}
        tokens_BT, advantages_B = aligned.pop("input_ids"), aligned.pop("advantages")
        token_mask_BT = aligned.pop("token_mask")
        whole = {"lengths": self.lengths_B}
        aligned.pop("routed_experts", None)
        if self.routed_experts is not None:
            whole["routed_experts"] = self.routed_experts
        wider = {name: torch.nn.functional.pad(each, (0, 1)) for name, each in aligned.items()}
        return {
            **wider,
            "input_ids": torch.cat([tokens_BT, self.targets_BT[:, -1:]], dim=1),
            "token_mask": token_mask_BT,
            "advantages": advantages_B,
            **whole,
        }


Row = tuple[tuple[int, ...], Sample, float]
"""A sequence to train on: the prompt's tokens, a response, and its advantage."""


def pack_rows(rows: Sequence[Row], *, positions: int, pad_id: int, replays: bool = False) -> Batch:
    """Make a batch with a sequence per row: prompt, response and padding with `pad_id`.

    `positions` is T. With `replays` it has the experts that the engine took.
    Errors: `ValueError` for a sequence of more than T + 1 tokens, or whose experts are missing.
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
    # One tensor at a time: where other threads compute, each operation waits for Python's lock.
    tokens_BT = torch.tensor(tokens, dtype=torch.int64).view(len(rows), positions + 1)
    old_logprobs_BT, loss_mask_BT = (
        torch.tensor(each, dtype=torch.float32).view(len(rows), positions)
        for each in (old_logprobs, loss_mask)
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
    """Return the experts that the engine took, [B, width, layers, experts of a token]."""
    each = [sample.routed_experts for _, sample, _ in rows]
    like = next((routes for routes in each if routes is not None), None)
    if like is None:
        raise ValueError(
            f"none of {len(rows)} samples has routed_experts, and router_replay needs them; have "
            "the engine return them"
        )
    shape = (len(rows), width, like.layers, like.topk)
    found = torch.zeros(shape, dtype=getattr(torch, like.dtype))
    for row, (routes, (_, sample, _), length) in enumerate(zip(each, rows, lengths, strict=True)):
        if not sample.tokens:
            continue  # nothing of it is trained
        needed = (length - 1, like.layers, like.topk, like.dtype)
        there = routes and (routes.tokens, routes.layers, routes.topk, routes.dtype)
        if routes is None or there != needed:
            raise ValueError(
                f"row {row}, sample {sample.request_id!r}, has routed experts {there} (tokens, "
                f"layers, experts of a token, type), and its tokens but the last need {needed}; "
                "have all engines return those of prompt and response"
            )
        found[row, : length - 1] = torch.from_numpy(routes.numbers().copy())
    return found


def chunks(batch: Batch, *, size: int, seed: int, index: int) -> Iterator[Batch]:
    """Yield the batch in a random order, `size` sequences at a time, each sequence once.

    `seed` and `index`, the rollout's, decide the order. `size` must divide the number of sequences.
    """
    assert len(batch) % size == 0, f"{len(batch)} sequences in chunks of {size}"
    # A generator of its own: drawing from the default one would move Megatron's RNG.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    order = torch.randperm(len(batch), generator=generator)
    for start in range(0, len(batch), size):
        yield batch.rows(order[start : start + size])
