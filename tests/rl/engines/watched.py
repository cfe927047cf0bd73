"""A model whose forwards are counted, held up, or made to fail."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from megatron_idempotent.rl.engines.transformers_batch import RowCache, cache_argument


class Watched:
    """Loads a checkpoint and looks at every forward.

    Example: `watched = Watched(directory); engine = TransformersEngine(watched.model)`.
    """

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory)
        self.prefills: list[tuple[int, int]] = []
        """Sequences and positions of each forward for rows that join."""
        self.draws: list[int] = []
        """Rows of each forward that draws."""
        self.failing: Exception | None = None
        """Raised by the next forward, once."""
        self.failing_prefill: Exception | None = None
        """Raised by the next forward for rows that join, once."""
        self._go = threading.Event()
        self._go.set()
        self._held = threading.Event()
        self.model.base_model.register_forward_pre_hook(self._look, with_kwargs=True)

    def hold(self) -> None:
        """Forward stop at their begin, from now on until `release()`."""
        self._held.clear()
        self._go.clear()

    def release(self) -> None:
        """Forward go on."""
        self._go.set()

    async def held(self) -> None:
        """Wait until a forward is stopped."""
        assert await asyncio.to_thread(self._held.wait, 30)

    def _look(self, module, arguments, keywords):
        shape = tuple(keywords["input_ids"].shape)
        if isinstance(keywords[cache_argument(module)], RowCache):
            self.draws.append(shape[0])
        else:
            self.prefills.append(shape)
            if self.failing_prefill is not None:
                self.failing, self.failing_prefill = self.failing_prefill, None
        self._held.set()
        assert self._go.wait(30)
        if self.failing is not None:
            error, self.failing = self.failing, None
            raise error
