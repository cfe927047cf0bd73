"""The data between samples and loss: batches, how they are packed, and how they are cut.

Shapes: B sequences, T positions; position t of the targets is predicted from tokens 0..t.

Shapes and units are in the docstrings; every method marked collective runs on all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Sequences of one rank, padded on the right to one length.

    `tokens_BT` and `targets_BT` are int64, the rest float32. The log-probs and `loss_mask_BT` are
    aligned with the targets; the reference's are None where no KL penalty asks for them, and
    `weights_BT` where `old_logprobs_BT` are those that the engine gave. `lengths_B`, int64, has the
    tokens of each sequence, prompt and response, which packs need; at most T + 1.
    Example: `batch.rows(torch.arange(8))` has the first eight.
    """

    tokens_BT: torch.Tensor
    targets_BT: torch.Tensor
    old_logprobs_BT: torch.Tensor
    advantages_B: torch.Tensor
    loss_mask_BT: torch.Tensor
    reference_logprobs_BT: torch.Tensor | None = None
    weights_BT: torch.Tensor | None = None
    lengths_B: torch.Tensor | None = None

    def __len__(self) -> int:
        return int(self.tokens_BT.shape[0])

    def rows(self, index: torch.Tensor) -> Batch:
        """The sequences at `index`, an int64 vector, in its order."""
        return self._with({name: each[index] for name, each in self._held().items()})

    def padded(self, rows: int) -> Batch:
        """The batch with rows of zeros after its own, of which no token counts; `rows` in all."""
        more = rows - len(self)
        if not more:
            return self
        wider = {
            name: torch.cat([each, each.new_zeros(more, *each.shape[1:])])
            for name, each in self._held().items()
        }
        return self._with(wider)

    def on_device(self) -> Batch:
        """A copy on this rank's device; batches are made, cut and sent on the host."""
        return self._with({name: each.cuda() for name, each in self._held().items()})

    def _held(self) -> dict[str, torch.Tensor]:
        """The tensors that are there, by their names."""
        held = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: each for name, each in held.items() if each is not None}

    def _with(self, tensors: dict[str, torch.Tensor]) -> Batch:
        return dataclasses.replace(self, **tensors)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The batch as `TrainStep.microbatch` takes it.

        `token_mask` [B, T + 1] is aligned with the tokens of the sequence, as everywhere: its first
        one, which nothing predicts, and the T targets.
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
        return tensors

    def sequences(self) -> dict[str, torch.Tensor]:
        """The batch as a step with a budget of tokens takes it, which packs whole sequences.

        `input_ids` and all that belongs to tokens are [B, T + 1]: what is aligned with the targets
        has nothing in the last place, and `response_mask` is the loss mask among them.

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
        wider = {name: torch.nn.functional.pad(each, (0, 1)) for name, each in aligned.items()}
        return {
            **wider,
            "input_ids": torch.cat([tokens_BT, self.targets_BT[:, -1:]], dim=1),
            "token_mask": token_mask_BT,
            "advantages": advantages_B,
            "lengths": self.lengths_B,
        }


class Response(Protocol):
    """The fields of a sample that a row needs."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Ids, the end token included."""

    @property
    def logprobs(self) -> tuple[float, ...]:
        """One for each token."""


Row = tuple[tuple[int, ...], Response, float]
"""The prompt's tokens, a response to it, and its advantage."""


def pack_rows(rows: Sequence[Row], *, positions: int, pad_id: int) -> Batch:
    """One sequence per row: prompt, response, padding; inputs and targets shifted by one.

    `positions` is T. Errors: `ValueError` where a sequence does not fit into it.
    """
    tokens, old_logprobs, loss_mask, lengths = [], [], [], []
    for prompt_tokens, sample, _ in rows:
        length = len(prompt_tokens) + len(sample.tokens)
        if length > positions + 1:
            raise ValueError(
                f"a sequence of {length} tokens, room for {positions + 1}; raise positions"
            )
        # The target at position t is token t + 1, so a response starts one position early.
        before, behind = [0.0] * (len(prompt_tokens) - 1), [0.0] * (positions + 1 - length)
        tokens.append([*prompt_tokens, *sample.tokens, *([pad_id] * len(behind))])
        old_logprobs.append([*before, *sample.logprobs, *behind])
        loss_mask.append([*before, *([1.0] * len(sample.tokens)), *behind])
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
    )


def chunks(batch: Batch, *, size: int, seed: int, index: int) -> Iterator[Batch]:
    """The batch in a seeded random order, `size` sequences at a time.

    `index` is the rollout's. Every sequence comes exactly once; `size` must divide their number.
    """
    assert len(batch) % size == 0, f"{len(batch)} sequences in chunks of {size}"
    # A generator of its own: drawing from the default one would move Megatron's RNG.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    order = torch.randperm(len(batch), generator=generator)
    for start in range(0, len(batch), size):
        yield batch.rows(order[start : start + size])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """The result of one rollout's training, over all ranks.

    `loss`, `kl` and `clip_fraction` are means over response tokens on all ranks; `grad_norm` is
    the mean over optimizer steps of the norm before clipping, and `learning_rate` that of the last
    one. `positions` are those that were computed, padding and prompts included, for
    `response_tokens` that count. Example: `metrics.loss`.
    """

    loss: float
    kl: float
    clip_fraction: float
    grad_norm: float
    learning_rate: float
    response_tokens: int
    positions: int
    optimizer_steps: int
