"""slime's load of a reference leaves its options set: later loads use the reference's step.

Symptom:
    With `--ref-ckpt-step` or `--opd-teacher-ckpt-step`, and without `--ckpt-step`, the next load in
    the process uses the reference's step: `--keep-old-actor` loads other weights than the actor's,
    or none, and a later load in the same process loads a wrong step. After a load of a reference
    that raised, `args.finetune` and `args.no_load_optim` stay True, and `args.load` is the
    reference's folder: a retried load loads only weights, at iteration 0. No error.

Cause:
    `load_other_checkpoint` sets the global arguments for one load. It restores the step only if
    there was one, and has no `finally`.

Affects:
    0.2.3 to 0.3.1; main of August 2026 restores the step, but not after a load that raises. What
    the patch does: after a load of another checkpoint all of these arguments have their earlier
    values.

Upstream:
    https://github.com/THUDM/slime/pull/2243

Remove when:
    `load_other_checkpoint` restores them in a `finally`.
    `upstream/slime-load-options-left-set` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Broken, Fault, Original, Patch, target

from . import _actors, _copies

_OPTIONS = ("load", "no_load_optim", "no_load_rng", "finetune", "ckpt_step")


def load_other_checkpoint(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Run slime's load of another checkpoint, then restore the arguments that it has changed."""
    options = {name: getattr(self.args, name) for name in _OPTIONS if hasattr(self.args, name)}
    try:
        original(self, *args, **kwargs)
    finally:
        vars(self.args).update(options)


def reproduce() -> None:
    """Load a reference that has its own `ref_ckpt_step`, then a reference that cannot be read.
    Without the patch the arguments that the load has changed stay changed.
    """
    actor = _actors.Actor("slime", ref_ckpt_step=7)
    _expect_restored(actor, "a load")
    actor.on_load = _actors.fail
    try:
        actor.actor.load_other_checkpoint("ref", "ref")
    except Broken:
        _expect_restored(actor, "a load that raised")


def _expect_restored(actor: _actors.Actor, when: str) -> None:
    options = {name: getattr(actor.args, name) for name in _OPTIONS}
    changed = {name: value for name, value in options.items() if value not in (None, "actor")}
    if changed:
        raise Fault(f"after {when} of a reference the arguments have {changed}")


PATCH = Patch(
    "slime's load of a reference leaves its step, or finetune=True, to later loads, silently",
    target(
        f"{_actors.ACTOR.format('slime')}.load_other_checkpoint",
        load_other_checkpoint,
        "self.args.ckpt_step",
        "self.args.finetune = True",
    ),
    since="0.2.1",
    fixed_when=_copies.cleans_up(),
    ranks=1,
)
