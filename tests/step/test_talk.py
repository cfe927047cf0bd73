"""Messages that ranks exchange over the host."""

from __future__ import annotations


def told(lengths: list[int]) -> list[tuple[str, int]]:
    """Runs on a rank: what is heard of ranks that each bring so many rows of metrics."""
    import torch.distributed as dist

    from megatron_idempotent.step.open_step import RankStatus, all_gather_status

    rank = dist.get_rank()
    rows = tuple({"loss": float(row), f"of {rank}": 1.0} for row in range(lengths[rank]))
    said = all_gather_status(
        RankStatus(doing="finish", step_id=f"step of {rank}", updates=0, rows=rows), 20.0
    )
    assert all(say.rows[-1]["loss"] == len(say.rows) - 1 for say in said if say.rows)
    return [(say.step_id, len(say.rows)) for say in said]


def test_what_ranks_say_arrives_whole_whatever_its_length(megatron_ranks):
    for lengths in ([0, 0, 1], [1, 2000, 0], [2000, 3000, 1]):
        want = [(f"step of {rank}", length) for rank, length in enumerate(lengths)]
        assert megatron_ranks(3, told, lengths) == [want] * 3
