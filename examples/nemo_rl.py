"""NeMo-RL's split step on `TrainStep`: `SplitStepWorker` goes before `MegatronPolicyWorkerImpl`."""

import torch
from megatron.core.parallel_state import get_context_parallel_world_size, get_data_parallel_rank
from nemo_rl.models.megatron.data import get_microbatch_iterator
from nemo_rl.models.megatron.train import LossPostProcessor, forward_with_post_processing_fn

from megatron_idempotent import TrainStep


class Loss:
    """A loss function of NeMo-RL's, unchanged, with what it says of its denominators."""

    def __init__(self, loss_fn):
        self.kind = loss_fn.loss_type.value.removesuffix("_level")  # "token" or "sequence"
        named = getattr(loss_fn, "metric_normalizations", {})
        self.normalizers = {name: each.value for name, each in named.items()}

    def __call__(self, output, each):
        loss, metrics = each["loss_func"](output)
        metrics.pop("loss", None)  # the step reports it
        return loss, metrics


class SplitStepWorker:
    """NeMo-RL's policy worker, whose step is the same in any number of chunks."""

    def begin_train_step(self, loss_fn, gbs=None, mbs=None):
        if not hasattr(self, "step"):
            options = {"shape": lambda each: each["size"][::2], "nothing_valid": "update"}
            parts = [self.model], self.optimizer, self.scheduler
            self.step = TrainStep(*parts, forward=self.forward, **options)
        if self._router_replay_enabled or get_context_parallel_world_size() > 1:
            raise NotImplementedError("SplitStepWorker: no router replay or context parallelism")
        self.options = {"sampling_params": self.sampling_params, "draft_model": self.draft_model}
        self.processor = LossPostProcessor(loss_fn, self.cfg, **self.options)
        self.options["enable_hidden_capture"] = self.draft_model is not None
        fused = self.cfg["megatron_cfg"].get("use_fused_linear_logprobs", False)
        self.options["use_fused_linear_logprobs"] = fused
        self.mbs = mbs or self.cfg["train_micro_batch_size"]
        self.step.begin(Loss(loss_fn), global_batch_size=gbs or self.cfg["train_global_batch_size"])

    def train_microbatch(self, data):
        chunk, number, *size = get_microbatch_iterator(data, self.cfg, self.mbs, None)
        samples_B, tokens_BT = data["sample_mask"], data["token_mask"][:, 1:]
        valid = torch.stack((samples_B.sum(), (tokens_BT * samples_B[:, None]).sum()))
        ready = [{"chunk": chunk, "size": size, "counts": valid * (i == 0)} for i in range(number)]
        self.step.microbatch(self.step.open_step_id, microbatches=ready)

    def forward(self, model, each):
        ones = 2 * [torch.ones((), device="cuda")]  # valid sequences and tokens: the step divides
        call = each["chunk"], model, self.processor, self.defer_fp32_logits, *ones
        output, each["loss_func"] = forward_with_post_processing_fn(*call, **self.options)
        return output

    def finish_train_step(self):
        result = self.step.finish(self.step.open_step_id)
        rows = [row for row in result.rows if row["replica"] == get_data_parallel_rank()]
        found = {"all_mb_metrics": {name: [row[name] for row in rows] for name in rows[0]}}
        loss, norm = result.metrics["loss"], result.grad_norm
        return {**found, "global_loss": torch.tensor([loss]), "grad_norm": torch.tensor([norm])}

    def abort_train_step(self):
        if hasattr(self, "step"):
            self.step.abort()
