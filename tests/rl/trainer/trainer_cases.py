"""Small runs of the trainer, and what the tests of several files look at in them."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import pytest

from megatron_idempotent.patching.source import locate
from megatron_idempotent.rl.metrics.loggers import METRICS_FILE, read_metrics
from megatron_idempotent.rl.trainer import output
from megatron_idempotent.rl.trainer.config import load_config

needs_megatron_training = pytest.mark.skipif(
    locate("megatron.training.training") is None,
    reason="this release's wheel does not carry megatron.training",
)
TIMEOUT_S = 240.0
_TINY = ("model.hidden=32", "model.ffn=32")
#: Synchronous, on two ranks.
SYNC = (*_TINY, "rollout.prompts=8", "rollout.group_size=8", "evaluation.prompts=9")
#: Asynchronous, with weights that do not depend on time.
LAST = 6
ASYNC = (
    *_TINY,
    "run.mode=async",
    f"run.rollouts={LAST}",
    "run.checkpoint_every=2",
    "optimizer.steps_per_rollout=1",
    "rollout.prompts=4",
    "rollout.group_size=6",
    "evaluation.prompts=9",
    "evaluation.every=3",
    "controller.sampler=in_order",
    "controller.max_staleness=1",
    "controller.groups_per_call=2",
    "controller.call_timeout_s=8",
    "loss.old_logprobs=recomputed",
    "loss.correction=truncate",
    "loss.correction_high=2.0",
)
#: For all layouts of ranks.
SHARED = (
    *_TINY,
    "run.rollouts=2",
    "run.checkpoint_every=1",
    "model.layers=4",
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
    config = load_config(overrides=[f"run.out={out}", *overrides])
    return output.prepare(config, resume=resume, quiet=True)


def rows(job):
    """The metrics of a run by step, without what the clock decides."""
    timed = ("timing/", "rollouts/", "sync/")
    return {
        row["step"]: {name: value for name, value in row.items() if not name.startswith(timed)}
        for row in read_metrics(job.out / METRICS_FILE)
    }


def digest(job, done=LAST):
    """Return that of the weights in the checkpoint after so many rollouts or steps."""
    found = output.checkpoint_path(job.out / "checkpoints", done)
    return output.verify_checkpoint(found)["weights sha256"]


def start(job, prompts, positions):
    """Runs on a rank: the policy of a job, and the tokenizer of the prompts' words."""
    import megatron_idempotent
    from megatron_idempotent.rl.trainer.megatron_setup import ensure_checkpoint
    from megatron_idempotent.rl.trainer.policy import MegatronPolicy
    from megatron_idempotent.rl.trainer.task.tokenizer import TextTokenizer

    megatron_idempotent.apply()
    tokenizer = TextTokenizer.of_words(prompts)
    checkpoint = ensure_checkpoint(
        job.out / "initial", job.config.model, tokenizer, seed=1, positions=positions + 1
    )
    return MegatronPolicy(job.config, checkpoint, positions=positions), tokenizer, checkpoint


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
    from megatron_idempotent.rl.trainer.engines import Engines
    from megatron_idempotent.rl.trainer.loop import work
    from megatron_idempotent.rl.trainer.policy import MegatronPolicy

    noted = Noted()
    publish, train = Engines.publish, MegatronPolicy.train

    def noting_publish(self, version):
        published = publish(self, version)
        served = {}
        for engine in self._engines:
            served |= hashes(engine._updates._weights._tensors)
        noted.engine[version] = served
        return published

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
    work(job)
    noted.saved = hashes(ServedWeights(_load(job.out / "model", None))._tensors)
    return noted


def row_norms(policy, batch, proximal_BT):
    import torch

    from megatron_idempotent.rl.trainer.loss import with_logprobs

    logprobs = {"policy": proximal_BT, "reference": proximal_BT}
    batch, _ = with_logprobs(batch, logprobs, policy.config.loss)
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
        policy.step.abort(step_id)
    return norms
