"""For reproductions: what a Megatron trainer of ms-swift is to its own methods."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from . import _standins


def trainer(method: str, options: Sequence[str]) -> Any:
    """A stand-in for a trainer, with ms-swift's own `method` as `call`.

    Args:
        method: of `BaseMegatronTrainer`.
        options: Megatron's, as on a command line.
    """
    from megatron_idempotent.cpu import program

    running = program.start(options)
    running.args.is_multimodal = running.args.nccl_comm_warmup = False
    module = _standins.import_alone(
        "swift.megatron.trainers.base", "mcore_bridge", "modelscope", "transformers"
    )
    made = SimpleNamespace(
        args=running.args,
        config=running.config,
        optimizer=running.optimizer,
        state=SimpleNamespace(iteration=running.args.train_iters),
        wrapped_models=running.chunks,
        call_event=lambda name: None,
        _prepare_data_iterator=lambda *datasets: (None, None),
    )
    made.call = lambda *args: getattr(module.BaseMegatronTrainer, method)(made, *args)
    return made
