"""Objects that rotary tables keep alive, and the call that frees them."""

from __future__ import annotations


def delete_models(models: int) -> tuple[list[bool], list[bool], int]:
    """Runs on a rank: whether each one's embedding is alive, before and after the remedy."""
    import gc

    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron_idempotent.patches.rope_tables_kept import deleted_model

    embeddings = [deleted_model() for _ in range(models)]
    before = [embedding() is not None for embedding in embeddings]
    tables = RotaryEmbedding.forward.cache_info().currsize
    RotaryEmbedding.forward.cache_clear()
    gc.collect()
    return before, [embedding() is not None for embedding in embeddings], tables


def test_clearing_the_cache_frees_the_tables_of_deleted_models(megatron_ranks):
    assert megatron_ranks(1, delete_models, 3) == [([True] * 3, [False] * 3, 3)]


def lengths_seen() -> tuple[int, int]:
    """Runs on a rank: tables and bytes that the documented 40 lengths leave."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    parallel_state.initialize_model_parallel()
    embedding = RotaryEmbedding(kv_channels=128, rotary_percent=1.0)
    lengths = [8192 + 64 * i for i in range(40)]
    for length in lengths:
        embedding(length)
    tables = RotaryEmbedding.forward.cache_info().currsize
    # The kept ones are hits, and the least recently used eight are gone.
    kept = [embedding(length) for length in lengths[-tables:]]
    assert RotaryEmbedding.forward.cache_info().hits == tables
    return tables, sum(table.nbytes for table in kept)


def test_the_last_32_lengths_are_kept(megatron_ranks):
    ((tables, size),) = megatron_ranks(1, lengths_seen)
    assert tables == 32
    assert round(size / 2**20) == 152
