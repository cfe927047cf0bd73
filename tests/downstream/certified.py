"""Adapters with which `certify` judges frameworks, from sources given by a variable.

    NEMO_RL_SOURCE=… PYTHONPATH=.:tests/downstream megatron-idempotent certify certified:NemoRL

Legend: B rows, T positions.
"""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import Any

import torch

from megatron_idempotent import wire_train_config
from megatron_idempotent.proof.certify import Finished, Planted, Subject
from megatron_idempotent.proof.certify.adapters import SplitStep, microbatches

_EQUAL_SHARES = MappingProxyType(
    {
        "replica-without-rows": "the driver gives all replicas as many rows of a batch",
        "uneven-replicas": "the driver gives all replicas as many rows of a batch",
    }
)


def _failing(fail: bool) -> None:
    """Raise where the check asks for a loss that fails."""
    if fail:
        raise Planted("the loss fails, as the check asks")


def _adapter(name: str, adapted: bool) -> Any:
    """Load `examples/NAME_step.py`, if the worker is to have it."""
    from adapters import adapter

    return adapter(name) if adapted else None


class _WholeStep:
    """Collects the rows of a step, for a loop that has no call that only adds."""

    cannot = _EQUAL_SHARES
    subject: Subject

    def begin(self) -> None:
        self.rows: list[Any] = []
        self.fail = False

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        self.rows += microbatches(self.subject, rows)
        self.fail = self.fail or fail  # one call that fails is enough: the step is taken later

    def abort(self) -> None:
        self.rows, self.fail = [], False


class NemoRL:
    """NeMo-RL's policy worker: `begin_train_step`, `train_microbatch`, `finish_train_step`."""

    cannot = _EQUAL_SHARES
    sequences = True
    adapted = False

    def build(self, subject: Subject) -> None:
        from nemo_worker import NemoWorker, import_nemo_rl

        self.subject = subject
        import_nemo_rl(os.environ["NEMO_RL_SOURCE"])
        adapter = _adapter("nemo_rl", self.adapted)
        wire_train_config(subject.chunks, subject.optimizer)  # as Megatron-Bridge does
        ddp = subject.chunks[0].ddp_config
        ddp.check_for_nan_in_grad = True  # as its setup has it
        self.nemo = NemoWorker(
            adapter and adapter.SplitStepWorker,
            tp=subject.config.tensor_model_parallel_size,
            pp=subject.config.pipeline_model_parallel_size,
            sequence_parallel=subject.config.sequence_parallel,
            overlap_param_gather=ddp.overlap_param_gather,
            distributed_optimizer=ddp.use_distributed_optimizer,
        )
        worker = self.worker = self.nemo.worker
        (worker.model,) = subject.chunks
        worker.optimizer = subject.optimizer
        worker.cfg["train_micro_batch_size"] = subject.micro_batch_size
        worker.cfg["logprob_batch_size"] = subject.micro_batch_size
        worker.cfg["megatron_cfg"]["sequence_parallel"] = subject.config.sequence_parallel
        worker.offload_optimizer_for_refit = worker.offload_optimizer_for_logprob = True

    def begin(self) -> None:
        if self.subject.loss_kind == "sequence":
            self.loss = _of_sequences()
        else:
            self.loss = _of_tokens()
        self.loss.fail = False
        self.worker.begin_train_step(self.loss)

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        self.loss.fail = fail
        try:
            # As its driver does before each chunk: log-probs leave the model in eval mode.
            self.worker.prepare_for_training()
            self.worker.train_microbatch(self.data(rows))
        finally:
            self.loss.fail = False

    @staticmethod
    def data(rows: Any) -> Any:
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict

        number, length = rows["input_ids"].shape
        return BatchedDataDict(
            {
                **{name: value.clone() for name, value in rows.items()},
                "input_lengths": torch.full((number,), length),
            }
        )

    def finish(self) -> Finished:
        found = self.worker.finish_train_step()
        return Finished(grad_norm=float(found["grad_norm"]))

    def abort(self) -> None:
        self.worker.abort_train_step()

    def logprobs(self, rows: Any) -> Any:
        found = self.worker.get_logprobs(data=self.data(rows))
        return found["logprobs"].roll(-1, 1)  # those of each token itself

    def offload(self) -> None:
        self.worker.offload_before_refit()
        self.worker.offload_after_refit()

    def onload(self, *, training: bool = True) -> None:
        if training:
            self.worker.prepare_for_training()
        else:
            self.worker.prepare_for_lp_inference()


def _of_tokens() -> Any:
    """Make NeMo-RL's loss of supervised learning, a mean over tokens."""
    from nemo_rl.algorithms.loss.loss_functions import NLLLossFn

    class Loss(NLLLossFn):  # type: ignore[misc, valid-type]
        def __call__(self, *, data: Any, **others: Any) -> Any:
            _failing(self.fail)
            scaled = dict(data)
            scaled["token_mask"] = data["token_mask"] * data["scale"][:, None]
            return super().__call__(data=scaled, **others)

    return Loss()


