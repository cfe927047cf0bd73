"""Adapters that offload wrongly, or in another way than certify's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_idempotent.proof.certify import Finished
from megatron_idempotent.proof.certify.adapters import Megatron, SplitStep
from megatron_idempotent.proof.certify.states import buffers


class InParts(Megatron):
    """Adds up several calls of Megatron's schedule, and finalizes after the last; needs nooverlap.

    It stands on none of this library's patches, so that it runs without them.
    """

    def build(self, subject: Any) -> None:
        super().build(subject)
        self._finalize = subject.config.finalize_model_grads_func
        subject.config.finalize_model_grads_func = self._count

    def _count(self, _: Any, tokens: Tensor, **__: Any) -> None:
        self.tokens = self.tokens + tokens

    def begin(self) -> None:
        self._zero()
        self.tokens: Any = 0

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        self.fail = fail
        self._train(self._pieces(rows))

    def finish(self) -> Finished:
        self._finalize(self.subject.chunks, self.tokens)
        return self._update()


class ZeroesBeforeLogprobs(Megatron):
    """Zeroes gradients that have no memory."""

    def logprobs(self, rows: Any) -> Any:
        for chunk in self.subject.chunks:
            chunk.zero_grad_buffer()
        return SplitStep.logprobs(self, rows)  # type: ignore[arg-type]


class OffloadsNothing(SplitStep):
    """Leaves all on the device."""

    def offload(self) -> None:
        pass

    def onload(self, *, training: bool = True) -> None:
        pass


class LeavesMomentsOnTheHost(SplitStep):
    """Brings the model back alone."""

    def onload(self, *, training: bool = True) -> None:
        super().onload(training=False)
        for chunk in self.subject.chunks:
            chunk.restore_grad_buffers()


class LeavesGradientsFreed(SplitStep):
    """Takes no memory for gradients."""

    def onload(self, *, training: bool = True) -> None:
        super().onload(training=False)
        if training:
            self.subject.optimizer.restore_from_cpu()


class KeepsOneCopy(SplitStep):
    """Computes log-probs with what its first offload has copied."""

    copies: Any = None

    def offload(self) -> None:
        if self.copies is None:
            self.copies = self._all(lambda each: each.clone())
        super().offload()

    def logprobs(self, rows: Any) -> Any:
        now = self._all(lambda each: each.clone())
        old = iter(self.copies)
        self._all(lambda each: each.copy_(next(old)))
        try:
            return super().logprobs(rows)
        finally:
            back = iter(now)
            self._all(lambda each: each.copy_(next(back)))

    @torch.no_grad()
    def _all(self, do: Any) -> list[Tensor]:
        return [do(each) for chunk in self.subject.chunks for each in chunk.module.parameters()]


class KeepsGradients(SplitStep):
    """Copies gradients to the host before it frees them, and back."""

    def offload(self) -> None:
        self.kept = [
            (buffer, buffer.grad_data.cpu())
            for chunk in self.subject.chunks
            for buffer in buffers(chunk)
        ]
        super().offload()

    def onload(self, *, training: bool = True) -> None:
        super().onload(training=training)
        for buffer, values in self.kept if training else ():
            buffer.reset()  # or the step would miss what was dropped
            buffer.grad_data.copy_(values.cuda())

    def abort(self) -> None:
        raise AssertionError("an offload that keeps gradients was refused")


class OneRankRefuses(SplitStep):
    """Raises at an offload in an open step, on the first rank alone."""

    is_open = False

    def begin(self) -> None:
        super().begin()
        self.is_open = True

    def offload(self) -> None:
        if self.is_open and torch.distributed.get_rank() == 0:
            raise RuntimeError("a step is open")
        super().offload()

    def finish(self) -> Finished:
        self.is_open = False
        return super().finish()

    def abort(self) -> None:
        self.is_open = False
        super().abort()


class OneRankRefusesTooLate(SplitStep):
    """Raises on the first rank once all have updated."""

    def finish(self) -> Finished:
        found = super().finish()
        if torch.distributed.get_rank() == 0:
            raise RuntimeError("gradients were offloaded")
        return found

    def offload(self) -> None:
        pass

    def onload(self, *, training: bool = True) -> None:
        pass

    def abort(self) -> None:
        pass
