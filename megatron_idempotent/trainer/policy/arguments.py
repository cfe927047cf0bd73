"""The configuration in Megatron's own words: the argument list its stock parser reads."""

from __future__ import annotations

from megatron_idempotent.trainer.config import Config

# Only the learning rate's decay is measured in it, and the rate here never decays. A constant, so
# that a resumed run with more rollouts finds the schedule of its checkpoint.
_FOREVER = 1_000_000_000


def megatron_arguments(config: Config, *, positions: int, vocabulary_size: int) -> list[str]:
    """Arguments for `megatron.training`, as on the command line of any of its programs.

    `positions` is the length of the training sequences. What is not in the configuration is here
    because the trainer stands for it: the distributed optimizer with both overlap flags, Megatron's
    local layers (Transformer Engine needs CUDA), float32, and gradients divided by the response
    tokens of all ranks.
    """
    return [
        *_model(config, positions, vocabulary_size),
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


def _model(config: Config, positions: int, vocabulary_size: int) -> list[str]:
    model = config.model
    return [
        f"--num-layers={model.layers}",
        f"--hidden-size={model.hidden}",
        f"--ffn-hidden-size={model.ffn}",
        f"--num-attention-heads={model.heads}",
        "--group-query-attention",
        f"--num-query-groups={model.query_groups}",
        "--normalization=RMSNorm",
        "--norm-epsilon=1e-6",
        "--swiglu",
        "--disable-bias-linear",
        "--untie-embeddings-and-output-weights",
        "--position-embedding-type=rope",
        f"--rotary-base={model.rotary_base}",
        f"--init-method-std={model.init_std}",
        "--attention-dropout=0",
        "--hidden-dropout=0",
        f"--seq-length={positions}",
        f"--max-position-embeddings={positions}",
        "--tokenizer-type=NullTokenizer",
        f"--vocab-size={vocabulary_size}",
        "--make-vocab-size-divisible-by=1",
        f"--seed={config.run.seed}",
    ]


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