def _of_sequences() -> Any:
    """Make NeMo-RL's policy gradient loss of sequences; with advantages of 1 it is of -log p."""
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

    class Loss(ClippedPGLossFn):  # type: ignore[misc, valid-type]
        def __call__(self, next_token_logprobs: Any, data: Any, **others: Any) -> Any:
            _failing(self.fail)
            known_BT = torch.zeros_like(data["token_mask"])
            policy = {
                "advantages": data["scale"][:, None].expand_as(known_BT),
                "prev_logprobs": known_BT,
                "generation_logprobs": known_BT,
            }
            return super().__call__(next_token_logprobs, data={**data, **policy}, **others)

    config = {"disable_ppo_ratio": True, "reference_policy_kl_penalty": 0.0}
    return Loss(ClippedPGLossConfig(token_level_loss=False, **config))


class NemoRLOnTrainStep(NemoRL):
    """The same worker with the adapter of `examples/nemo_rl_step.py`."""

    adapted = True


class Verl(_WholeStep):
    """verl's engine: `train_batch` over all rows so far, since it has no call that only adds."""

    config_overrides = {  # noqa: RUF012
        "calculate_per_token_loss": False,
        "moe_token_dispatcher_type": "alltoall",
        "variable_seq_lengths": True,
    }
    balance_mean = True
    adapted = False

    def __init__(self) -> None:
        """Import verl before Megatron, as its program does."""
        from verl_worker import modules

        modules(os.environ["VERL_SOURCE"])

    def build(self, subject: Subject) -> None:
        from verl_worker import VerlWorker

        adapter = _adapter("verl", self.adapted)
        self.verl = VerlWorker(os.environ["VERL_SOURCE"], adapter, subject=subject)

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        self.rows.append(rows)
        self.fail = self.fail or fail

    def finish(self) -> Finished:
        from verl_worker import Data

        from megatron_idempotent.proof.certify.oracle import counted

        together = {n: torch.cat([each[n] for each in self.rows]) for n in self.rows[0]}
        data = Data(
            input_ids=together["input_ids"], loss_mask=counted(together), scale=together["scale"]
        )
        found = self.verl.engine.train_batch(data, self.loss)
        norm = found.get("metrics", {}).get("grad_norm") if isinstance(found, dict) else None
        return Finished(grad_norm=None if norm is None else float(norm))

    def loss(self, model_output: Any, data: Any, dp_group: Any) -> Any:
        _failing(self.fail)
        scaled = {"log_probs": model_output["log_probs"] * data["scale"][:, None]}
        return self.verl.loss(scaled, data, dp_group)

    def offload(self) -> None:
        self.verl.wiring.offload_megatron_model_to_cpu(self.verl.engine.module)
        self.verl.wiring.offload_megatron_optimizer(self.verl.engine.optimizer)

    def onload(self, *, training: bool = True) -> None:
        self.verl.wiring.load_megatron_model_to_gpu(self.verl.engine.module, load_grad=training)
        if training:
            self.verl.wiring.load_megatron_optimizer(self.verl.engine.optimizer)


class VerlPerToken(Verl):
    """The same engine where Megatron sums, as Megatron-Bridge has it under context parallelism."""

    config_overrides = {**Verl.config_overrides, "calculate_per_token_loss": True}  # noqa: RUF012


class VerlOnTrainStep(Verl):
    """The same engine with the adapter of `examples/verl_step.py`."""

    adapted = True

    def abort(self) -> None:
        super().abort()
        self.verl.engine.schedule.abort()  # verl itself has nothing to call


class SkyRL:
    """SkyRL's worker: calls of `forward_backward`, then `optim_step`.

    Its clients divide by the step's tokens in advance, in the weight of each token. Here their
    number is known after the last call, and the sum of gradients is divided before the update.
    """

    cannot = MappingProxyType(
        {"abort-and-retry": "the worker has no call that drops the calls of an open step"}
    )
    config_overrides = {"calculate_per_token_loss": False}  # noqa: RUF012
    adapted = False

    def build(self, subject: Subject) -> None:
        from skyrl_worker import SkyWorker, modules

        source = os.environ["SKYRL_SOURCE"]
        modules(source)
        self.sky = SkyWorker(source, _adapter("skyrl", self.adapted), subject=subject)
        self.chunks = subject.chunks
        self.sky.model.cfg.algorithm.policy_loss_type = "cross_entropy"
        self.sky.model.policy_loss_fn = self.loss
        strategy = self.sky.worker.strategy
        self.theirs, strategy.optimizer_step = strategy.optimizer_step, self.optimizer_step
        self.fail = False

    def begin(self) -> None:
        self.count = torch.zeros(())

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        self.fail = fail
        length = rows["input_ids"].shape[1]
        mask_BT = rows["token_mask"] * rows["sample_mask"][:, None]
        self.count += mask_BT[:, 1:].sum()
        self.sky.call(
            length - 1,
            sequences=rows["input_ids"],
            attention_mask=torch.ones_like(rows["input_ids"]),
            loss_mask=mask_BT[:, 1:] * rows["scale"][:, None],
        )

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        _failing(self.fail)
        return self.sky.losses.get("cross_entropy")(*args, **kwargs)

    def finish(self) -> Finished:
        return Finished(grad_norm=self.sky.worker.optim_step())

    def divide(self) -> None:
        from megatron.core import parallel_state

        torch.distributed.all_reduce(self.count, group=parallel_state.get_data_parallel_group())
        for chunk in self.chunks:
            chunk.scale_gradients(1 / self.count.clamp(min=1))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        self.divide()  # now, for with overlap reductions run until `optim_step` waits for them
        return self.theirs(*args, **kwargs)

    def abort(self) -> None:
        """SkyRL has nothing to call."""


