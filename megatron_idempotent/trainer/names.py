"""Names of the metrics that the bar, the curves and the final table look up. Free of torch."""

from megatron_idempotent.controller.watch.names import LOSS, REWARD, TOKENS_PER_S, TOTAL_S

GRAD_NORM = "train/grad_norm"
HELD_OUT = "evaluation/reward"

__all__ = ["GRAD_NORM", "HELD_OUT", "LOSS", "REWARD", "TOKENS_PER_S", "TOTAL_S"]
