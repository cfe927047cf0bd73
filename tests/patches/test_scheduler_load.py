"""A learning-rate scheduler that loads a state is where the state was, however often it loads."""

import pytest
from ranks import on_ranks

import megatron_idempotent

SAVED_AT, LIVE_AT = 30, 40
#: A learning rate that falls by 0.01 a step, and a weight decay that grows by 0.001.
SETTINGS = {
    "init_lr": 0.0,
    "max_lr": 1.0,
    "min_lr": 0.0,
    "lr_warmup_steps": 0,
    "lr_decay_steps": 100,
    "lr_decay_style": "linear",
    "start_wd": 0.0,
    "end_wd": 0.1,
    "wd_incr_steps": 100,
    "wd_incr_style": "linear",
}


def scheduler_at(steps, **settings):
    import torch
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    megatron_idempotent.apply(["scheduler-load-adds-steps"], strict=True)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    scheduler = OptimizerParamScheduler(optimizer, **{**SETTINGS, **settings})
    scheduler.step(steps)
    return scheduler


def state(scheduler):
    """Return what the scheduler counts, and what the next update takes."""
    (group,) = scheduler.optimizer.param_groups
    return scheduler.num_steps, group["lr"], group["weight_decay"]


@pytest.mark.parametrize("loads", [1, 2])
@pytest.mark.parametrize("live_at", [0, LIVE_AT])
@on_ranks(1, distributed=False)
def test_a_load_goes_back_to_the_saved_step(loads, live_at):
    """Into a scheduler that has other settings, whose place those of the checkpoint take."""
    saved = scheduler_at(SAVED_AT)
    live = scheduler_at(live_at, end_wd=0.3, max_lr=2.0)
    for _ in range(loads):
        live.load_state_dict(saved.state_dict())
    assert state(live) == state(saved)
    for each in (saved, live):
        each.step(5)
    assert state(live) == state(saved) == (SAVED_AT + 5, *state(scheduler_at(SAVED_AT + 5))[1:])


@pytest.mark.parametrize(
    ("wrong", "error"), [({"max_lr": 2.0}, "learning rate"), ({"end_wd": 0.3}, "end weight decay")]
)
@on_ranks(1, distributed=False)
def test_a_load_that_is_refused_changes_nothing(wrong, error):
    """Before the steps are counted, and after that."""
    live = scheduler_at(LIVE_AT, use_checkpoint_opt_param_scheduler=False)
    before, settings = state(live), live.state_dict()
    with pytest.raises(AssertionError, match=error):
        live.load_state_dict(scheduler_at(SAVED_AT, **wrong).state_dict())
    assert (state(live), live.state_dict()) == (before, settings)
