"""Rotary tables of deleted models, and of lengths no longer used, stay in memory.

Symptom:
    Memory grows with each sequence length that a model with rotary embeddings sees, and is not
    freed when the model is deleted: up to 32 tables, 64 MiB each for 131,072 tokens and 128
    channels, 152 MiB in all for 32 lengths between 8,704 and 10,688. A deleted model's
    `RotaryEmbedding` stays alive, from 0.13 on with a process group; its parameters do not.

Cause:
    `functools.lru_cache(maxsize=32)` around `RotaryEmbedding.forward` is one cache on the class,
    whose keys refer to the embedding. `YarnRotaryEmbedding.forward` has another cache, which from
    0.16 on is emptied whenever an embedding of that class is built.

Affects:
    Every release, on CPU ranks as well. There is no patch, because the cache cannot drop the
    entries of one embedding, and emptying all of it could free tables that captured CUDA graphs
    read. After you delete a model, or between rollouts of many lengths and training, call
    `RotaryEmbedding.forward.cache_clear()`, and that of `YarnRotaryEmbedding`, unless there are
    such graphs. Tables are then computed again, in about a millisecond each on a CPU.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/models/common/embeddings/rotary_pos_embedding.py;
    a comment in `yarn_rotary_pos_embedding.py` describes the leak in NeMo-RL, and the code clears
    its own cache.

Remove when:
    tables belong to the embedding that computed them.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Limit


def deleted_model() -> Any:
    """Run a model with rotary embeddings, and delete it.
    Return a weak reference to the model's `RotaryEmbedding`.
    """
    import gc
    import weakref

    import torch

    from megatron_idempotent.megatron.layer_specs import gpt_stage
    from megatron_idempotent.proof.cpu import tiny

    model = gpt_stage(
        tiny.build(with_optimizer=False).config,
        vp_stage=None,
        vocab_size=tiny.VOCABULARY,
        max_sequence_length=tiny.SEQUENCE,
        position_embedding_type="rope",
    ).cuda()
    with torch.no_grad():
        model(*tiny.inputs(0))
    model_ref, embedding = weakref.ref(model), weakref.ref(model.rotary_pos_emb)
    del model
    gc.collect()
    assert model_ref() is None, "something else holds the model"
    return embedding


def reproduce() -> None:
    """Run a model with rotary embeddings once, and delete the model.
    The model's `RotaryEmbedding` and its table stay in memory.
    """
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    if deleted_model()() is not None:
        tables = RotaryEmbedding.forward.cache_info().currsize
        raise Fault(f"{tables} rotary table of a deleted model is kept, and its embedding")


LIMIT = Limit(summary="up to 32 rotary tables stay in memory, those of deleted models too", ranks=1)
