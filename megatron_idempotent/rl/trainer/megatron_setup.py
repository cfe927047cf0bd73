"""Builds a model and its optimizer the way every `megatron.training` program does.

The configuration becomes the argument list that Megatron's stock parser reads.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_idempotent.rl.hf import Architecture, build_gpt

from .config import Config


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MegatronModel:
    """Holds what Megatron's `setup_model_and_optimizer` returned.

    Example: `MegatronModel(args=args, chunks=[ddp], optimizer=optimizer, scheduler=scheduler)`.
    """

    args: Any
    """Megatron's global arguments."""
    chunks: list[Any]
    """This rank's model chunks, wrapped in DDP: one, unless the schedule is interleaved."""
    optimizer: Any
    """Megatron's optimizer."""
    scheduler: Any
    """Megatron's scheduler of the learning rate."""

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """The models of the chunks, without DDP."""
        return tuple(chunk.module for chunk in self.chunks)


def build_megatron_model(
    arguments: Sequence[str], arch: Architecture, *, positions: int, packs: bool = False
) -> MegatronModel:
    """Initialise Megatron, and build the model and its optimizer. Collective over all ranks.

    Args:
        arguments: Megatron's arguments; see `megatron_arguments`.
        arch: the shape of the model.
        positions: the length of training sequences.
        packs: True if a row may have several sequences.
    """
    from megatron.core.enums import ModelType
    from megatron.training import get_args, training

    _initialize(arguments)

    def provide_model(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        **newer: Any,
    ) -> torch.nn.Module:
        return gpt_model(
            arch, pre_process, post_process, vp_stage=vp_stage, positions=positions, packs=packs
        )

    chunks, optimizer, scheduler = training.setup_model_and_optimizer(
        model_provider_func=provide_model, model_type=ModelType.encoder_or_decoder
    )
    return MegatronModel(args=get_args(), chunks=chunks, optimizer=optimizer, scheduler=scheduler)


def gpt_model(
    arch: Architecture,
    pre_process: bool,
    post_process: bool,
    *,
    vp_stage: int | None = None,
    positions: int,
    packs: bool = False,
) -> torch.nn.Module:
    """Build a pipeline stage of a decoder, configured by Megatron's global arguments.

    Its weights are random, and its logits have this rank's columns of the vocabulary. `pre_process`
    and `post_process` are true for the first and the last stage.
    """
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    change: Callable[[Any], Any] | None = None
    alone = importlib.util.find_spec("transformer_engine") is None
    if alone and (packs or get_args().context_parallel_size > 1):
        # Megatron's own attention takes neither; Transformer Engine's takes both.
        from megatron_idempotent.proof.cpu.attention import with_exact_attention

        change = with_exact_attention
    model: torch.nn.Module = build_gpt(
        arch,
        core_transformer_config_from_args(get_args()),
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        max_positions=positions,
        change_spec=change,
        parallel_output=True,
    )
    return model


def _initialize(arguments: Sequence[str]) -> None:
    """Initialise Megatron with these arguments, in `sys.argv`, where alone it reads them."""
    from megatron.core.datasets import utils as datasets
    from megatron.training import arguments as parser
    from megatron.training import initialize

    before, compile_helpers = sys.argv, datasets.compile_helpers
    sys.argv = ["megatron-idempotent-train", *arguments]
    # Megatron runs `make` in its data-set folder, and its wheels ship no makefile: it would end the
    # process. What it compiles indexes pre-training data, which is not read here.
    datasets.compile_helpers = lambda: None
    try:
        if hasattr(parser, "parse_and_validate_args"):  # 0.18 took the parsing out of initialize
            parser.parse_and_validate_args()
            initialize.initialize_megatron()
        else:
            initialize.initialize_megatron(args_defaults={})
    finally:
        sys.argv, datasets.compile_helpers = before, compile_helpers


# Only the learning rate's decay is measured in it, and the rate here never decays. A constant, so
# that a resumed run with more rollouts finds the schedule of its checkpoint.
_FOREVER = 1_000_000_000


def megatron_arguments(config: Config, arch: Architecture, *, positions: int) -> list[str]:
    """Return arguments for `megatron.training`, as on the command line of any of its programs.

    `arch` is the shape of the model and `positions` the length of the training sequences. Some are
    the trainer's own choice: the distributed optimizer with both overlap flags, Megatron's local
    layers (Transformer Engine needs CUDA), no dropout, and gradients divided by the response tokens
    of all ranks.
    """
    return [
        *arch.megatron_arguments(),
        "--attention-dropout=0",
        f"--seq-length={positions}",
        f"--seed={config.run.seed}",
        *_layout(config, arch),
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


def _layout(config: Config, arch: Architecture) -> list[str]:
    parallel = config.parallel
    arguments = [
        f"--tensor-model-parallel-size={parallel.tp}",
        f"--pipeline-model-parallel-size={parallel.pp}",
        f"--context-parallel-size={parallel.cp}",
        f"--expert-model-parallel-size={parallel.ep}",
    ]
    if parallel.vpp > 1:
        layers = arch.layers // (parallel.pp * parallel.vpp)
        arguments.append(f"--num-layers-per-virtual-pipeline-stage={layers}")
    if parallel.sequence_parallel:
        arguments.append("--sequence-parallel")
    return arguments


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
