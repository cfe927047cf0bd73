"""`wire_train_config` is what an ordinary framework sets; helpers refuse what are no chunks."""

import pytest
import torch
from ranks import VIRTUAL, built, on_ranks, same

import megatron_idempotent


@pytest.mark.parametrize(
    "layout",
    [
        {"overlap_grad_reduce": False},
        {"overlap_param_gather": True},
        {"dtype": "bf16", "loss_scale": 1024.0},
        {**VIRTUAL, "overlap_param_gather": True, "align": True},
    ],
    ids=["plain", "overlap", "loss-scale", "vpp-align"],
)
@on_ranks(2)
def test_a_wired_model_trains_as_one_that_a_framework_wired(layout):
    ours, bench = (built(applied=False, wire=wire, **layout) for wire in (False, True))
    for _ in range(2):
        megatron_idempotent.wire_train_config(ours.chunks, ours.optimizer)
    for seed in (0, 1):
        losses = [model.forward_backward(4, data_seed=seed) for model in (ours, bench)]
        assert losses[0] == losses[1]
        for model in (ours, bench):
            model.step()
    assert same(ours.parameters(), bench.parameters())


@on_ranks(2)
def test_chunks_of_one_rank_share_lists_and_a_reference_model_has_no_scale():
    model = built(applied=False, wire=False, **VIRTUAL)
    config = model.config
    megatron_idempotent.wire_train_config(model.chunks)
    assert config.grad_scale_func is None
    megatron_idempotent.wire_train_config(model.chunks, model.optimizer, align_grad_reduce=True)
    assert config.grad_scale_func._optimizer() is model.optimizer
    assert config.no_sync_func == [chunk.no_sync for chunk in model.chunks]
    assert config.grad_sync_func == [chunk.start_grad_sync for chunk in model.chunks]


@pytest.mark.parametrize("caller", ["abort_window", "ensure_params_synced", "wire_train_config"])
@on_ranks(1)
def test_what_is_no_list_of_chunks_in_ddp_is_refused_before_anything_is_changed(caller):
    (chunk,) = built(applied=False).chunks
    (group, *_) = chunk.bucket_groups
    group.is_last_microbatch = False  # which `abort_window` puts back
    for chunks in (None, chunk, [], [chunk, chunk.module]):
        with pytest.raises(ValueError, match=caller):
            getattr(megatron_idempotent, caller)(chunks)
    if caller == "abort_window":
        with pytest.raises(ValueError, match="SGD as optimizer"):
            megatron_idempotent.abort_window([chunk], torch.optim.SGD(chunk.parameters()))
    assert not group.is_last_microbatch


@on_ranks(1)
def test_nothing_of_this_package_is_bound_before_the_patches_come():
    """`apply()` comes after all of the package was imported."""
    import importlib
    import pkgutil

    package = "megatron_idempotent."
    for module in pkgutil.walk_packages(megatron_idempotent.__path__, package):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as missing:
                if str(missing.name).startswith(package):
                    raise
    rows = megatron_idempotent.apply()
    assert not [row for row in rows if "left alone: megatron_idempotent" in row.reason]
