"""A small asynchronous run whose weights do not depend on time."""

from __future__ import annotations

from megatron_idempotent.rl.trainer import checkpoint_dir
from megatron_idempotent.rl.trainer.config import load_config
from megatron_idempotent.rl.trainer.output import prepare

LAST = 6
SMALL = (
    "run.mode=async",
    f"run.rollouts={LAST}",
    "run.checkpoint_every=2",
    "optimizer.steps_per_rollout=1",
    "model.hidden=32",
    "model.ffn=32",
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


def job_for(out, *overrides, resume=False):
    config = load_config(None, [*SMALL, f"run.out={out}", *overrides])
    return prepare(config, resume=resume, quiet=True)


def digest(job, version=LAST):
    found = checkpoint_dir.path_for(job.out / "checkpoints", version)
    return checkpoint_dir.verify(found)["weights sha256"]
