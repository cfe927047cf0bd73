"""Runs rollouts through the `train()` of slime and of its fork miles, for reproductions.

The loop is the framework's own, from the module on the path, around a program of Megatron's. Its
data, loss, logging and checkpoint modules are stand-ins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_idempotent.patches._case import Broken

from . import _standins
from ._workers import MICROBATCHES, target_logprobs

# Options that the frameworks' own parsers add to Megatron's arguments; all are off.
_OFF = (
    *("allgather_cp", "ci_load_grad_norm", "ci_save_grad_norm", "ci_test"),
    "custom_megatron_before_log_prob_hook_path",
    "custom_megatron_before_train_step_hook_path",
    *("debug_disable_optimizer", "enable_mtp_training", "enable_witness"),
    *("reset_optimizer_states", "save_debug_train_data", "use_dynamic_batch_size"),
    *("use_rollout_entropy", "use_wandb"),
)
OPTIONS: dict[str, Any] = {
    **dict.fromkeys(_OFF),
    **dict.fromkeys(("data_pad_size_multiplier", "n_samples_per_prompt", "rollout_batch_size"), 1),
    "qkv_format": "thd",
    "rollout_top_p": 1.0,
}


class Rollouts:
    """Runs rollouts through the `train()` of slime or miles around a small Megatron program.

    Args:
        framework: `slime` or `miles`.
        options: options of Megatron, as on a command line.

    Example:
        rollouts = Rollouts("slime", ["--overlap-grad-reduce"])
        rollouts.train(2, first=0)
        rollouts.train(2, first=2)
    """

    def __init__(self, framework: str, options: Sequence[str] = (), **layout: Any) -> None:
        from megatron_idempotent.proof.cpu import program

        # The frameworks do not initialise the rerun state machine; created on demand it is
        # disabled.
        self.program = program.start(["--rerun-mode", "disabled", *options], **layout)
        self.module = _standins.import_alone(
            f"{framework}.backends.megatron_utils.model", framework, "tqdm", "wandb"
        )
        self.losses: list[float] = []
        """The loss of every microbatch, over all rollouts."""
        self.norms: list[float] = []
        """The norm of every step, on the ranks that log."""
        self.fail_at: int | None = None
        """The number, over all rollouts, of the microbatch whose data cannot be read."""
        self._rollout = 0
        self._read = 0
        self._batches: list[Any] = []
        vars(self.program.args).update(OPTIONS | vars(self.program.args))
        self._stand_in(framework)
        for chunk in self.program.chunks:
            chunk.module.register_forward_pre_hook(with_positions, with_kwargs=True)

    def train(self, steps: int, *, first: int) -> None:
        """Run one rollout, i.e. one call of `train()`, over the data of `steps` steps from `first`.

        All ranks take part. The same step has the same data in every call.
        """
        rollout_id, self._rollout = self._rollout, self._rollout + 1
        _standins.call(
            self.module.train,
            rollout_id=rollout_id,
            model=self.program.chunks,
            optimizer=self.program.optimizer,
            opt_param_scheduler=self.program.scheduler,
            data_iterator=self._data(first, steps),
            num_microbatches=[MICROBATCHES] * steps,
            global_batch_sizes=[MICROBATCHES] * steps,
            num_rollouts=[MICROBATCHES] * steps,
            witness_info=None,
            attempt=0,
        )

    def infer(self, *, first: int) -> None:
        """Compute the log-probs of step `first`'s data by one call of slime's `forward_only()`."""
        import torch

        with torch.no_grad():
            self.module.forward_only(
                lambda output, **_: (torch.zeros(()), {"log_probs": [output]}),
                self.program.args,
                self.program.chunks,
                self._data(first, 1),
                [MICROBATCHES],
            )

    def _data(self, first: int, steps: int) -> list[Data]:
        """Return the list with one data iterator for `steps` steps from step number `first` on."""
        stop = (first + steps) * MICROBATCHES
        while len(self._batches) < stop:
            self._batches.append(next(self.program.data[0]))
        return [Data(self._batches[first * MICROBATCHES : stop])]

    def _stand_in(self, framework: str) -> None:
        from unittest.mock import MagicMock

        module = self.module
        if hasattr(module, "tqdm"):
            module.tqdm = MagicMock()  # no progress bars between the findings of `prove`
        module.get_batch = self._get_batch
        module.loss_function = self._loss
        for name in ("train_metric_utils", "logging_utils", "tracking_utils", "wandb"):
            if hasattr(module, name):
                setattr(module, name, _Reports(self))
        if hasattr(module, "finalize_model_grads_with_empty_cache"):
            # This replacement would only free memory of the device, which does not exist here.
            module.finalize_model_grads_with_empty_cache = module.finalize_model_grads
        if framework == "miles":
            module.get_parallel_state.return_value.indep_dp.size = 1
            module.is_multi_lora_enabled.return_value = False
            module.is_first_replica_megatron_main_rank.return_value = False
            module.get_packed_seq_params.return_value = None
            module.DumperMegatronUtil.wrap_forward_step = lambda self, function: function

    def _get_batch(self, data: Any, *_: Any, **__: Any) -> dict[str, Any]:
        self._read += 1
        if self._read == self.fail_at:
            raise Broken("a microbatch that cannot be read")
        tokens_BT, _, _ = next(data)
        return {
            "tokens": tokens_BT,
            **dict.fromkeys(("multimodal_train_inputs", "packed_seq_params", "full_loss_masks")),
            **dict.fromkeys(("unconcat_tokens", "total_lengths", "response_lengths")),
        }

    def _loss(self, args: Any, batch: Any, *more: Any, **_: Any) -> tuple[Any, Any, dict[str, Any]]:
        import torch

        loss = -target_logprobs(more[-1], batch["tokens"]).mean()
        self.losses.append(float(loss))
        values = torch.stack([torch.ones(()), loss.detach()])
        return loss, torch.tensor(1), {"keys": ["loss"], "values": values}


def run_twice(framework: str) -> None:
    """Run two rollouts of one step each through the `train()` of slime or miles.
    Gradient reductions overlap.
    """
    # With --overlap-param-gather the second one also meets `forward-pre-hook-reentry`.
    rollouts = Rollouts(framework, ["--overlap-grad-reduce"])
    rollouts.train(1, first=0)
    rollouts.train(1, first=1)


def with_positions(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Forward pre-hook: pass a model position ids and a causal mask, and drop its `loss_mask`.
    slime and miles pass neither ids nor mask: models with rotary embeddings need none.
    """
    import torch

    kwargs.pop("loss_mask", None)
    tokens_BT = kwargs["input_ids"]
    length = tokens_BT.shape[1]
    causal_mask = torch.ones(1, 1, length, length).tril() < 0.5
    positions_BT = torch.arange(length).expand_as(tokens_BT)
    return args, kwargs | {"position_ids": positions_BT, "attention_mask": causal_mask}


class Data:
    """Iterates over a rollout's batches; after `reset()` it starts again from the first batch."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches
        self.reset()

    def reset(self) -> None:
        self._rest = iter(self._batches)

    def __next__(self) -> Any:
        return next(self._rest)


class _Reports:
    """Stands in for slime's and miles' metrics and logging; keeps each step's gradient norm."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    def reduce_train_step_metrics(self, losses: Any, **_: Any) -> dict[str, float]:
        return {"loss": float(losses[0]["values"][1])}

    def log(self, *args: Any, **_: Any) -> None:
        values = next(value for value in args if isinstance(value, dict))
        self._rollouts.norms.append(float(values["train/grad_norm"]))
