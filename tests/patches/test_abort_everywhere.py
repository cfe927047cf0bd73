"""An exception at every single site of a window, and at every stage of an optimizer step."""

from __future__ import annotations

from typing import Any

import pytest
from abort_sites import Sites
from ranks import abort, built, groups, on_ranks, same

pytestmark = pytest.mark.exhaustive

OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}
ALL_REDUCE = {"overlap_grad_reduce": True, "distributed_optimizer": False}
NOT_OVERLAPPED = {"overlap_grad_reduce": False}


def _make_first(model: Any) -> None:
    """Let the next window be the first, as in a model just built."""
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    for group in groups(model):
        group.is_first_batch = True
        group.golden_per_param_grad_ready_counts = {}


@pytest.mark.parametrize(
    ("recovery", "options"),
    [
        ("patches", OVERLAPPED),
        ("abort_window", OVERLAPPED),
        ("both", ALL_REDUCE),
        ("patches", NOT_OVERLAPPED),
        ("abort_window", NOT_OVERLAPPED),
    ],
)
@on_ranks(2, timeout_s=300)
def test_an_abort_anywhere_in_a_window_leaves_no_trace_in_the_next(recovery, options):
    """With the patches the next window only zeroes the gradients, as every window does."""
    model = built(applied=recovery != "abort_window", layers_per_stage=1, **options)
    model.forward_backward(2, data_seed=0)
    expected = model.gradients()
    sites = Sites()
    sites.in_window(model)
    held: list[BaseException | None] = []
    second: list[int] = []

    def on_microbatch(index: int, loss: Any) -> None:
        # A traceback keeps what hangs on it alive; here until the next window is under way.
        held.clear()
        if index == 1 and loss is None:
            second.append(len(sites.passed))

    model.on_microbatch = on_microbatch
    sites.interrupt(lambda: model.forward_backward(2, data_seed=0), at=None)
    names, aborts = sites.passed, 0
    # Releases from 0.16 on learn in the last microbatch of a first window when to reduce.
    learns = options["overlap_grad_reduce"] and hasattr(groups(model)[0], "is_first_batch")
    for at, name in enumerate(names):
        for first in (True, False) if learns and at >= second[0] else (False,):
            where = f"{'first' if first else 'later'} window, site {at}, {name}"
            if first:
                _make_first(model)
            raised = sites.interrupt(lambda: model.forward_backward(2, data_seed=1), at=at)
            assert raised is not None, f"{name} was not reached again"
            held.append(raised)
            del raised
            if recovery != "patches":
                abort(model)
            model.forward_backward(2, data_seed=0)
            aborts += 1
            assert same(model.gradients(), expected), where
    kinds = {"forward of", "gradient of"}
    kinds |= {"accumulated output_layer.weight", "registered output_layer.weight"}
    kinds |= {"before finish_grad_sync", "after finish_grad_sync", "before start_grad_sync"}
    if options["overlap_grad_reduce"]:
        kinds |= {"before the", "after the"}
    if options.get("overlap_param_gather"):
        kinds |= {"before finish_param_sync", "after finish_param_sync"}
    assert kinds <= {" ".join(name.split()[:2]) for name in names}
    assert any(name.startswith("before _allreduce") for name in names)
    assert aborts > 100


def _optimizers(model: Any) -> list[Any]:
    return getattr(model.optimizer, "chained_optimizers", [model.optimizer])  # type: ignore[no-any-return]


def _updated(model: Any) -> bool:
    """Return what `abort_window` says: the inner optimizer's step count tells."""
    states = [state for each in _optimizers(model) for state in each.optimizer.state.values()]
    return any(int(state["step"]) > 0 for state in states if "step" in state)


def _left(model: Any) -> int:
    """Number of gradients that the optimizer still holds."""
    held = [group for each in _optimizers(model) for group in each.optimizer.param_groups]
    return sum(param.grad is not None for group in held for param in group["params"])


def _finish(model: Any) -> None:
    """Return what `abort_window` says to do after an update, on all ranks."""
    for optimizer in _optimizers(model):
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
@on_ranks(2, timeout_s=120)
def test_a_step_aborted_before_its_update_never_was_and_behind_it_can_be_finished(
    recovery, options
):
    def next_gradients(at: int | None, stages: list[str], step: bool = True) -> Any:
        """Gradients of the window after a step that was aborted at a stage."""
        model = built(applied=recovery != "abort_window", layers_per_stage=1, **options)
        model.forward_backward(1, data_seed=0)
        sites = Sites()
        sites.in_step(model)
        if step:
            raised = sites.interrupt(model.step, at)
            stages[:] = sites.passed
            if raised is not None and recovery != "patches":
                abort(model)
                assert not model.gradients().any()
                assert not _left(model)
            if raised is not None and _updated(model):
                _finish(model)
        model.forward_backward(1, data_seed=1)
        return model.gradients()

    names: list[str] = []
    stepped = next_gradients(None, names)
    untouched = next_gradients(None, [], step=False)
    assert not same(stepped, untouched)
    update = next(i for i, name in enumerate(names) if name == "after step")
    for at, name in enumerate(names):
        expected = untouched if at < update else stepped
        assert same(next_gradients(at, []), expected), f"{at} {name}"
    assert any("prepare_grads" in name for name in names[:update])
    assert any("clip" in name or "get_grad_norm" in name for name in names[:update])
