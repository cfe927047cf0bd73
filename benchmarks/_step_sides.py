"""Runs the same optimizer step in several ways: as a plain Megatron step, and with `TrainStep`.

This runs on a rank. Shapes: B rows of a microbatch, T positions.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import megatron_idempotent
from megatron_idempotent import TrainStep
from megatron_idempotent.proof.cpu import tiny


class TokenLoss:
    """A loss for `TrainStep`: returns the sum of the cross entropy over valid tokens."""

    kind = "token"

    def __init__(self) -> None:
        self.normalizers: dict[str, Any] = {}

    def __call__(self, output: Any, microbatch: Any) -> tuple[Any, dict[str, Any]]:
        return (output.float() * _mask(microbatch)).sum(), {}


class Sides:
    """A tiny GPT with fixed data, and methods that take an optimizer step in different ways.

    In a step, each replica has `microbatches` microbatches of `rows` rows. `options` are arguments
    of `tiny.build`, which override this class's.
    """

    def __init__(
        self,
        hidden: int,
        microbatches: int,
        rows: int,
        *,
        order_stable: bool = False,
        **options: Any,
    ) -> None:
        megatron_idempotent.apply()
        usual = {
            # A layer has 12 x hidden x hidden weights, so that any model has 4 or 5 buckets.
            "ddp_overrides": {"bucket_size": 8 * hidden * hidden},
            "optimizer_overrides": {"lr": 1e-4, "min_lr": 1e-5},
        }
        config = {"hidden_size": hidden, **options.pop("config_overrides", {})}
        self.model = tiny.build(
            config_overrides={**config, "calculate_per_token_loss": True}, **(usual | options)
        )
        self._length = self.model.sequence
        from megatron.core import parallel_state
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.scheduler = OptimizerParamScheduler(
            self.model.optimizer,
            init_lr=0.0,
            max_lr=1e-4,
            min_lr=1e-5,
            lr_warmup_steps=100,
            lr_decay_steps=100_000,
            lr_decay_style="linear",
            start_wd=0.0,
            end_wd=0.1,
            wd_incr_steps=100_000,
            wd_incr_style="linear",
        )
        self.microbatches, self.rows = microbatches, rows
        self.call_s = 0.0
        """Wall seconds in calls of the schedule by `plain`, and of `microbatch` by `ready`."""
        self._schedule = get_forward_backward_func()
        self._positions_BT = torch.arange(self._length, device="cuda").expand(rows, -1)
        self._hidden = torch.ones(1, 1, self._length, self._length, device="cuda").tril() < 0.5
        self._loss = TokenLoss()
        replica = parallel_state.get_data_parallel_rank()
        self._batch = _data(microbatches * rows, replica, self._length, self.model.vocabulary)
        self.step = TrainStep(
            self.model.chunks,
            self.model.optimizer,
            self.scheduler,
            forward=self._forward,
            order_stable=order_stable,
        )

    def plain(self) -> None:
        """Take a step with Megatron alone, as in a typical training loop."""
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()
        self.model.optimizer.zero_grad()

        def forward_step(data_iterator: Any, chunk: Any) -> tuple[Any, Any]:
            microbatch = next(data_iterator)

            def loss_func(output: Any) -> tuple[Any, Any, Any]:
                total, _ = self._loss(output, microbatch)
                count = _mask(microbatch).sum().to(torch.int)
                return total, count, {"loss": total.detach().clone()}

            return self._forward(chunk, microbatch), loss_func

        data = [self.pieces(self.microbatches) for _ in self.model.chunks]
        with self._called():
            self._schedule(
                forward_step_func=forward_step,
                data_iterator=data if len(data) > 1 else data[0],
                model=self.model.chunks,
                num_microbatches=self.microbatches,
                seq_length=self._length,
                micro_batch_size=self.rows,
                forward_only=False,
            )
        self.model.optimizer.step()
        self.scheduler.step(increment=self.microbatches * self.rows)

    def split(self, chunks: int, *, last: bool) -> Callable[[], None]:
        """Return a function that takes a step in `chunks` calls of `TrainStep.microbatch`. If
        `last` is true, the last call is passed `last=True`.
        """

        def step() -> None:
            step_id = self.step.begin(
                self._loss,
                global_batch_size=self.microbatches * self.rows,
                micro_batch_size=self.rows,
            )
            for index, piece in enumerate(self.pieces(chunks)):
                self.step.microbatch(step_id, piece, last=last and index == chunks - 1)
            self.step.finish(step_id)

        return step

    def ready(self, *, last: bool) -> Callable[[], None]:
        """Return a function that takes a step in one call of `TrainStep.microbatch`, with a list of
        all microbatches.
        """

        def step() -> None:
            step_id = self.step.begin(self._loss, global_batch_size=self.microbatches * self.rows)
            found = list(self.pieces(self.microbatches))
            with self._called():
                self.step.microbatch(step_id, microbatches=found, last=last)
            self.step.finish(step_id)

        return step

    @contextlib.contextmanager
    def _called(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.call_s += time.perf_counter() - start

    def _forward(self, chunk: Any, microbatch: Any) -> Any:
        tokens_BT = microbatch["input_ids"]
        labels_BT = tokens_BT.roll(-1, 1)
        return chunk(tokens_BT, self._positions_BT, self._hidden, labels=labels_BT)

    def pieces(self, number: int) -> Any:
        size = self.microbatches // number * self.rows
        for start in range(0, self.microbatches * self.rows, size):
            yield {name: value[start : start + size] for name, value in self._batch.items()}


def _data(rows: int, replica: int, length: int, vocabulary: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(replica)
    return {
        "input_ids": torch.randint(0, vocabulary, (rows, length), generator=generator).cuda(),
        "token_mask": (torch.rand(rows, length, generator=generator) < 0.5).float().cuda(),
        "sample_mask": torch.ones(rows, device="cuda"),
    }


def _mask(microbatch: Any) -> Any:
    """Return a mask [B, T]: 1 where the next token is valid, else 0, and 0 at the last position."""
    valid_BT = microbatch["token_mask"] * microbatch["sample_mask"][:, None]
    return torch.cat((valid_BT[:, 1:], valid_BT.new_zeros(len(valid_BT), 1)), 1)
