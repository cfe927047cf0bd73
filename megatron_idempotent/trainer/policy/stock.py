"""A model and its optimizer, built the way every `megatron.training` program builds them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stock:
    """What `setup_model_and_optimizer` made. Example: `Stock(args=args, chunks=[ddp], ...)`.

    `args` is Megatron's global namespace, `chunks` the DDP-wrapped pipeline chunks of this rank
    (one: the trainer has no pipeline).
    """

    args: Any
    chunks: list[Any]
    optimizer: Any
    scheduler: Any

    @property
    def module(self) -> torch.nn.Module:
        """The `GPTModel` without its wrappers."""
        module: torch.nn.Module = self.chunks[0].module
        return module


def build_stock(arguments: Sequence[str], *, vocabulary_size: int, positions: int) -> Stock:
    """Parse, initialise and build. All ranks take part: the optimizer makes process groups."""
    from megatron.core.enums import ModelType
    from megatron.training import get_args, training

    _initialize(arguments)

    def provide_model(
        pre_process: bool = True, post_process: bool = True, **newer: Any
    ) -> torch.nn.Module:
        return gpt_model(
            pre_process, post_process, vocabulary_size=vocabulary_size, positions=positions
        )

    chunks, optimizer, scheduler = training.setup_model_and_optimizer(
        model_provider_func=provide_model, model_type=ModelType.encoder_or_decoder
    )
    return Stock(args=get_args(), chunks=chunks, optimizer=optimizer, scheduler=scheduler)


def gpt_model(
    pre_process: bool, post_process: bool, *, vocabulary_size: int, positions: int
) -> torch.nn.Module:
    """A decoder of Megatron's local layers, configured by Megatron's global arguments."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    model: torch.nn.Module = GPTModel(
        config=core_transformer_config_from_args(args),
        # Without Apex the local spec falls back to torch's own RMSNorm, which needs the
        # normalization named here and no persistent kernel.
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=vocabulary_size,
        max_sequence_length=positions,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=False,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
    )
    return model


def _initialize(arguments: Sequence[str]) -> None:
    """Megatron reads its arguments from `sys.argv` and nowhere else."""
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
