"""Runs methods of ms-swift's Megatron trainer on a stand-in, for reproductions and tests."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from . import _standins
from ._workers import methods


def import_trainers() -> Any:
    """Import and return ms-swift's module of the Megatron trainer's base class.

    mcore-bridge, from which it takes the class of LoRA layers alone, is a stand-in also where it is
    installed: its import needs CUDA's Transformer Engine, and patches Megatron.
    """
    _standins.replace("mcore_bridge")
    return _standins.import_alone("swift.megatron.trainers.base", "modelscope", "transformers")


def trainer(options: Sequence[str]) -> Any:
    """Return an object with the methods of ms-swift's Megatron trainer, around a small model.

    Args:
        options: options of Megatron, as on a command line.
    """
    from megatron_idempotent.proof.cpu import program

    running = program.start(options)
    running.args.is_multimodal = running.args.nccl_comm_warmup = False
    return methods(
        import_trainers().BaseMegatronTrainer,
        args=running.args,
        config=running.config,
        optimizer=running.optimizer,
        state=SimpleNamespace(iteration=running.args.train_iters),
        wrapped_models=running.chunks,
        call_event=lambda name: None,
        _prepare_data_iterator=lambda *datasets: (None, None),
    )
