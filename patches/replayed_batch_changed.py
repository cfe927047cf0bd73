"""A rerun step gets the microbatches as its first run has changed them.

Symptom:
    The rerun state machine runs a step again, because a loss was NaN, spiked, or is validated
    (`--rerun-mode validate_results`), and `forward_step` has removed entries of the microbatch or
    written into it. The second run computes a different result, and the machine blames the
    hardware; or it ends in a `KeyError`. The batch that it saves for a rerun on another machine is
    also changed.

Cause:
    `RerunDataIterator` stores the same microbatch objects that it returns, and returns the stored
    objects to every rerun. From 0.19 on it stores a copy, and returns that copy to every rerun.

Affects:
    Every release; 0.19 from the third run on, and in the batch that it saves after the second. What
    the patch does: the iterator stores a shallow copy, and each rerun gets a shallow copy of that.
    The first run gets the original microbatch, as before. Tensors are not copied: the next run
    still sees writes into a tensor in place.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/5635 copies the stored microbatch in 0.19.

Remove when:
    the iterator also returns copies to reruns. `upstream/replayed-batch-changed` has the repair.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from ._case import Fault, Original, Patch, address, bench, target


def following(original: Original, self: Any) -> Any:
    """Wrap the rerun iterator's `__next__`: return the microbatch, and store a copy of it.
    The caller cannot change the copy that a rerun gets.
    """
    is_again, count = self.replaying, len(self.saved_microbatches)
    microbatch = original(self)
    if is_again:
        return copy.copy(microbatch)
    stored = self.saved_microbatches
    if len(stored) > count and stored[-1] is microbatch:
        stored[-1] = copy.copy(microbatch)
    return microbatch


def reproduce() -> None:
    """Run a step three times with `RerunDataIterator`; a step removes a key of each microbatch.
    On stock Megatron the reruns have other gradients than the first run.
    """
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
    first, *reruns = gradients
    wrong = [run for run, gradient in enumerate(reruns, 2) if not gradient.equal(first)]
    if wrong:
        raise Fault(f"run {wrong[0]} of one step has other gradients than the first")


def _tokens(data: Any) -> Iterator[Any]:
    """Yield each microbatch's token ids plus its `shift`; remove `shift` from the microbatch."""
    from megatron_idempotent.proof.cpu import tiny

    while True:
        microbatch = next(data)
        yield (microbatch["tokens"] + microbatch.pop("shift", 0)) % tiny.VOCABULARY


PATCH = Patch(
    "a step that is run again gets the microbatches that its first run has changed",
    target("core.rerun_state_machine:RerunDataIterator.__next__", following),
    fixed_by=(
        (
            address("core.rerun_state_machine:RerunDataIterator.__next__"),
            "copy.copy(self.saved_microbatches[self.replay_pos])",
        ),
    ),
    ranks=1,
    loudness="both",
)
