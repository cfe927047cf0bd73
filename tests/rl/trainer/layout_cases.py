"""A small run that notes, on each rank, what another layout must have in common with it."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from megatron_idempotent.rl.trainer.config import load_config
from megatron_idempotent.rl.trainer.output import prepare

SMALL = (
    "run.rollouts=2",
    "run.checkpoint_every=1",
    "model.layers=4",
    "model.hidden=32",
    "model.ffn=32",
    "model.expert_ffn=16",
    "rollout.prompts=4",
    "rollout.group_size=6",
    "optimizer.steps_per_rollout=1",
    "optimizer.microbatches_per_step=2",
    "optimizer.warmup_steps=0",
    "evaluation.prompts=5",
    "evaluation.every=1",
    "loss.old_logprobs=recomputed",
    "loss.correction=truncate",
)


def job_for(out, *overrides, resume=False):
    config = load_config(overrides=[*SMALL, f"run.out={out}", *overrides])
    return prepare(config, resume=resume, quiet=True)


@dataclasses.dataclass(kw_only=True, slots=True)
class Noted:
    """Collects what a rank saw. Example: `Noted().engine[0]`."""

    engine: dict[int, dict[str, str]] = dataclasses.field(default_factory=dict)
    """Hashes of what the rank's engine serves, by name, after each update."""
    saved: dict[str, str] = dataclasses.field(default_factory=dict)
    """The same of the Hugging Face checkpoint that the run leaves."""
    batch: Any = None
    """The first rollout's."""
    policy: Any = None
    """Log-probs of the first rollout's batch, before training."""
    reference: Any = None
    reference_later: Any = None
    """The same before the second rollout's training."""
    policy_later: Any = None
    row_norms: Any = None
    """Norm of the gradient of each row's loss, not normalized; of one rank that has them all."""


def hashes(tensors):
    return {
        name: hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


def run_and_note(job, *, with_row_norms=False):
    """Runs on a rank: a whole run."""
    from megatron_idempotent.rl.engines.transformers import _load
    from megatron_idempotent.rl.engines.transformers_weights import ServedWeights
    from megatron_idempotent.rl.trainer import launch
    from megatron_idempotent.rl.trainer.engines import Engines
    from megatron_idempotent.rl.trainer.policy import MegatronPolicy

    noted = Noted()
    publish, train = Engines.publish, MegatronPolicy.train

    def noting_publish(self, version):
        publish(self, version)
        served = {}
        for engine in self._engines:
            served |= hashes(engine._updates._weights._tensors)
        noted.engine[version] = served

    def noting_train(self, batch, *, index):
        if index == 0:
            noted.batch = batch
            noted.policy = self.logprobs(batch, "policy")
            noted.reference = self.logprobs(batch, "reference")
            if with_row_norms:
                noted.row_norms = row_norms(self, batch, noted.reference)
        if index == 1 and noted.batch is not None:
            noted.policy_later = self.logprobs(noted.batch, "policy")
            noted.reference_later = self.logprobs(noted.batch, "reference")
        return train(self, batch, index=index)

    Engines.publish, MegatronPolicy.train = noting_publish, noting_train
    launch.run_rank(job)
    noted.saved = hashes(ServedWeights(_load(job.out / "model", None))._tensors)
    return noted


def row_norms(policy, batch, proximal_BT):
    import torch

    from megatron_idempotent.rl.trainer.loss import corrected

    batch = dataclasses.replace(batch, reference_logprobs_BT=proximal_BT)
    batch, _ = corrected(batch, proximal_BT, policy._config.loss)
    norms = []
    for row in range(len(batch)):
        step_id = policy.begin()
        policy.microbatch(step_id, batch.rows(torch.tensor([row])))
        squares = [
            parameter.main_grad.double().square().sum()
            for chunk in policy.stock.chunks
            for parameter in chunk.parameters()
        ]
        norms.append(float(sum(squares) ** 0.5))
        policy.abort(step_id)
    return norms
