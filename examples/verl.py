"""verl's Megatron engine on `TrainStep`: any number of `forward_backward_batch` in a step.

`StepEngine` goes before `MegatronEngineWithLMHead` in the bases of an engine. Microbatches, losses,
outputs, offloads and modes stay verl's.
"""

from megatron.core.parallel_state import get_context_parallel_world_size
from verl.utils import tensordict_utils as tu
from verl.workers.engine.megatron import transformer_impl as verl

from megatron_idempotent import StepSchedule


class StepEngine:
    """verl's engine; one step is open from `optimizer_zero_grad` to `optimizer_step`."""

    def initialize(self):
        super().initialize()
        weight = self.auxiliary_weight
        self.schedule = StepSchedule(self.module, self.optimizer, auxiliary_weight=weight)

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

    def postprocess_micro_batch_func(self, output, data, **options):
        loss, *tokens, found = super().postprocess_micro_batch_func(output, data, **options)
        if tokens:  # a sum, to be divided by the tokens of all ranks; a schedule divides otherwise
            factor = data["num_micro_batch"] / get_context_parallel_world_size()
            loss = loss * factor * self.auxiliary_weight(data)
        return loss, found

    def auxiliary_weight(self, data):
        """Returns what a token counts as, or without `calculate_per_token_loss` a microbatch."""
        return 1 / tu.get_non_tensor_data(data, "routed_num_tokens", data["num_micro_batch"])

    def optimizer_step(self):
        return self.schedule.finish().grad_norm
