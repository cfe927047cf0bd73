"""An exception at every single site of a window: the next window has the gradients of no abort."""

from __future__ import annotations

from typing import Any

import pytest
from abort_sites import Sites
from benches import groups

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


def abort_at_every_site(recovery: str, options: dict[str, Any]) -> tuple[set[str], int, list[str]]:
    """Runs on a rank: kinds of sites, number of aborts, and those after which a gradient was wrong.

    `recovery` is "patches", where the next window only zeroes the gradients as every window does;
    "abort_window", on stock Megatron; or "both".
    """
    import torch

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    if recovery != "abort_window":
        megatron_idempotent.apply()
    model = tiny.build(layers_per_stage=1, **options)
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
    names, aborts, wrong = sites.passed, 0, []
    # Releases from 0.16 on learn in the last microbatch of a first window when to reduce.
    learns = options["overlap_grad_reduce"] and hasattr(groups(model)[0], "is_first_batch")
    for at, name in enumerate(names):
        for first in (True, False) if learns and at >= second[0] else (False,):
            if first:
                _make_first(model)
            raised = sites.interrupt(lambda: model.forward_backward(2, data_seed=1), at=at)
            assert raised is not None, f"{name} was not reached again"
            held.append(raised)
            del raised
            if recovery != "patches":
                megatron_idempotent.abort_window(model.chunks, model.optimizer)
            where = f"{'first' if first else 'later'} window, site {at}, {name}"
            try:
                model.forward_backward(2, data_seed=0)
            except AssertionError as error:
                raise RuntimeError(f"no window after an abort in a {where}") from error
            aborts += 1
            if not torch.equal(model.gradients(), expected):
                wrong.append(where)
    return {" ".join(name.split()[:2]) for name in names}, aborts, wrong


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
def test_an_abort_anywhere_in_a_window_leaves_no_trace_in_the_next(
    megatron_ranks, recovery, options
):
    expected = {"forward of", "gradient of"}
    expected |= {"accumulated output_layer.weight", "registered output_layer.weight"}
    expected |= {"before finish_grad_sync", "after finish_grad_sync", "before start_grad_sync"}
    if options["overlap_grad_reduce"]:
        expected |= {"before the", "after the"}
    if options.get("overlap_param_gather"):
        expected |= {"before finish_param_sync", "after finish_param_sync"}
    results = megatron_ranks(2, abort_at_every_site, recovery, options, timeout_s=300)
    for kinds, aborts, wrong in results:
        assert expected <= kinds
        assert any(kind.startswith("before _allreduce") for kind in kinds)
        assert aborts > 100
        assert wrong == []
