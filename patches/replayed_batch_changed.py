"""A step that is run again gets the microbatches that its first run has changed.

Symptom:
    The rerun state machine runs a step again, because a loss was NaN, spiked, or is validated
    (`--rerun-mode validate_results`), and `forward_step` has taken entries out of the microbatch or
    written into it. The second run computes something else, and the machine blames the hardware;
    or it ends in a `KeyError`. What it saves for the run on another machine is changed, too.

Cause:
    `RerunDataIterator` keeps the very microbatches that it gives out, and gives out the ones that
    it keeps. From 0.19 on it keeps a copy, and gives that out to every further run.

Affects:
    Every release; 0.19 from the third run on, and in what it saves after the second. What the patch
    does: the iterator keeps a shallow copy, and each further run gets a shallow copy of that. The
    first run gets what the data iterator gives, as before. Tensors are not copied: a step that
    writes into a tensor in place is still seen by the next run.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/5635 copies what is kept in 0.19.

Remove when:
    the iterator copies what it gives out again, too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from ._case import Fault, Original, Patch, bench, target


def following(original: Original, self: Any) -> Any:
    """Return the next microbatch, and keep none that the caller can change."""
    is_again, count = self.replaying, len(self.saved_microbatches)
    microbatch = original(self)
    if is_again:
        return copy.copy(microbatch)
    kept = self.saved_microbatches
    if len(kept) > count and kept[-1] is microbatch:
        kept[-1] = copy.copy(microbatch)
    return microbatch


def reproduce() -> None:
    """Run a step three times that takes an entry out of its microbatches."""
    from megatron.core.rerun_state_machine import (
        RerunDataIterator,
        RerunMode,
        get_rerun_state_machine,
    )

    from megatron_idempotent.proof.cpu import tiny

    get_rerun_state_machine().set_mode(RerunMode.VALIDATE_RESULTS)
    model = bench(overlap_grad_reduce=False)
    tokens = tiny.microbatches(0)
    data = RerunDataIterator({"tokens": next(tokens), "shift": 1} for _ in range(2))
    gradients = []
    for _ in range(3):
        model.chunks[0].zero_grad_buffer()
        model.schedule(_tokens(data), 2)
        gradients.append(model.gradients())
        data.rewind()
    first, *others = gradients
    wrong = [run for run, gradient in enumerate(others, 2) if not gradient.equal(first)]
    if wrong:
        raise Fault(f"run {wrong[0]} of one step has other gradients than the first")


def _tokens(data: Any) -> Iterator[Any]:
    """Yield token ids of microbatches, out of which an entry is taken."""
    from megatron_idempotent.proof.cpu import tiny

    while True:
        microbatch = next(data)
        yield (microbatch["tokens"] + microbatch.pop("shift", 0)) % tiny.VOCABULARY


PATCH = Patch(
    "a step that is run again gets the microbatches that its first run has changed",
    target("core.rerun_state_machine:RerunDataIterator.__next__", following),
    ranks=1,
)
