"""slime's own `train()` on a rank, with its own loss and metrics; its batches are rows.

Legend: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from adapters import import_from
from megatron_idempotent.patches.frameworks import _rollouts, _standins

_REAL = (
    "backends.megatron_utils",  # with a recipe's lines, which have to come before Megatron
    "utils.ppo_utils",
    "backends.megatron_utils.cp_utils",
    "backends.megatron_utils.loss",
    "observability.train_metric_utils",
    "backends.megatron_utils.model",
)


def modules(source: str) -> tuple[Any, Any]:
    """Import slime's modules of the loss and of the loop, with all that they compute with."""
    imported = import_from(source, "slime", _REAL, "tqdm", "wandb")
    return imported["backends.megatron_utils.loss"], imported["backends.megatron_utils.model"]


class SlimeWorker:
    """slime around the chunks and the optimizer of `subject`; each rollout is one step.

    `loss` is slime's custom loss; slime's own loss of supervised training goes before its
    arguments. `batch(rows)` has what slime's `get_batch` would make of a microbatch.

    Example: `SlimeWorker(source, subject, lambda sft, *args: sft(*args)).train([rows], 2)`
    """

    def __init__(self, source: str, subject: Any, loss: Any) -> None:
        from megatron.training import global_vars

        self.subject, self.rollout = subject, 0
        self.losses, self.module = modules(source)
        ddp, config = subject.chunks[0].ddp_config, subject.config
        self.args = SimpleNamespace(
            **_rollouts.OPTIONS,
            align_grad_reduce=True,
            align_param_gather=False,
            calculate_per_token_loss=config.calculate_per_token_loss,
            custom_loss_function_path="loss",
            decoder_seq_length=None,
            log_probs_chunk_size=-1,
            loss_type="custom_loss",
            manual_gc=False,
            micro_batch_size=subject.micro_batch_size,
            overlap_grad_reduce=ddp.overlap_grad_reduce,
            overlap_param_gather=ddp.overlap_param_gather,
            recompute_loss_function=False,
            rollout_temperature=1.0,
            use_distributed_optimizer=ddp.use_distributed_optimizer,
        )
        global_vars.set_args(self.args)
        self.losses.load_function = lambda _: partial(loss, self.losses.sft_loss_function)
        theirs = self.losses.loss_function
        # Its models return the logits of a pack, in float32.
        self.module.loss_function = lambda *args: theirs(
            *args[:-1], args[-1].float().flatten(0, 1)[None]
        )
        self.module.tqdm = MagicMock()  # no progress bars
        self.module.get_batch = lambda data, *_: next(data)
        self.module.logging_utils = self
        for chunk in subject.chunks:
            chunk.module.register_forward_pre_hook(_rollouts.with_positions, with_kwargs=True)

    def train(self, batches: list[Mapping[str, Any]], rows: int) -> dict[str, float]:
        """Run one rollout over these microbatches, of `rows` rows on all replicas; return its log.

        All ranks take part; those that do not log return an empty dictionary.
        """
        self.logged: dict[str, float] = {}
        self.args.seq_length = batches[0]["tokens"].shape[1]
        self.module.train(
            rollout_id=self.rollout,
            model=self.subject.chunks,
            optimizer=self.subject.optimizer,
            opt_param_scheduler=_standins.Thing(),
            data_iterator=[_rollouts.Data(batches) for _ in self.subject.chunks],
            num_microbatches=[len(batches)],
            global_batch_sizes=[rows],
        )
        self.rollout += 1
        return self.logged

    def log(self, _: Any, values: dict[str, float], **__: Any) -> None:
        """Stand for slime's module of trackers."""
        self.logged = values


def batch(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Make of rows what slime's `get_batch` makes of them, if they were one pack."""
    tokens_BT = rows["input_ids"]
    number, length = tokens_BT.shape
    mask_BT = rows["token_mask"] * rows["sample_mask"][:, None]
    return {
        "tokens": tokens_BT,
        "unconcat_tokens": [*tokens_BT],
        "total_lengths": [length] * number,
        "response_lengths": [length - 1] * number,
        "loss_masks": [*mask_BT[:, 1:].int()],
        "scale": rows["scale"],
        **dict.fromkeys(
            ("full_loss_masks", "multimodal_train_inputs", "packed_seq_params", "rollout_mask_sums")
        ),
    }
