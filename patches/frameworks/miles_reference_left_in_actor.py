"""After an exception miles' engines and checkpoints may get the reference's weights, silently.

Symptom:
    `train_actor` raises in the pass of the reference or of the teacher, and the program goes on:
    the next weight update sends that model to the engines, unless they are colocated, and
    `save_model` and `export_hf` save it as the actor. No error.

Cause:
    `train_actor` switches the only live model to the reference and back without a `finally`, and
    the methods that read the model do not check which weights are in it.

Affects:
    0.1.0, and main of August 2026. The patch is the same as for slime,
    `slime-reference-left-in-actor`; miles' `init` restores the actor's weights itself.

Upstream:
    https://github.com/radixark/miles/blob/v0.1.0/miles/backends/megatron_utils/actor.py,
    `train_actor`; no thread found. https://github.com/radixark/miles/pull/756 repaired `init`.

Remove when:
    `update_weights` and `save_model` check which weights are in the model.
    `upstream/miles-reference-left-in-actor` has the repair.
"""

from __future__ import annotations

from megatron_idempotent.patches._case import Patch

from . import _actors


def reproduce() -> None:
    """Send weights to miles' engines and save, after a pass of the reference that raised.
    Without the patch the engines and the checkpoint get the reference's weights.
    """
    _actors.reproduce("miles", by_init=False)


def control() -> object:
    """Send weights to miles' engines and save a checkpoint, as a control: during both, the model
    holds the actor's own weights, not the reference's.
    """
    return _actors.control("miles")


PATCH = Patch(
    "after an exception miles sends or saves the reference's weights as the actor's, silently",
    *_actors.targets("miles", "export_hf"),
    since="0.1",
    fixed_when=_actors.switches_back,
    fixed_by=((f"{_actors.ACTOR.format('miles')}.update_weights", "self._use_actor_weights()"),),
    ranks=1,
)
