"""Gradients that arrive after their bucket's reduction was dispatched stay local, silently.

Symptom:
    With overlap_grad_reduce gradients differ between data-parallel ranks, without an error. Either
    a window whose reductions are in flight is followed, before `finish_grad_sync()`, by another one
    inside of `no_sync()`. Or, from 0.16 on, `config.no_sync_func` is unset and a window has more
    microbatches than the first one; with fewer microbatches, `AssertionError: Communication call
    has not been issued for this bucket`.

Cause:
    Megatron does not check for gradients after a dispatched reduction. From 0.16 on bucket groups
    learn from the first window how many gradients each parameter registers, and reduce when they
    have as many. Without `no_sync` every microbatch registers, so that the number is that of the
    microbatches. Before 0.16 a second gradient raised `Cannot set grad twice`.

Affects:
    Every release. What the patch does: `finish_grad_sync` raises, and names a parameter, if
    gradients were written inside of `no_sync()` after a reduction, or if a parameter has registered
    more or fewer gradients than its bucket group has learned. With `no_sync` wired, as
    `wire_train_config` does, the number of microbatches may change from window to window. A
    parameter that only some ranks use also raises, because collectives would pair up wrongly.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/param_and_grad_buffer.py,
    `_ParamAndGradBucketGroup.register_grad_ready`. https://github.com/NovaSky-AI/SkyRL/pull/2146
    reports it with a changed number of microbatches, and
    https://github.com/AMD-AGI/Primus/pull/1055 after warm-up steps that set the counts.

Remove when:
    a gradient after its bucket's reduction raises upstream. `upstream/gradient-after-reduction` has
    the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import ddp

from ._case import Fault, Original, Patch, backward, bench, target


def finish_grad_sync(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap a chunk's `finish_grad_sync`: raise if a gradient of the chunk would stay unreduced."""
    for group in ddp.bucket_groups(self):
        counts, expected = ddp.registered(group), _expected(group)
        late = ddp.late(group)
        if late is not None and counts.get(late, 0) <= expected.get(late, 0):
            ddp.wait(self)
            raise RuntimeError(
                f"a gradient of {ddp.name_of(self, late)} came after the reduction of its "
                "bucket had started, and would stay local. Let the last window before "
                "finish_grad_sync() be the one outside of no_sync(), or hold all of them inside of "
                "it; call start_grad_sync() after the last one"
            )
        # There are no counts if the whole window was inside of no_sync.
        if late is not None or (counts and counts != expected and _never_starts(group)):
            _refuse(self, counts, expected)
    original(self, *args, **kwargs)
    ddp.ended(self)


def _expected(group: Any) -> dict[Any, int]:
    """Return how many gradients each parameter registers before its bucket group is reduced."""
    learned = getattr(group, "golden_per_param_grad_ready_counts", None)
    # Releases before 0.16 learn nothing; in a first batch nothing is learned yet.
    counts = learned or dict.fromkeys(group.params, 1)
    # The patch `frozen-parameters-refused` does not wait for frozen parameters.
    return {param: count for param, count in counts.items() if param.requires_grad}


def _never_starts(group: Any) -> bool:
    if ddp.dispatched(group) or getattr(group, "is_first_batch", False):
        return False  # dispatched already, or by finish_grad_sync itself
    # Before 0.16 upstream raises itself, unless there are several optimizer instances.
    return (
        hasattr(group, "is_first_batch") or group.ddp_config.num_distributed_optimizer_instances > 1
    )


def zero_grad_buffer(original: Original, self: Any) -> None:
    """Wrap `zero_grad_buffer`: also forget the started reductions and the gradients after them."""
    original(self)
    ddp.ended(self)


def _refuse(chunk: Any, counts: dict[Any, int], expected: dict[Any, int]) -> None:
    ddp.wait(chunk)
    params = {**expected, **counts}
    differing = [(param, counts.get(param, 0), expected.get(param, 0)) for param in params]
    # Report too many gradients first, because upstream would not notice those.
    param, count, learned = max(
        ((p, n, w) for p, n, w in differing if n != w), key=lambda entry: entry[1] - entry[2]
    )
    fate = "after its bucket was reduced" if count > learned else "and its bucket was never reduced"
    raise RuntimeError(
        f"{ddp.name_of(chunk, param)} has registered {count} gradients in this window where "
        f"its bucket group waits for {learned}, {fate}. If the number of microbatches has changed, "
        "set config.no_sync_func = ddp.no_sync (megatron_idempotent.wire_train_config does); if "
        "the number of schedule calls has, hold all but the last inside of no_sync(); if the "
        "parameter is used in some windows and not in others, add 0 * parameter.sum() to the loss"
    )


def reproduce() -> None:
    """Run a backward that reduces, then one inside of `no_sync()`, then `finish_grad_sync()`.
    On stock Megatron the gradients of the second backward stay local; with the patch the last call
    raises.
    """
    gradients = []
    for overlap in (True, False):
        model = bench(
            overlap_grad_reduce=overlap, distributed_optimizer=False, with_optimizer=False
        )
        (chunk,) = model.chunks
        model.forward_backward(1, data_seed=0)
        chunk.zero_grad_buffer()
        backward(model, data_seed=1)
        with chunk.no_sync():
            backward(model, data_seed=2)
        try:
            chunk.finish_grad_sync()
        except RuntimeError as error:
            if overlap and "would stay local" in str(error):
                return
            raise
        gradients.append(model.gradients())
    if not gradients[0].equal(gradients[1]):
        raise Fault("the second microbatch's gradients are not reduced")


def control() -> object:
    """Run the correct step sequences of `_controls`, as a control; return the parameters' bytes."""
    from . import _controls

    return _controls.run_all()


PATCH = Patch(
    "gradients that arrive after their bucket's reduction stay local, silently",
    target("ddp.finish_grad_sync", finish_grad_sync),
    target("ddp.zero_grad_buffer", zero_grad_buffer),
    target("group.start_grad_sync", ddp.dispatching),
    groups=("overlap",),
    loudness="both",
)
