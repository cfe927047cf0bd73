"""A rank's policy and what it was made from, as the job says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import megatron_idempotent
from megatron_idempotent.trainer.job import INITIAL, Job, data_path
from megatron_idempotent.trainer.policy.initial import ensure_checkpoint
from megatron_idempotent.trainer.policy.megatron import MegatronPolicy
from megatron_idempotent.trainer.task.prompts import PromptSet, read_prompts
from megatron_idempotent.trainer.task.tokenizer import (
    TextTokenizer,
    make_tokenizer,
    sequence_positions,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """Example: `start_policy(job).policy`."""

    policy: MegatronPolicy
    prompts: PromptSet
    tokenizer: TextTokenizer
    positions: int
    """Length of the training sequences in tokens."""
    checkpoint: Path
    """The Hugging Face one that the weights are from."""


def start_policy(job: Job) -> Started:
    """Patches applied, data read, model and optimizer built. Collective."""
    megatron_idempotent.apply()
    config = job.config
    prompts = read_prompts(data_path(config))
    tokenizer = make_tokenizer(config, prompts)
    positions = sequence_positions(
        prompts, tokenizer, max_response_tokens=config.rollout.max_response_tokens
    )
    if config.model.path:
        checkpoint = Path(config.model.path)
    else:
        checkpoint = ensure_checkpoint(
            job.out / INITIAL,
            config.model,
            tokenizer,
            seed=config.run.seed,
            positions=positions + 1,
        )
    return Started(
        policy=MegatronPolicy(config, checkpoint, positions=positions),
        prompts=prompts,
        tokenizer=tokenizer,
        positions=positions,
        checkpoint=checkpoint,
    )