class SkyRLOnTrainStep(SkyRL):
    """The same worker with the adapter of `examples/skyrl_step.py`."""

    cannot = MappingProxyType({})
    adapted = True

    def build(self, subject: Subject) -> None:
        super().build(subject)
        theirs = subject.config.finalize_model_grads_func

        def divided(*args: Any, **kwargs: Any) -> None:
            theirs(*args, **kwargs)
            self.divide()

        subject.config.finalize_model_grads_func = divided

    def abort(self) -> None:
        self.sky.model.schedule.abort()


class Slime(_WholeStep):
    """slime's `train`: a rollout of one step over all rows so far."""

    def __init__(self) -> None:
        """Import slime before Megatron, as its program does."""
        from slime_worker import modules

        modules(os.environ["SLIME_SOURCE"])

    def build(self, subject: Subject) -> None:
        from slime_worker import SlimeWorker

        self.subject = subject
        subject.chunks[0].ddp_config.check_for_nan_in_grad = True  # as Megatron's arguments have it
        self.slime = SlimeWorker(os.environ["SLIME_SOURCE"], subject, self.loss)

    def loss(self, sft: Any, args: Any, batch: Any, logits: Any, sum_of_sample_mean: Any) -> Any:
        _failing(self.fail)
        lengths = torch.tensor(batch["response_lengths"])
        scale = batch["scale"].repeat_interleave(lengths)
        return sft(args, batch, logits, lambda each: sum_of_sample_mean(each * scale))

    def finish(self) -> Finished:
        from megatron.core import parallel_state
        from slime_worker import batch

        replicas = parallel_state.get_data_parallel_world_size()
        found = self.slime.train(
            [batch(each) for each in self.rows],
            replicas * self.subject.micro_batch_size * len(self.rows),
        )
        return Finished(grad_norm=found.get("train/grad_norm"), loss=found.get("train/loss"))


class Bridge(_WholeStep):
    """Megatron-Bridge's `train_step` over all rows so far."""

    def __init__(self) -> None:
        """Import Megatron-Bridge before Megatron, as its program does."""
        from bridge_worker import modules

        modules(os.environ["BRIDGE_SOURCE"])

    def build(self, subject: Subject) -> None:
        from bridge_worker import BridgeWorker

        self.subject = subject
        subject.chunks[0].ddp_config.check_for_nan_in_grad = True  # as its recipes have it
        self.bridge = BridgeWorker(os.environ["BRIDGE_SOURCE"], subject, self.forward_step)

    def low_rank(self, module: Any, *, rank: int, magnitudes: bool) -> None:
        """Put Bridge's own layers in; it cuts the rank, and its DoRA raises in experts."""
        from megatron.core import parallel_state
        from megatron_idempotent.patches.frameworks import _peft

        ranks = parallel_state.get_expert_tensor_parallel_world_size()
        size = max(rank, ranks, parallel_state.get_tensor_model_parallel_world_size())
        layers = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
        if magnitudes and module.config.num_moe_experts:
            del layers[2:]
        kind = "DoRA" if magnitudes else "LoRA"
        _peft.bridge(kind, dim=size, alpha=2 * size, target_modules=layers)(module)

    def forward_step(self, data: Any, chunk: Any) -> Any:
        from megatron_idempotent.proof.certify.oracle import counted

        rows = next(data)

        def loss(output: Any) -> Any:
            _failing(self.fail)
            scaled_BT = output * rows["scale"][:, None]
            return self.bridge.losses.masked_next_token_loss(counted(rows), scaled_BT)

        return self.subject.forward(chunk, rows), loss

    def finish(self) -> Finished:
        metrics, skipped, _, _, _, norm, *_ = self.bridge.take(self.rows)
        loss = metrics.get("lm loss")
        return Finished(
            updated=not skipped,
            grad_norm=None if norm is None else float(norm),
            loss=None if loss is None else float(loss),
        )


class BridgeLayers(SplitStep):
    """`TrainStep` of a model with Megatron-Bridge's layers of adapters."""

    low_rank = Bridge.low_rank

    def __init__(self) -> None:
        """Import Megatron-Bridge before Megatron, as its program does."""
        from bridge_worker import modules

        modules(os.environ["BRIDGE_SOURCE"])
