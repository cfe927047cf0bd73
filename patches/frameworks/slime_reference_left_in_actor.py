"""slime's engines, and perhaps a checkpoint, get the reference's weights after a start, silently.

Symptom:
    With a reference or a teacher model, without `--colocate` and `--offload-train`, the first
    weight update after a resume sends the reference to the engines: the reward falls for some
    rollouts, KL and gradient norm jump. After a `train_actor` that raised in the pass of the
    reference, the next update sends the reference, and `save_model` saves it as the actor. No
    error.

Cause:
    `init` loads the other checkpoints into the only live model and leaves the last one there,
    unless weights are offloaded; `train_actor` switches to the reference and back without a
    `finally`. `update_weights` and `save_model` read the model without a check.

Affects:
    0.2.1 to 0.3.1, and main of August 2026. Training itself begins with the right weights. What the
    patch does: if the model has the weights of another checkpoint, an update or a save first
    restores the actor's weights, those of the last step that `train_actor` finished.

Upstream:
    https://github.com/THUDM/slime/pull/2224 and https://github.com/THUDM/slime/pull/2380, both
    open; https://github.com/modal-projects/training-gym/pull/546 is a patch over slime.

Remove when:
    `update_weights` and `save_model` check which weights are in the model.
    `upstream/slime-reference-left-in-actor` has the repair.
"""

from __future__ import annotations

from megatron_idempotent.patches._case import Patch

from . import _actors


def reproduce() -> None:
    """Send weights to slime's engines and save, after `init` and after a reference pass that fails.
    Without the patch the engines and the checkpoint get the reference's weights.
    """
    _actors.reproduce("slime", by_init=True)


def control() -> object:
    """Send weights to slime's engines and save a checkpoint, as a control: during both, the model
    holds the actor's own weights, not the reference's.
    """
    return _actors.control("slime")


PATCH = Patch(
    "slime's first weight update after a start sends the reference's weights, silently",
    *_actors.targets("slime"),
    since="0.2.1",
    fixed_when=_actors.switches_back,
    ranks=1,
)
