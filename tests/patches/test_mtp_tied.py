"""A tied model with MTP on two stages comes back from a checkpoint, and trains all that it has."""

import numpy
import pytest
from ranks import needs_release

import megatron_idempotent
from megatron_idempotent.proof.cpu import tiny

needs_release((0, 13), "0.12 writes no checkpoint with a torch of today")

pytestmark = pytest.mark.full
STAGES = 2
#: Of a step in float32, as a part of its norm: tests/step/roundings.py derives them.
ROUNDINGS = 4e5 * 2.0**-24
OPTIONS = {
    "tied": True,
    "config_overrides": {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1},
    "model_overrides": {"position_embedding_type": "none"},
}


def built():
    megatron_idempotent.apply()
    return tiny.build(pp=STAGES, **OPTIONS)


def values(module):
    return {name: value.tolist() for name, value in module.named_parameters()}


def saved_and_loaded(folder):
    """Runs on a rank: parameters without a gradient, those that came back changed, and all."""
    import torch
    from megatron.core import dist_checkpointing, parallel_state

    model = built()
    model.forward_backward(1, data_seed=0)
    (chunk,) = model.chunks
    idle = [name for name, each in chunk.module.named_parameters() if not each.main_grad.any()]
    before = values(chunk.module)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist_checkpointing.save(
        chunk.module.sharded_state_dict(metadata={"dp_cp_group": group}), folder
    )
    with torch.no_grad():
        for each in chunk.module.parameters():
            each.zero_()
    wanted = chunk.module.sharded_state_dict(metadata={"dp_cp_group": group})
    loaded = dist_checkpointing.load(wanted, folder)
    chunk.module.load_state_dict(loaded)
    after = values(chunk.module)
    return idle, [name for name in before if before[name] != after[name]], sorted(before)


def test_a_checkpoint_has_all_parameters_and_each_of_them_is_trained(tmp_path, megatron_rank_pool):
    first, last = megatron_rank_pool.run(STAGES, saved_and_loaded, str(tmp_path))
    for idle, changed, _ in (first, last):
        assert not idle
        assert not changed
    assert "embedding.word_embeddings.weight" in last[2]
    assert "output_layer.weight" not in last[2]


def embedding_gradient(deferred, applied):
    """Runs on a rank: the embedding's gradient, which both stages share, after a window."""
    from megatron_idempotent.patches import _deferred_embedding

    megatron_idempotent.apply(exclude=() if applied else ("mtp-tied-output-weight",))
    options = {**OPTIONS, "distributed_optimizer": False, "overlap_grad_reduce": False}
    model = _deferred_embedding.build(**options) if deferred else tiny.build(pp=STAGES, **options)
    model.forward_backward(2, data_seed=0)
    return model.chunks[0].module.embedding.word_embeddings.weight.main_grad.flatten().tolist()


def test_a_deferred_gradient_reaches_the_embedding(megatron_rank_pool):
    def found(deferred, applied):
        both = megatron_rank_pool.run(STAGES, embedding_gradient, deferred, applied)
        assert both[0] == both[1]
        return numpy.array(both[0])

    right = found(False, True)
    norm = numpy.linalg.norm(right)
    assert numpy.linalg.norm(found(True, True) - right) <= ROUNDINGS * norm
    # Stock Megatron adds it to a weight that nothing uses.
    assert numpy.linalg.norm(found(True, False) - right) > 2 * ROUNDINGS * norm
