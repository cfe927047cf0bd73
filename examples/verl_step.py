"""verl's Megatron engine on `TrainStep`: any number of `forward_backward_batch` in a step.

`StepEngine` goes before `MegatronEngineWithLMHead` in the bases of an engine. Microbatches, losses,
outputs, offloads and modes stay verl's.
"""

from verl.workers.engine.megatron import transformer_impl as verl

from megatron_idempotent.step import StepSchedule


class StepEngine:
    """verl's engine; one step is open from `optimizer_zero_grad` to `optimizer_step`."""

    def initialize(self):
        super().initialize()
        self.schedule = StepSchedule(self.module, self.optimizer)

    def optimizer_zero_grad(self):
        self.schedule.abort()  # a step that an exception has left
        self.schedule.begin()

    def forward_backward_batch(self, *args, **kwargs):
        megatrons = verl.get_forward_backward_func
        verl.get_forward_backward_func = lambda: self.schedule
        try:
            return super().forward_backward_batch(*args, **kwargs)
        finally:
            verl.get_forward_backward_func = megatrons

    def optimizer_step(self):
        return self.schedule.finish().grad_norm
