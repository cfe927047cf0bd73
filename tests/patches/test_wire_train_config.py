"""`wire_train_config` is what an ordinary framework sets, and may be called again."""

from __future__ import annotations

import pytest

from megatron_idempotent.proof.cpu import RankError


def step_losses(*, ours: bool, **layout) -> tuple[list[float], bytes]:
    """Runs on a rank: two windows and steps on a model wired by us, or by the test bench."""
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build(wire=not ours, **layout)
    if ours:
        megatron_idempotent.wire_train_config(model.chunks, model.optimizer)
        megatron_idempotent.wire_train_config(model.chunks, model.optimizer)
    losses = []
    for seed in (0, 1):
        losses += model.forward_backward(4, data_seed=seed)
        model.step()
    return losses, model.parameters().numpy().tobytes()


@pytest.mark.parametrize(
    "layout",
    [
        {"overlap_grad_reduce": False},
        {"overlap_param_gather": True},
        {"dtype": "bf16", "loss_scale": 1024.0},
        {"pp": 2, "vpp": 2, "layers_per_stage": 1, "overlap_param_gather": True, "align": True},
    ],
    ids=["plain", "overlap", "loss-scale", "vpp-align"],
)
def test_a_wired_model_trains_as_one_that_a_framework_wired(layout, megatron_ranks):
    ours = megatron_ranks(2, step_losses, ours=True, **layout)
    assert ours == megatron_ranks(2, step_losses, ours=False, **layout)


def functions_after_wiring() -> tuple[bool, bool, bool, bool]:
    """Runs on a rank: a reference model's scale, then scale, no_sync and gathers of a VPP model."""
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build(pp=2, vpp=2, layers_per_stage=1, wire=False)
    megatron_idempotent.wire_train_config(model.chunks)
    reference = model.config.grad_scale_func is None
    megatron_idempotent.wire_train_config(model.chunks, model.optimizer, align_grad_reduce=True)
    config = model.config
    return (
        reference,
        config.grad_scale_func._optimizer() is model.optimizer,
        config.no_sync_func == [chunk.no_sync for chunk in model.chunks],
        config.grad_sync_func == [chunk.start_grad_sync for chunk in model.chunks],
    )


def test_chunks_of_one_rank_share_lists_and_a_reference_model_has_no_scale(megatron_ranks):
    assert all(all(result) for result in megatron_ranks(2, functions_after_wiring))


def wire(kind: str) -> None:
    """Runs on a rank: wire what cannot be wired."""
    import torch

    import megatron_idempotent

    megatron_idempotent.wire_train_config([] if kind == "nothing" else [torch.nn.Linear(2, 2)])


@pytest.mark.parametrize(
    ("kind", "message"),
    [("nothing", "got no model chunk"), ("a bare module", "got a Linear, which has no ddp_config")],
)
def test_what_is_not_wrapped_in_ddp_is_refused(kind, message, megatron_ranks):
    with pytest.raises(RankError, match=message):
        megatron_ranks(1, wire, kind)


def imported_before() -> list[str]:
    """Runs on a rank: rows of an `apply()` that came after all of the package was imported."""
    import importlib
    import pkgutil

    import megatron_idempotent

    package = "megatron_idempotent."
    for module in pkgutil.walk_packages(megatron_idempotent.__path__, package):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as missing:
                if str(missing.name).startswith(package):
                    raise
    return [f"{row.id}: {row.reason}" for row in megatron_idempotent.apply()]


def test_nothing_of_this_package_is_bound_before_the_patches_come(megatron_ranks):
    (rows,) = megatron_ranks(1, imported_before)
    assert not [row for row in rows if "left alone: megatron_idempotent" in row]
