"""An exception in NeMo-RL's reference pass leaves the reference's weights in the policy, silently.

Symptom:
    After `get_reference_policy_logprobs` of the Megatron policy worker raised, the policy computes
    with the reference's weights, without an error, until the next step restores the optimizer's
    copy; log-probs computed before that are the reference's. Top-k and top-p filtering stay off,
    and so do the forward pre-hooks.

Cause:
    `use_reference_model` copies the reference into the model, yields, and copies back after the
    `yield`, without a `finally`.

Affects:
    The worker of main, August 2026. What the patch does: if the block raises, the context manager
    still restores the policy, and the exception propagates. A failure in the middle of the first
    copy is not undone.

Upstream:
    https://github.com/NVIDIA-NeMo/RL/blob/main/nemo_rl/models/policy/workers/megatron_policy_worker.py,
    `use_reference_model`.

Remove when:
    it restores the policy in a `finally`.
    `upstream/nemo-rl-reference-left-in-policy` has the repair.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from megatron_idempotent.patches._case import Fault, Original, Patch, target

from . import _copies, _nemo_rl


def use_reference_model(original: Original, self: Any) -> AbstractContextManager[None]:
    """Wrap the context `use_reference_model`: restore the policy even if its block raises."""
    return _restoring(original(self))


@contextmanager
def _restoring(swapped: AbstractContextManager[None]) -> Iterator[None]:
    swapped.__enter__()
    try:
        yield
    finally:
        swapped.__exit__(None, None, None)


def reproduce() -> None:
    """Run a pass of NeMo-RL's reference in which a microbatch cannot be read.
    Without the patch the policy has the reference's weights afterwards.
    """
    nemo = _nemo_rl.NemoRL(overlap_param_gather=True)
    nemo.remember_reference()
    nemo.train(0)
    outcome = nemo.outcome()
    nemo.failing(("data", 1), lambda: nemo.reference(1))
    if nemo.outcome() != outcome:
        raise Fault("the policy holds the reference's weights")


PATCH = Patch(
    "an exception in NeMo-RL's reference pass leaves its weights in the policy, silently",
    target(
        f"{_nemo_rl.POLICY}.use_reference_model",
        use_reference_model,
        "self._apply_state_dict_to_model",
        "self.reference_state_dict",
        "yield",
    ),
    since="0.1",
    fixed_when=_copies.cleans_up(protected="yield"),
)
