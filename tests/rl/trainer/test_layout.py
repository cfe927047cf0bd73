"""Places of ranks, what each of them takes, and how rows get there and back."""

from __future__ import annotations

import asyncio
import itertools

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import torch
from trainer_cases import job_for

from megatron_idempotent.rl.trainer.async_ranks import RankPolicy, make_ranks
from megatron_idempotent.rl.trainer.batch import Batch
from megatron_idempotent.rl.trainer.layout import RankLayout


@pytest.mark.parametrize(
    ("tp", "cp", "pp", "replicas"), list(itertools.product((1, 3), (1, 2), (1, 2), (1, 2, 3)))
)
def test_shares_of_all_ranks_make_up_all_items_in_the_order_of_each_replica(tp, cp, pp, replicas):
    layout = RankLayout(tp=tp, cp=cp, pp=pp, replicas=replicas)
    for count in (0, 1, 7, 24):
        items = list(range(count))
        found = []
        for replica in range(replicas):
            ranks = layout.ranks_of(replica)
            assert [layout.member(rank) for rank in ranks] == list(range(tp * cp * pp))
            merged = layout.merge([layout.share(items, rank) for rank in ranks])
            assert merged == items[replica::replicas]
            found += merged
        assert sorted(found) == items


def test_ranks_are_where_megatron_puts_them():
    for sizes in ({"tp": 2, "pp": 2}, {"cp": 2, "pp": 2}):
        layout = RankLayout(**sizes, replicas=2)
        assert [layout.replica(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
        assert layout.ranks_of(1) == (2, 3, 6, 7)


class Ranks:
    """Ranks that return what they were given."""

    async def call(self, method, *args, per_rank=None, timeout_s=None):
        self.given = per_rank
        return [part.old_logprobs_BT * 10 for part in per_rank]


@pytest.mark.parametrize("rows", [7, 2, 1])
@pytest.mark.parametrize("meet", [False, True])
def test_ranks_of_a_replica_get_the_same_rows_and_log_probs_come_back_in_their_places(rows, meet):
    values_BT = torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, 4).contiguous()
    batch = Batch(
        tokens_BT=values_BT.long(),
        targets_BT=values_BT.long(),
        old_logprobs_BT=values_BT,
        advantages_B=values_BT[:, 0],
        loss_mask_BT=torch.ones(rows, 4),
    )
    ranks, layout = Ranks(), RankLayout(tp=2, pp=2, replicas=3)
    policy = RankPolicy(ranks, layout, timeout_s=1.0, meet=meet)
    found_BT = asyncio.run(policy.logprobs(batch, "policy"))
    for rank, part in enumerate(ranks.given):
        mine = list(range(layout.replica(rank), rows, 3))
        # Where replicas meet inside of the model, each has as many rows as others.
        padding = [0] * (-(-rows // 3) - len(mine)) if meet else []
        assert part.tokens_BT[:, 0].tolist() == mine + padding
        assert part.loss_mask_BT.sum() == 4 * len(mine)
    assert torch.equal(found_BT, values_BT * 10)


@pytest.mark.parametrize(
    ("settings", "bundle", "backend"),
    [
        ((), {"CPU": 1}, "gloo"),
        (
            ("controller.cpus_per_rank=4", "controller.gpus_per_rank=1", "run.device=cuda"),
            {"CPU": 4, "GPU": 1},
            "nccl",
        ),
    ],
)
def test_ray_reserves_for_each_rank_what_the_settings_ask_for(settings, bundle, backend, tmp_path):
    on_ray = ("run.mode=async", "controller.cluster=ray")
    ranks = make_ranks(job_for(tmp_path / "run", *on_ray, *settings))
    assert (ranks._bundle, ranks._backend) == (bundle, backend)
