"""The configuration in Megatron's own words: the argument list its stock parser reads."""

from __future__ import annotations

from megatron_idempotent.models import Architecture
from megatron_idempotent.trainer.config import Config

# Only the learning rate's decay is measured in it, and the rate here never decays. A constant, so
# that a resumed run with more rollouts finds the schedule of its checkpoint.
_FOREVER = 1_000_000_000


def megatron_arguments(config: Config, arch: Architecture, *, positions: int) -> list[str]:
    """Arguments for `megatron.training`, as on the command line of any of its programs.

    `arch` is the checkpoint's and `positions` the length of the training sequences. What is not in
    the configuration is here because the trainer stands for it: the distributed optimizer with both
    overlap flags, Megatron's local layers (Transformer Engine needs CUDA), no dropout, and
    gradients divided by the response tokens of all ranks.
    """
    return [
        *arch.megatron_arguments(),
        "--attention-dropout=0",
        f"--seq-length={positions}",
        f"--seed={config.run.seed}",
        *_optimizer(config),
        *_OVERLAP,
        *_CPU,
    ]


_OVERLAP = (
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    # Several buckets even in a small model: with one, nothing could overlap.
    "--ddp-bucket-size=40000",
    "--calculate-per-token-loss",
)

_CPU = (
    "--transformer-impl=local",
    "--use-cpu-initialization",
    "--distributed-backend=gloo",
    # Fused CUDA kernels, each with a plain torch form.
    "--no-gradient-accumulation-fusion",
    "--no-persist-layer-norm",
    "--no-masked-softmax-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
    "--rerun-mode=disabled",
)


def _optimizer(config: Config) -> list[str]:
    optimizer = config.optimizer
    return [
        f"--micro-batch-size={config.microbatch_size}",
        f"--global-batch-size={config.global_batch_size}",
        f"--train-iters={_FOREVER}",
        "--optimizer=adam",
        f"--lr={optimizer.lr}",
        "--lr-decay-style=constant",
        f"--lr-warmup-iters={optimizer.warmup_steps}",
        f"--adam-beta1={optimizer.beta1}",
        f"--adam-beta2={optimizer.beta2}",
        f"--weight-decay={optimizer.weight_decay}",
        f"--clip-grad={optimizer.clip_grad}",
    ]
