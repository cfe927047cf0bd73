"""A process that builds its model again has one model in memory, and its tables can be freed."""

import gc
import weakref

import pytest
import torch
from ranks import on_ranks

import megatron_idempotent
from megatron_idempotent.proof.cpu import tiny


@pytest.mark.parametrize("end", ["finish", "abort"])
@on_ranks(1)
def test_a_step_keeps_no_model_that_was_deleted(end):
    megatron_idempotent.apply()
    model = tiny.build(experts=4, dtype="bf16")
    step = megatron_idempotent.TrainStep(model.chunks, model.optimizer)

    def loss(output, microbatch):
        return output.float().logsumexp(-1).sum(), {}

    loss.kind, loss.normalizers = "token", {}
    step_id = step.begin(loss, global_batch_size=2, micro_batch_size=2)
    step.microbatch(step_id, {"input_ids": torch.ones(2, 32, dtype=torch.long)})
    getattr(step, end)(step_id)
    left = [weakref.ref(each) for each in (step, model.optimizer, *model.chunks)]
    del model, step
    gc.collect()
    assert [each() for each in left] == [None] * len(left)


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
