"""A model, its optimizer and its schedule, as a test drives them. Legend: B batch, T tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_idempotent.cpu import megatron_fsdp

if TYPE_CHECKING:
    import torch

VOCABULARY, SEQUENCE, BATCH = 128, 32, 2


@dataclass(kw_only=True)
class Tiny:
    """Model chunks in Megatron's DDP, their optimizer and their pipeline schedule."""

    config: Any
    chunks: list[Any]
    #: None where built with `with_optimizer=False`.
    optimizer: Any
    #: Tokens of a row, rows of a microbatch, and ids of tokens.
    sequence: int = SEQUENCE
    batch: int = BATCH
    vocabulary: int = VOCABULARY
    #: Called as (microbatch index on this rank, loss tensor or None before the forward).
    on_microbatch: Callable[[int, Any], Any] | None = None

    def forward_backward(
        self,
        num_microbatches: int,
        *,
        data_seed: int,
        forward_only: bool = False,
        zero_first: bool = True,
    ) -> list[float]:
        """One window through upstream's schedule; the microbatches' losses on the last stage.

        Zeroes the gradients first, unless forward-only or told otherwise. All ranks take part.
        Global microbatch g = i * DP size + DP rank has the same data in every layout, so that two
        ranks with n microbatches and one rank with 2n compute the same gradient.
        """
        import torch
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if zero_first and not forward_only:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            if self.optimizer is not None:
                self.optimizer.zero_grad()
        sizes = (self.batch, self.sequence, self.vocabulary)
        data = [microbatches(data_seed, *sizes) for _ in self.chunks]
        losses: list[float] = []
        with torch.no_grad() if forward_only else contextlib.nullcontext():
            get_forward_backward_func()(
                forward_step_func=self._forward_step(losses),
                data_iterator=data if len(data) > 1 else data[0],
                model=self.chunks,
                num_microbatches=num_microbatches,
                seq_length=self.sequence,
                micro_batch_size=self.batch,
                forward_only=forward_only,
            )
        return losses

    def step(self) -> tuple[bool, Any, Any]:
        """Upstream's (success, gradient norm, number of zeros)."""
        result: tuple[bool, Any, Any] = self.optimizer.step()
        return result

    def gradients(self) -> torch.Tensor:
        """All gradient buffers of this rank as one vector, a copy.

        With the distributed optimizer only this rank's shards are reduced. Under Megatron-FSDP it
        is what the optimizer would step with. On the host, as the parameters.
        """
        import torch

        tensors = [
            tensor
            for chunk in self.chunks
            for tensor in (
                megatron_fsdp.gradients(chunk)
                if megatron_fsdp.is_wrapped(chunk)
                else [b.grad_data for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
            )
        ]
        return torch.cat([tensor.float().flatten() for tensor in tensors]).cpu()

    def parameters(self) -> torch.Tensor:
        """All parameters of this rank as one float32 vector, a copy.

        Under `overlap_param_gather` those of other ranks are as old as the last gather. Under
        Megatron-FSDP it is what this rank's optimizer holds of them.
        """
        import torch

        tensors = [
            tensor
            for chunk in self.chunks
            for tensor in (
                megatron_fsdp.parameters(chunk)
                if megatron_fsdp.is_wrapped(chunk)
                else chunk.module.parameters()
            )
        ]
        return torch.cat([tensor.detach().float().flatten() for tensor in tensors]).cpu()

    def _forward_step(self, losses: list[float]) -> Callable[..., Any]:
        import torch

        # The runtime makes "cuda" the CPU.
        length = self.sequence
        positions_BT = torch.arange(length, device="cuda").expand(self.batch, -1)
        hidden = torch.ones(1, 1, length, length, device="cuda").tril() < 0.5
        count = iter(range(1 << 30))

        def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
            tokens_BT = next(data_iterator)
            index = next(count)
            if self.on_microbatch is not None:
                self.on_microbatch(index, None)
            output = model(tokens_BT, positions_BT, hidden, labels=tokens_BT)

            def loss_func(loss_BT: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                loss = loss_BT.float().mean()
                if self.on_microbatch is not None:
                    replaced = self.on_microbatch(index, loss)
                    loss = loss if replaced is None else replaced
                losses.append(float(loss))
                # A clone: upstream divides the loss in place by the number of microbatches.
                return loss, {"loss": loss.detach().clone()}

            return output, loss_func

        return forward_step


def microbatches(
    data_seed: int, batch: int = BATCH, sequence: int = SEQUENCE, vocabulary: int = VOCABULARY
) -> Iterator[torch.Tensor]:
    """This data-parallel rank's token ids [B, T], without end."""
    import torch
    from megatron.core import parallel_state

    index = parallel_state.get_data_parallel_rank()
    while True:
        generator = torch.Generator().manual_seed(data_seed * 10_007 + index)
        # Drawn on the host, so that the data are the same on every device.
        yield torch.randint(0, vocabulary, (batch, sequence), generator=generator).cuda()
        index += parallel_state.get_data_parallel_world_size()
