"""Gradient buffers put aside in the middle of a loop, on real ranks."""

from __future__ import annotations

import pytest
from ranks import built, needs_release, on_ranks

needs_release((0, 16), "gradient buffers can be offloaded from 0.16 on")

pytestmark = pytest.mark.full

ONLY = ["offload-drops-gradients", "zero-grad-while-offloaded"]
OPTIMIZERS = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "experts": {"experts": 2},
    "all-reduce": {"distributed_optimizer": False},
    "bf16 all-reduce": {"distributed_optimizer": False, "dtype": "bf16"},
    "no overlap": {"overlap_grad_reduce": False},
}


def offload(model) -> None:
    for chunk in model.chunks:
        chunk.offload_grad_buffers()
        chunk.restore_grad_buffers()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@on_ranks(2)
def test_an_offload_behind_each_step_changes_no_loss_and_one_before_it_is_refused(kind):
    def losses(times: int):
        """Windows, steps, and an offload and a restore after each, `times` over."""
        model = built(ONLY, **OPTIMIZERS[kind])
        found = []
        for seed in range(3):
            found += model.forward_backward(2, data_seed=seed)
            model.step()
            for _ in range(times):
                for chunk in model.chunks:
                    chunk.offload_grad_buffers()
                    chunk.offload_grad_buffers()
                    chunk.zero_grad_buffer()
                    chunk.restore_grad_buffers()
                    chunk.restore_grad_buffers()
        return found

    assert losses(2) == losses(0)
    model = built(ONLY, **OPTIMIZERS[kind])
    said = r"has dropped, in .*zero_grad_buffer\(\)"
    model.forward_backward(2, data_seed=0)
    offload(model)
    with pytest.raises(RuntimeError, match=said):
        model.step()
    if kind == "no overlap":
        model.forward_backward(2, data_seed=1, zero_first=False)  # on top of what is lost
        with pytest.raises(RuntimeError, match=said):
            model.step()
    model.forward_backward(2, data_seed=2)
    assert model.step()[0]


@on_ranks(2)
def test_memory_that_a_reduction_writes_to_is_not_freed():
    """The last backward has dispatched its reductions; nobody has finished them."""
    model = built(ONLY)
    # The first window only counts which gradients come.
    model.train_step(2, data_seed=0)
    model.config.finalize_model_grads_func = lambda *_, **__: None
    model.forward_backward(2, data_seed=1)
    with pytest.raises(RuntimeError, match=r"\d gradient reductions in flight"):
        model.chunks[0].offload_grad_buffers()
