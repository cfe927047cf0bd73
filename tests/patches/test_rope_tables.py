"""Objects that rotary tables keep alive, and the call that frees them."""

import gc

from ranks import on_ranks


@on_ranks(1)
def test_clearing_the_cache_frees_the_tables_of_deleted_models():
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron_idempotent.patches.rope_tables_kept import deleted_model

    embeddings = [deleted_model() for _ in range(3)]
    assert [embedding() is not None for embedding in embeddings] == [True] * 3
    assert RotaryEmbedding.forward.cache_info().currsize == 3
    RotaryEmbedding.forward.cache_clear()
    gc.collect()
    assert [embedding() is not None for embedding in embeddings] == [False] * 3


@on_ranks(1)
def test_the_last_32_lengths_are_kept():
    """Tables and bytes that the documented 40 lengths leave."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    parallel_state.initialize_model_parallel()
    embedding = RotaryEmbedding(kv_channels=128, rotary_percent=1.0)
    lengths = [8192 + 64 * i for i in range(40)]
    for length in lengths:
        embedding(length)
    tables = RotaryEmbedding.forward.cache_info().currsize
    assert tables == 32
    # The kept ones are hits, and the least recently used eight are gone.
    kept = [embedding(length) for length in lengths[-tables:]]
    assert RotaryEmbedding.forward.cache_info().hits == tables
    assert round(sum(table.nbytes for table in kept) / 2**20) == 152
