"""The engine's log-probs against those of the training forward, on a rank."""

from __future__ import annotations

from trainer_cases import SYNC, start

from megatron_idempotent.rl.trainer.task.prompts import Prompt

SETTINGS = (
    *SYNC,
    "rollout.temperature=0.7",
    "rollout.group_size=4",
    "rollout.prompts=16",
    "rollout.max_response_tokens=5",
    "model.init_std=0.4",
)
# Several lengths of prompt, in mixed order.
TEXTS = ("a b c d", "b a", "c c d a", "d b", "a a a b", "b c", "d d c b", "c a")


def compare_sampling_with_training(job, make=None):
    """Runs on a rank: one update, then the engine's log-probs against the training forward's.

    `make` takes the place of `make_engines`.
    """
    import torch

    import megatron_idempotent
    from megatron_idempotent.rl.trainer.batch import pack_rows
    from megatron_idempotent.rl.trainer.checkpoint import weights_digest
    from megatron_idempotent.rl.trainer.engines import make_engines
    from megatron_idempotent.rl.trainer.rewards import make_requests
    from megatron_idempotent.step import gpt_forward

    prompts = [
        Prompt(row=row, text=text, answer=text, split="train") for row, text in enumerate(TEXTS)
    ]
    config, positions, temperature = job.config, 9, job.config.rollout.temperature
    policy, tokenizer, _ = start(job, prompts, positions)
    engines = (make or make_engines)(job, policy)

    def drawn(prompts, stream):
        requests = [
            make_requests(config, tokenizer, each, stream=stream, samples=4) for each in prompts
        ]
        found = iter(engines.generate([request for each in requests for request in each]))
        return [[next(found) for _ in each] for each in requests]

    def as_batch(groups):
        rows = [
            (tokenizer.encode_prompt(prompt.text), sample, advantage)
            for prompt, samples in zip(prompts, groups, strict=True)
            for sample, advantage in zip(samples, (1.0, -1.0, 0.5, -0.5), strict=True)
        ]
        return pack_rows(rows, positions=positions, pad_id=tokenizer.pad_id)

    def publish(version):
        with policy.weights():
            engines.publish(version)

    publish(0)
    policy.train(as_batch(drawn(prompts, 0)), index=0)
    publish(1)
    groups = drawn(prompts, 1)
    alone = drawn(prompts[2:3], 1)
    engines.close()
    batch = as_batch(groups)
    with policy.weights() as modules, torch.no_grad():
        logits_BTV = gpt_forward(modules[0], {"input_ids": batch.tokens_BT})
        trained_BT = megatron_idempotent.token_logprobs(
            logits=logits_BTV, targets=batch.targets_BT, temperature=temperature
        ).logprob
    response_BT = batch.loss_mask_BT > 0
    return {
        "weights": weights_digest(modules),
        "training": modules[0].training,
        "largest gap": float((trained_BT - batch.old_logprobs_BT)[response_BT].abs().max()),
        "largest logit": float(logits_BTV.abs().max()),
        "spread": float(batch.old_logprobs_BT[response_BT].std()),
        "same alone": [s.tokens for s in alone[0]] == [s.tokens for s in groups[2]],
        "order": [int(group[0].request_id.split("/")[1]) for group in groups],
        "versions": sorted({v for g in groups for s in g for v in s.versions}),
    }


def check(ranks, *, batched_alike=True):
    """Check what all ranks have seen; `batched_alike` if a batch does not change a sample."""
    for seen in ranks:
        # Both paths compute the same float32 sums in another order. A logit is a sum of 32 products
        # after two layers of such sums: some 200 roundings of 2^-24 relative to the largest logit,
        # divided by the temperature, twice (the logit, and the logarithm of the sum over V).
        bound = 2 * 200 * 2.0**-24 * max(seen["largest logit"], 1.0) / 0.7
        assert seen["largest gap"] < bound
        assert seen["spread"] > 0.1  # the policy is far from uniform, so the comparison says much
        assert seen["same alone"] or not batched_alike
        assert seen["order"] == list(range(8))
        assert seen["training"]
        assert seen["versions"] == [1]
    # No rank sampled from parameters that another one had already replaced.
    assert ranks[0]["weights"] == ranks[1]["weights"]


def write_other(out, shape):
    """Write a checkpoint of that shape with the weights of another seed."""
    from megatron_idempotent.rl.trainer.megatron_setup import write_checkpoint
    from megatron_idempotent.rl.trainer.task.tokenizer import TextTokenizer

    words = Prompt(row=0, text="a b c d", answer="a", split="train")
    tokenizer = TextTokenizer.of_words([words])
    write_checkpoint(out, shape, tokenizer, seed=2, positions=10)
