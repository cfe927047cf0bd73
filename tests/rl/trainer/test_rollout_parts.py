"""Rewards, advantages, random numbers and packing: the pure parts of a rollout."""

import math
import statistics

import pytest

torch = pytest.importorskip("torch")

from megatron_idempotent.rl.engines import Sample  # noqa: E402 - after the skip
from megatron_idempotent.rl.trainer.batch import chunks, pack_rows  # noqa: E402
from megatron_idempotent.rl.trainer.rewards import group_advantages  # noqa: E402
from megatron_idempotent.rl.trainer.task.reward import position_reward  # noqa: E402


@pytest.mark.parametrize(
    ("response", "finished", "reward"),
    [
        ("c b a", True, 1.0),
        ("c b a", False, 0.75),  # never said that it was done
        ("c b x", True, 0.75),
        ("a b c", True, 0.5),  # the middle, and the end
        ("", True, 0.0),
        ("c", True, 0.25),
        ("c b a a", True, 0.6),  # 3 of 5: the denominator grows with what was said
        ("x x x x", False, 0.0),
    ],
)
def test_the_reward_is_the_share_of_right_positions(response, finished, reward):
    assert position_reward(response, "c b a", finished=finished) == reward


def test_only_the_whole_answer_earns_everything():
    words = ["a", "b", "c", "<pad>"]
    for first in words:
        for second in words:
            text = f"{first} {second}"
            full = position_reward(text, "a b", finished=True) == 1.0
            assert full == (text == "a b")


def test_advantages_are_rewards_standardised_within_the_group():
    rewards = [0.0, 0.25, 0.25, 1.0]
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    expected = [(reward - mean) / (std + 1e-4) for reward in rewards]
    assert group_advantages(rewards, normalize_std=True) == pytest.approx(expected, abs=1e-15)
    assert group_advantages(rewards, normalize_std=False) == pytest.approx(
        [reward - mean for reward in rewards], abs=1e-15
    )


def test_a_group_of_equal_rewards_has_no_advantages():
    assert group_advantages([0.3] * 3, normalize_std=True) == (0.0, 0.0, 0.0)


def sample(*tokens, logprobs):
    return Sample(
        request_id="0/0/0",
        tokens=tokens,
        logprobs=logprobs,
        versions=(0,) * len(tokens),
        finish_reason="stop",
    )


def rows():
    prompt = (3, 4, 2)
    return [
        (prompt, sample(5, 1, logprobs=(-0.5, -0.25)), 1.0),
        (prompt, sample(6, 6, 6, logprobs=(-1.0, -2.0, -3.0)), -1.0),
    ]


def test_packing_shifts_targets_by_one_and_masks_the_response():
    batch = pack_rows(rows(), positions=6, pad_id=0)
    assert batch.tokens_BT.tolist() == [[3, 4, 2, 5, 1, 0], [3, 4, 2, 6, 6, 6]]
    assert batch.targets_BT.tolist() == [[4, 2, 5, 1, 0, 0], [4, 2, 6, 6, 6, 0]]
    assert batch.loss_mask_BT.tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0]]
    assert batch.old_logprobs_BT[0].tolist() == [0, 0, -0.5, -0.25, 0, 0]
    assert batch.advantages_B.tolist() == [1.0, -1.0]
    tensors = batch.tensors()
    assert tensors["token_mask"].tolist() == [[0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 0]]
    assert "reference_logprobs" not in tensors


def test_packing_into_too_few_positions_is_an_error():
    with pytest.raises(
        ValueError, match="a sequence has 6 tokens, and positions is 4, with room for 5"
    ):
        pack_rows(rows(), positions=4, pad_id=0)


def test_chunks_use_every_sequence_once_in_a_seeded_order():
    batch = pack_rows(rows() * 6, positions=5, pad_id=0)
    marked = batch.rows(torch.arange(12))
    marked.advantages_B.copy_(torch.arange(12.0))

    def order(seed, index):
        pieces = list(chunks(marked, size=4, seed=seed, index=index))
        assert [len(piece) for piece in pieces] == [4, 4, 4]
        return [int(value) for piece in pieces for value in piece.advantages_B]

    assert sorted(order(1, 0)) == list(range(12))
    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def test_log_probabilities_survive_the_way_into_the_batch():
    value = math.log(1 / 3)
    stored = torch.tensor(value).item()  # what the sampler hands over: a float32
    row = ((3,), sample(1, logprobs=(stored,)), 0.0)
    batch = pack_rows([row], positions=1, pad_id=0)
    assert batch.old_logprobs_BT[0, 0].item() == stored
