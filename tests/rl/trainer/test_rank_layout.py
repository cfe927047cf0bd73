"""Places of ranks, and what each of them takes."""

from __future__ import annotations

import itertools

import pytest

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
    layout = RankLayout(tp=2, pp=2, replicas=2)
    assert [layout.replica(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert layout.ranks_of(1) == (2, 3, 6, 7)
    layout = RankLayout(cp=2, pp=2, replicas=2)
    assert layout.ranks_of(1) == (2, 3, 6, 7)
