"""Put `SplitStepWorker` before `MegatronPolicyWorkerImpl`: NeMo-RL's split step on `TrainStep`."""

import torch
from megatron.core.parallel_state import get_context_parallel_rank
from nemo_rl.models.megatron.data import get_microbatch_iterator
from nemo_rl.models.megatron.train import LossPostProcessor, forward_with_post_processing_fn

from megatron_idempotent.step import TrainStep, valid_counts


class Loss:
    """Gives a loss function of NeMo-RL to `TrainStep`, with the denominators that it declares."""

    def __init__(self, loss_fn):
        self.kind = loss_fn.loss_type.value.removesuffix("_level")  # "token" or "sequence"
        named = getattr(loss_fn, "metric_normalizations", {})
        self.normalizers = {name: each.value for name, each in named.items()}

    def __call__(self, output, each):
        loss, metrics = each.loss_func(output)  # on each context-parallel rank, its part
        metrics.pop("loss", None)  # `TrainStep` reports the loss itself
        return loss, {} if get_context_parallel_rank() else metrics  # metrics cover entire rows


class SplitStepWorker:
    """Takes NeMo-RL's optimizer steps with `TrainStep`, in any number of microbatch calls."""

    def begin_train_step(self, loss_fn, gbs=None, mbs=None):
        if self._router_replay_enabled:
            raise NotImplementedError("SplitStepWorker: no router replay")
        if getattr(self, "step", None) is None:
            options = {"forward": self.forward, "counts": lambda each: valid_counts(each.data_dict)}
            parts = [self.model], self.optimizer, self.scheduler
            self.step = TrainStep(*parts, **options, nothing_valid="update")
        self.given = {"sampling_params": self.sampling_params, "draft_model": self.draft_model}
        self.processor = LossPostProcessor(loss_fn, self.cfg, cp_normalize=False, **self.given)
        cfg, fused = self.cfg["megatron_cfg"], "use_fused_linear_logprobs"
        self.given |= {fused: cfg.get(fused), "enable_hidden_capture": self.draft_model is not None}
        self.mbs = mbs or self.cfg["train_micro_batch_size"]
        self.step.begin(Loss(loss_fn), global_batch_size=gbs or self.cfg["train_global_batch_size"])

    def train_microbatch(self, data):
        if getattr(self._get_model_config(), "mtp_num_layers", None):  # as in `train`
            data["mtp_loss_mask"] = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        ready, *_ = get_microbatch_iterator(data, self.cfg, self.mbs, None)
        self.step.microbatch(self.step.open_step_id, microbatches=list(ready))

    def forward(self, model, each):
        ones = torch.ones(2, device="cuda")  # denominators of 1: `TrainStep` divides
        call = iter([each]), model, self.processor, self.defer_fp32_logits, *ones
        output, each.loss_func = forward_with_post_processing_fn(*call, **self.given)
        return output

    def finish_train_step(self):
        result = self.step.finish(self.step.open_step_id)
        rows = {k: [row[k] for row in result.replica_rows] for k in next(iter(result.rows), ())}
        norm = float("nan") if result.grad_norm is None else result.grad_norm  # overflow
        loss, norm = torch.tensor([[result.metrics.get("loss", 0.0)], [norm]])
        made = {"gpu_name": torch.cuda.get_device_name(), "model_dtype": self.dtype}
        return {"all_mb_metrics": rows, "global_loss": loss, "grad_norm": norm, **made}

    def abort_train_step(self):
        if getattr(self, "step", None) is not None:
            self.step.abort()
