"""Loading the scheduler's state adds the saved steps to those that were counted since.

Symptom:
    A rollback in place, or a load into a scheduler that has stepped, trains on with a wrong
    learning rate: saved at step 30, loaded at step 40, the scheduler is at 70. With a linear decay
    over 100 steps from 1.0 that is 0.3 instead of 0.7. Two loads in a row count twice. And if the
    checkpoint's weight decay differs from the scheduler's own, the first step after any load uses
    the scheduler's. No error.

Cause:
    `load_state_dict` ends in `step(increment=num_steps)`, which adds to `num_steps`, and restores
    the four settings of the weight decay only after that.

Affects:
    Every release. Frameworks that call `step(increment=…)` themselves after a load count the saved
    steps twice in the same way, even with the patch: remove that call. What the patch does: after a
    load the scheduler is at the saved step, with the learning rate and weight decay of its loaded
    settings. A load that raises leaves the scheduler as it was.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/7468 is about the weight decay. Reports of wrong
    rates after a load: https://github.com/THUDM/slime/pull/1547,
    https://github.com/THUDM/slime/issues/1761,
    https://github.com/NVIDIA-NeMo/Automodel/issues/3882.

Remove when:
    `load_state_dict` assigns `num_steps`, and sets the groups after all settings are restored.
    `upstream/scheduler-load-adds-steps` has the repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, address, bench, target


def load_state_dict(original: Original, self: Any, state_dict: dict[str, Any]) -> None:
    """Wrap the scheduler's load: count the saved steps from 0, and set rates and weight decays.
    If it raises, the scheduler is as before.
    """
    attributes = dict(vars(self))
    self.num_steps = 0
    try:
        original(self, state_dict)
    except BaseException:
        vars(self).update(attributes)
        self.step(0)
        raise
    self.step(0)


def reproduce() -> None:
    """Save the scheduler at step 30, and load the state at step 40.
    On stock Megatron the scheduler is at step 70 afterwards.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    scheduler = OptimizerParamScheduler(
        bench(optimizer_overrides={"lr": 1.0, "min_lr": 0.0}).optimizer,
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=100,
        lr_decay_style="linear",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=100,
        wd_incr_style="constant",
    )
    scheduler.step(30)
    saved, lr = scheduler.state_dict(), scheduler.optimizer.param_groups[0]["lr"]
    scheduler.step(10)
    scheduler.load_state_dict(saved)
    loaded_lr = scheduler.optimizer.param_groups[0]["lr"]
    if (scheduler.num_steps, loaded_lr) != (30, lr):
        raise Fault(
            f"saved at step 30 with lr {lr:.1f}, "
            f"loaded at step {scheduler.num_steps} with {loaded_lr:.1f}"
        )


PATCH = Patch(
    "loading the learning-rate scheduler adds the saved steps to those counted since",
    target(
        "core.optimizer_param_scheduler:OptimizerParamScheduler.load_state_dict", load_state_dict
    ),
    ranks=1,
    fixed_by=(
        (
            address("core.optimizer_param_scheduler:OptimizerParamScheduler.load_state_dict"),
            "self.num_steps = num_steps",
        ),
    ),
)
