"""A process that builds its model again has one model: in memory, in replays, in rotary tables."""

import gc

import pytest
import torch
from ranks import on_ranks

import megatron_idempotent
from megatron_idempotent.patching import releases
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.proof.cpu import tiny

INSTALLED = releases.installed("megatron-core")
assert INSTALLED is not None, "the tests need a Megatron"
PATCH = patches()["router-replay-of-deleted-models"]
REPLAYS = releases.supported(INSTALLED, PATCH.since, PATCH.before)


@pytest.mark.skipif(not REPLAYS, reason=f"megatron-core {INSTALLED.text} replays no routing")
@on_ranks(1)
def test_a_model_that_was_trained_and_built_again_is_replayed_alone():
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    megatron_idempotent.apply()
    listed = RouterReplay.global_router_replay_instances
    for built in range(3):
        # Only a collection frees the model of before: it and DDP's hooks hold each other.
        model = tiny.build(experts=4, config_overrides={"moe_enable_routing_replay": True})
        assert len(listed) == (2 if built == 0 else 4)
        routing = [torch.full((tiny.BATCH * tiny.SEQUENCE, 2), layer) for layer in range(2)]
        for each in routing:
            each[:, 1] += 1
        RouterReplay.set_replay_data(routing)
        routers = [each for each in model.chunks[0].modules() if hasattr(each, "router_replay")]
        assert [each.router_replay for each in routers] == listed
        assert [each.router_replay.target_topk_idx for each in routers] == routing
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        model.train_step(1, data_seed=built)
        del model, routers


@pytest.mark.parametrize("end", ["finish", "abort"])
@on_ranks(1)
def test_a_step_keeps_no_model_that_was_deleted(end):
    import gc
    import weakref

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
