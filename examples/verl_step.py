"""Run verl's Megatron engine on `TrainStep`, with several `forward_backward_batch` per step.

Put `StepEngine` before `MegatronEngineWithLMHead` in the bases of an engine. Microbatches, losses,
outputs, offloads and modes are unchanged.
"""

from verl.workers.engine.megatron import transformer_impl as verl

from megatron_idempotent.step import StepSchedule


class StepEngine:
    """A mixin for verl's Megatron engine: all forward-backward calls of an optimizer step run as
    one step of `StepSchedule`.
    """

    def initialize(self):
        super().initialize()
        self.schedule = StepSchedule(self.module, self.optimizer)

    def optimizer_zero_grad(self):
        self.schedule.abort()  # a step that an exception left open
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
