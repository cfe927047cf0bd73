"""Builds a model and its optimizer like every `megatron.training` program.

The configuration is converted to arguments for Megatron's stock parser. A run without a checkpoint
starts from a random one, which this module writes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_idempotent.rl.hf import Architecture, build_gpt
from megatron_idempotent.rl.trainer.task.tokenizer import TOKENIZER_FILE, TextTokenizer

from .config import Config, ModelConfig
from .output import write_sums


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MegatronModel:
    """The result of Megatron's `setup_model_and_optimizer`: model chunks, optimizer and scheduler.

    Example: `MegatronModel(args=args, chunks=[ddp], optimizer=optimizer, scheduler=scheduler)`.
    """

    args: Any
    """Megatron's global arguments."""
    chunks: list[Any]
    """This rank's model chunks in DDP; more than one only in an interleaved schedule."""
    optimizer: Any
    """Megatron's optimizer."""
    scheduler: Any
    """Megatron's learning-rate scheduler."""

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """This rank's model chunks, each without its DDP wrapper."""
        return tuple(chunk.module for chunk in self.chunks)


def build_megatron_model(
    arguments: Sequence[str], arch: Architecture, *, positions: int, packs: bool = False
) -> MegatronModel:
    """Initialise Megatron, and build the model and its optimizer. A collective of all ranks.

    Weights are random, and logits have this rank's columns of the vocabulary.

    Args:
        arguments: Megatron's arguments; see `megatron_arguments`.
        arch: the shape of the model.
        positions: the length of training sequences.
        packs: True if a row may have several sequences.
    """
    from megatron.core.enums import ModelType
    from megatron.training import get_args, training
    from megatron.training.arguments import core_transformer_config_from_args

    _initialize(arguments)
    change: Callable[[Any], Any] | None = None
    alone = importlib.util.find_spec("transformer_engine") is None
    if alone and (packs or get_args().context_parallel_size > 1):
        # Megatron's local attention supports neither; Transformer Engine's supports both.
        from megatron_idempotent.proof.cpu.attention import with_exact_attention

        change = with_exact_attention

    def provide_model(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        **newer: Any,
    ) -> Any:
        return build_gpt(
            arch,
            core_transformer_config_from_args(get_args()),
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            max_positions=positions,
            change_spec=change,
            parallel_output=True,
        )

    chunks, optimizer, scheduler = training.setup_model_and_optimizer(
        model_provider_func=provide_model, model_type=ModelType.encoder_or_decoder
    )
    return MegatronModel(args=get_args(), chunks=chunks, optimizer=optimizer, scheduler=scheduler)


def _initialize(arguments: Sequence[str]) -> None:
    """Initialise Megatron with these command-line arguments, passed in `sys.argv`, because Megatron
    reads them only from there.
    """
    from megatron.core.datasets import utils as datasets
    from megatron.training import arguments as parser
    from megatron.training import initialize

    old_argv, compile_helpers = sys.argv, datasets.compile_helpers
    sys.argv = ["megatron-idempotent-train", *arguments]
    # Megatron runs `make` in its data-set folder, and exits because its wheels have no makefile.
    # The compiled helpers index pre-training data, which this trainer does not use.
    datasets.compile_helpers = lambda: None
    try:
        if hasattr(parser, "parse_and_validate_args"):  # from 0.18 on, initialize does not parse
            parser.parse_and_validate_args()
            initialize.initialize_megatron()
        else:
            initialize.initialize_megatron(args_defaults={})
    finally:
        sys.argv, datasets.compile_helpers = old_argv, compile_helpers


# The number of training iterations only affects the learning rate's decay, which is not used. A
# constant, so that a resumed run with more rollouts has the same schedule as its checkpoint.
_FOREVER = 1_000_000_000

