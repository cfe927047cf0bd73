"""SkyRL's Megatron worker on `TrainStep`: any number of `forward_backward`, then one `optim_step`.

`init_model` makes a `StepModelWrapper` where it made a `MegatronModelWrapper`, and the worker takes
its `optim_step` from `StepWorker`. Microbatches, losses, metrics, per-sample `loss_fn_outputs` and
`set_lr` stay SkyRL's, and so does all that a Tinker client sends.
"""

from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_model_config
from skyrl.backends.skyrl_train.workers.megatron import megatron_model_wrapper as skyrl

from megatron_idempotent.step import StepSchedule


class StepModelWrapper(skyrl.MegatronModelWrapper):
    """SkyRL's wrapper; what its calls accumulate is one open step."""

    def __init__(self, config, actor_module, actor_optimizer=None, **options):
        super().__init__(config, actor_module, actor_optimizer, **options)
        get_model_config(actor_module[0]).finalize_model_grads_func = finalize_model_grads
        self.schedule = StepSchedule(actor_module, actor_optimizer)
        self.schedule.prepare()  # all ranks are here now, and may call it at different times

    def forward_backward_mini_batch(self, *args, **kwargs):
        megatrons = skyrl.get_forward_backward_func
        skyrl.get_forward_backward_func = lambda: self.schedule
        try:
            return super().forward_backward_mini_batch(*args, **kwargs)
        finally:
            skyrl.get_forward_backward_func = megatrons


class StepWorker:
    """Goes before `MegatronPolicyWorkerBase` in the bases of SkyRL's worker."""

    def optim_step(self):
        """Update once; where any rank has failed, raise on all, with nothing of the window left."""
        try:
            result = self.model.schedule.finish()
        except Exception:
            self.model.schedule.abort()
            raise
        if self.scheduler is not None and result.updated:
            self.scheduler.step(1)
        self._micro_batches_accumulated = 0
        return result.grad_norm
