from types import SimpleNamespace

import pytest

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


def _scheduler(**kwargs):
    optimizer = SimpleNamespace(param_groups=[{'params': [], 'wd_mult': 1.0}])
    settings = dict(
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=100,
        lr_decay_style='linear',
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=100,
        wd_incr_style='constant',
    )
    return OptimizerParamScheduler(optimizer, **{**settings, **kwargs})


def test_load_returns_to_the_saved_step():
    scheduler = _scheduler()
    scheduler.step(30)
    saved = scheduler.state_dict()
    scheduler.step(10)
    for _ in range(2):
        scheduler.load_state_dict(saved)
        assert scheduler.num_steps == 30
        assert scheduler.optimizer.param_groups[0]['lr'] == pytest.approx(0.7)


def test_load_sets_the_loaded_weight_decay():
    saved = _scheduler(start_wd=0.1, end_wd=0.1).state_dict()
    scheduler = _scheduler(use_checkpoint_opt_param_scheduler=True)
    scheduler.load_state_dict(saved)
    assert scheduler.optimizer.param_groups[0]['weight_decay'] == 0.1
