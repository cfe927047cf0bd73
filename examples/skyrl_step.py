"""Run SkyRL's Megatron worker on `TrainStep`: several `forward_backward`, then one `optim_step`.

In `init_model`, make a `StepModelWrapper` instead of a `MegatronModelWrapper`, and take the
worker's `optim_step` from `StepWorker`. Microbatches, losses, metrics, per-sample
`loss_fn_outputs`, `set_lr` and the requests of Tinker clients are unchanged.
"""

from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_model_config
from skyrl.backends.skyrl_train.workers.megatron import megatron_model_wrapper as skyrl

from megatron_idempotent.step import StepSchedule


class StepModelWrapper(skyrl.MegatronModelWrapper):
    """SkyRL's model wrapper, whose forward-backward calls accumulate gradients in one open step."""

    def __init__(self, config, actor_module, actor_optimizer=None, **options):
        super().__init__(config, actor_module, actor_optimizer, **options)
        get_model_config(actor_module[0]).finalize_model_grads_func = finalize_model_grads
        self.schedule = StepSchedule(actor_module, actor_optimizer)
        self.schedule.prepare()  # a collective, so before ranks call at different times

    def forward_backward_mini_batch(self, *args, **kwargs):
        megatrons = skyrl.get_forward_backward_func
        skyrl.get_forward_backward_func = lambda: self.schedule
        try:
            return super().forward_backward_mini_batch(*args, **kwargs)
        finally:
            skyrl.get_forward_backward_func = megatrons


class StepWorker:
    """A mixin whose `optim_step` ends the open step; list it before `MegatronPolicyWorkerBase` in
    the worker's base classes.
    """

    def optim_step(self):
        """Update the weights once; if any rank has failed, raise on all, and undo the step."""
        try:
            result = self.model.schedule.finish()
        except Exception:
            self.model.schedule.abort()
            raise
        if self.scheduler is not None and result.updated:
            self.scheduler.step(1)
        self._micro_batches_accumulated = 0
        return result.grad_norm
