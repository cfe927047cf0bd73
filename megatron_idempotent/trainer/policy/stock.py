"""A model and its optimizer, built the way every `megatron.training` program builds them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import torch

from megatron_idempotent.models import Architecture, build_gpt


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stock:
    """Results of `setup_model_and_optimizer`. Example: `Stock(args=args, chunks=[ddp], ...)`.

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


def build_stock(arguments: Sequence[str], arch: Architecture, *, positions: int) -> Stock:
    """Parse, initialise and build. All ranks take part: the optimizer makes process groups."""
    from megatron.core.enums import ModelType
    from megatron.training import get_args, training

    _initialize(arguments)

    def provide_model(
        pre_process: bool = True, post_process: bool = True, **newer: Any
    ) -> torch.nn.Module:
        return gpt_model(arch, pre_process, post_process, positions=positions)

    chunks, optimizer, scheduler = training.setup_model_and_optimizer(
        model_provider_func=provide_model, model_type=ModelType.encoder_or_decoder
    )
    return Stock(args=get_args(), chunks=chunks, optimizer=optimizer, scheduler=scheduler)


def gpt_model(
    arch: Architecture, pre_process: bool, post_process: bool, *, positions: int
) -> torch.nn.Module:
    """The checkpoint's decoder, configured by Megatron's global arguments; random weights."""
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    model: torch.nn.Module = build_gpt(
        arch,
        core_transformer_config_from_args(get_args()),
        pre_process=pre_process,
        post_process=post_process,
        max_positions=positions,
        parallel_output=False,
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