PLAIN_ARGUMENTS = (
    "--transformer-impl=local",
    "--use-cpu-initialization",
    "--distributed-backend=gloo",
    # Replace fused CUDA kernels by plain torch.
    "--no-gradient-accumulation-fusion",
    "--no-persist-layer-norm",
    "--no-masked-softmax-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
    "--rerun-mode=disabled",
)
"""Arguments of a run that has neither Transformer Engine nor fused CUDA kernels."""


def megatron_arguments(config: Config, arch: Architecture, *, positions: int) -> list[str]:
    """Return the command-line arguments for `megatron.training` of a run with this configuration.

    `arch` is the shape of the model and `positions` the length of training sequences. Fixed choices
    of this trainer are the distributed optimizer with both overlap flags, Megatron's local layers
    (Transformer Engine needs CUDA), no dropout, and gradients divided by the response tokens of all
    ranks.
    """
    parallel, optimizer = config.parallel, config.optimizer
    arguments = [
        *arch.megatron_arguments(),
        "--attention-dropout=0",
        f"--seq-length={positions}",
        f"--seed={config.run.seed}",
        f"--tensor-model-parallel-size={parallel.tp}",
        f"--pipeline-model-parallel-size={parallel.pp}",
        f"--context-parallel-size={parallel.cp}",
        f"--expert-model-parallel-size={parallel.ep}",
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
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        # Small buckets: with a single one, nothing could overlap.
        "--ddp-bucket-size=40000",
        "--calculate-per-token-loss",
        *PLAIN_ARGUMENTS,
    ]
    if parallel.vpp > 1:
        layers = arch.layers // (parallel.pp * parallel.vpp)
        arguments.append(f"--num-layers-per-virtual-pipeline-stage={layers}")
    if parallel.sequence_parallel:
        arguments.append("--sequence-parallel")
    return arguments


def ensure_checkpoint(
    directory: Path, model: ModelConfig, tokenizer: TextTokenizer, *, seed: int, positions: int
) -> Path:
    """Write a Hugging Face checkpoint with random weights on rank 0, unless `directory` exists;
    return the folder. A collective.

    Its weights depend only on the sizes and the seed. The model has RMSNorm, rotary positions,
    SwiGLU, grouped queries and no biases; `positions` is the longest sequence. The folder is
    written under another name and renamed.
    """
    if dist.get_rank() == 0 and not directory.is_dir():
        unfinished = directory.with_name(directory.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        write_checkpoint(unfinished, model, tokenizer, seed=seed, positions=positions)
        write_sums(unfinished)
        unfinished.rename(directory)
    dist.barrier()
    return directory


def write_checkpoint(
    directory: Path, model: ModelConfig, tokenizer: TextTokenizer, *, seed: int, positions: int
) -> None:
    """Write a Hugging Face checkpoint with random weights; see `ensure_checkpoint`.

    Not a collective. Torch's random state does not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        decoder = _random_decoder(model, tokenizer, positions)
    with torch.no_grad():
        # As in Megatron: output projections are smaller in deeper models.
        for name, parameter in decoder.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                parameter.mul_((2 * model.layers) ** -0.5)
    decoder.save_pretrained(directory)
    tokenizer.save(directory / TOKENIZER_FILE)


def _random_decoder(model: ModelConfig, tokenizer: TextTokenizer, positions: int) -> Any:
    """Make a Hugging Face Llama with random weights or, if the model has experts, a Qwen3-MoE."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": tokenizer.vocabulary_size,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.query_groups,
        "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(model.rotary_base)},
        "initializer_range": model.init_std,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.end_ids[0],
        "pad_token_id": tokenizer.pad_id,
    }
    if not model.num_experts:
        return LlamaForCausalLM(LlamaConfig(**sizes))
    experts: dict[str, Any] = {
        "head_dim": model.hidden // model.heads,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.expert_ffn,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.0,
    }
    # Set after construction: transformers would make the padding embedding zero, and if the policy
    # samples padding, its gradient through the norms of queries and keys is 1 / epsilon.
    pad_token_id = sizes.pop("pad_token_id")
    decoder = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    decoder.config.pad_token_id = pad_token_id
    return decoder
