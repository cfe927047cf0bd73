"""An exception at every stage of an optimizer step: before its update it never was."""

from __future__ import annotations

from typing import Any

import pytest
from abort_sites import Sites

pytestmark = pytest.mark.exhaustive


def abort_at_every_stage(recovery: str, options: dict[str, Any]) -> dict[str, str]:
    """Runs on a rank: for each stage at which a step was aborted, whose gradients the next window
    has.

    "untouched" are those of a model that made no step, "stepped" of one that made the whole step.
    """
    import torch

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    if recovery != "abort_window":
        megatron_idempotent.apply()

    def next_gradients(at: int | None, stages: list[str], step: bool = True) -> torch.Tensor:
        model = tiny.build(layers_per_stage=1, **options)
        model.forward_backward(1, data_seed=0)
        sites = Sites()
        sites.in_step(model)
        if step:
            raised = sites.interrupt(model.step, at)
            stages[:] = sites.passed
            if raised is not None and recovery != "patches":
                megatron_idempotent.abort_window(model.chunks, model.optimizer)
                assert not model.gradients().any()
                assert not _left(model)
            if raised is not None and _updated(model):
                _finish(model)
        model.forward_backward(1, data_seed=1)
        return model.gradients()

    stages: list[str] = []
    stepped = next_gradients(None, stages)
    names = list(stages)
    untouched = next_gradients(None, stages, step=False)
    assert not torch.equal(stepped, untouched)
    found = {}
    for at, name in enumerate(names):
        gradients = next_gradients(at, stages)
        outcomes = {"untouched": untouched, "stepped": stepped}
        same = [what for what, other in outcomes.items() if torch.equal(gradients, other)]
        found[f"{at} {name}"] = "".join(same) or "neither"
    return found


def _updated(model: Any) -> bool:
    """Return what `abort_window` says: the inner optimizer's step count tells."""
    optimizers = getattr(model.optimizer, "chained_optimizers", [model.optimizer])
    return any(
        int(state["step"]) > 0
        for optimizer in optimizers
        for state in optimizer.optimizer.state.values()
        if "step" in state
    )


def _left(model: Any) -> int:
    """Number of gradients that the optimizer still holds."""
    optimizers = getattr(model.optimizer, "chained_optimizers", [model.optimizer])
    return sum(
        param.grad is not None
        for optimizer in optimizers
        for group in optimizer.optimizer.param_groups
        for param in group["params"]
    )


def _finish(model: Any) -> None:
    """Return what `abort_window` says to do after an update, on all ranks."""
    for optimizer in getattr(model.optimizer, "chained_optimizers", [model.optimizer]):
        if hasattr(optimizer, "_copy_main_params_to_model_params"):
            optimizer._copy_main_params_to_model_params()
    for chunk in model.chunks:
        if chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)


@pytest.mark.parametrize(
    ("recovery", "options"),
    [
        ("patches", {"overlap_param_gather": True}),
        ("abort_window", {"overlap_param_gather": True}),
        ("abort_window", {"overlap_grad_reduce": False, "dtype": "bf16", "loss_scale": 128.0}),
        ("both", {"distributed_optimizer": False, "dtype": "bf16"}),
        ("abort_window", {"overlap_grad_reduce": False, "distributed_optimizer": False}),
    ],
)
def test_a_step_aborted_before_its_update_never_was_and_behind_it_can_be_finished(
    megatron_ranks, recovery, options
):
    for found in megatron_ranks(2, abort_at_every_stage, recovery, options, timeout_s=120):
        names = list(found)
        update = next(i for i, name in enumerate(names) if name.endswith(" after step"))
        assert {found[name] for name in names[:update]} == {"untouched"}, found
        assert {found[name] for name in names[update:]} == {"stepped"}, found
        assert any("prepare_grads" in name for name in names[:update])
        assert any("clip" in name or "get_grad_norm" in name for name in names[:update])
