"""Names of the metrics that the bar, the curves and the final table look up. Free of torch."""

REWARD = "train/reward"
LOSS = "train/loss"
GRAD_NORM = "train/grad_norm"
HELD_OUT = "evaluation/reward"
TOTAL_S = "timing/train/total_s"
TOKENS_PER_S = "timing/train/tokens_per_s"
