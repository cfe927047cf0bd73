"""ROLL's `train_step` zeroes the gradients also if it raises."""

from upstream.edits import Repair, wrap

REPAIR = Repair(
    edits=(
        wrap(
            "roll.distributed.strategy.megatron_strategy:MegatronTrainStrategy.train_step",
            "self.forward_backward_func(",
            "try:",
            """
            except BaseException:
                # The next call adds to the gradients that it finds.
                for model in self.model:
                    model.zero_grad_buffer()
                self.optimizer.zero_grad()
                raise
            """,
            until="self.optimizer.step()",
        ),
    ),
)
