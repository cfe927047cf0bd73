"""Gradient buffers and optimizer state put aside in the middle of a loop, on real ranks."""

from __future__ import annotations

import pytest

from megatron_idempotent.patching.decide import installed
from megatron_idempotent.proof.cpu import RankError

release = installed("megatron-core")
if release is None or release.release < (0, 16):
    pytest.skip("gradient buffers can be offloaded from 0.16 on", allow_module_level=True)

ONLY = ["offload-drops-gradients", "zero-grad-while-offloaded"]


def built(**layout):
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply(only=ONLY)
    return tiny.build(**layout)


OPTIMIZERS = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "experts": {"experts": 2},
    "all-reduce": {"distributed_optimizer": False},
    "bf16 all-reduce": {"distributed_optimizer": False, "dtype": "bf16"},
    "no overlap": {"overlap_grad_reduce": False},
}


def offload_between_iterations(layout: dict, times: int) -> list[float]:
    """Runs on a rank: windows, steps, and an offload and a restore after each, `times` over."""
    model = built(**layout)
    losses = []
    for seed in range(3):
        losses += model.forward_backward(2, data_seed=seed)
        model.step()
        for _ in range(times):
            for chunk in model.chunks:
                chunk.offload_grad_buffers()
                chunk.offload_grad_buffers()
                chunk.zero_grad_buffer()
                chunk.restore_grad_buffers()
                chunk.restore_grad_buffers()
    return losses


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_offload_behind_each_step_changes_no_loss(kind, megatron_ranks):
    want = megatron_ranks(2, offload_between_iterations, OPTIMIZERS[kind], 0)
    assert megatron_ranks(2, offload_between_iterations, OPTIMIZERS[kind], 2) == want


def offload_with_gradients(layout: dict) -> list[str]:
    """Runs on a rank: what steps say whose gradients an offload has dropped; then an ordinary
    one."""
    model = built(**layout)
    model.forward_backward(2, data_seed=0)
    for chunk in model.chunks:
        chunk.offload_grad_buffers()
        chunk.restore_grad_buffers()
    said = [refusal(model)]
    if layout == OPTIMIZERS["no overlap"]:
        model.forward_backward(2, data_seed=1, zero_first=False)  # on top of what is lost
        said.append(refusal(model))
    model.forward_backward(2, data_seed=2)
    assert model.step()[0]
    return said


def refusal(model) -> str:
    with pytest.raises(RuntimeError) as caught:
        model.step()
    return str(caught.value)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_without_the_gradients_that_an_offload_dropped_is_refused(kind, megatron_ranks):
    for said in megatron_ranks(2, offload_with_gradients, OPTIMIZERS[kind]):
        assert all("has dropped, in " in text and "zero_grad_buffer()" in text for text in said)


def gradients_that_nobody_steps_on(applied: bool) -> bytes:
    """Runs on a rank: offloads of gradients that are zeroed, skipped, used otherwise, or not
    wanted."""
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    if applied:
        megatron_idempotent.apply(strict=True)
    model = tiny.build(
        dtype="fp16", overlap_grad_reduce=False, optimizer_overrides={"initial_loss_scale": 2.0**8}
    )
    (chunk,) = model.chunks

    def offload() -> None:
        chunk.offload_grad_buffers()
        chunk.restore_grad_buffers()

    offload()
    model.on_microbatch = lambda _, loss: None if loss is None else loss * float("inf")
    model.forward_backward(2, data_seed=0)
    model.on_microbatch = None
    success, _, _ = model.step()
    assert not success
    offload()
    model.forward_backward(2, data_seed=1)
    chunk.zero_grad_buffer()
    offload()
    model.forward_backward(2, data_seed=2)
    model.optimizer.step_with_ready_grads()
    offload()
    model.forward_backward(2, data_seed=3)  # a warm-up, or a probe of the gradients
    offload()

    def fail(index, _):
        if index == 1:
            raise ValueError("bad sample")

    model.on_microbatch = fail
    with pytest.raises(ValueError, match="bad sample"):
        model.forward_backward(2, data_seed=4)
    model.on_microbatch = None
    offload()
    for seed in (5, 6):
        model.forward_backward(2, data_seed=seed)
        success, _, _ = model.step()
        assert success
    return model.parameters().numpy().tobytes()


def test_gradients_that_nobody_steps_on_may_go(megatron_ranks):
    stock, patched = (
        megatron_ranks(2, gradients_that_nobody_steps_on, applied) for applied in (False, True)
    )
    assert stock == patched


def offload_under_a_reduction() -> None:
    """Runs on a rank: the last backward has dispatched its reductions; nobody has finished them."""
    model = built()
    # The first window only counts which gradients come.
    model.forward_backward(2, data_seed=0)
    model.step()
    model.config.finalize_model_grads_func = lambda *_, **__: None
    model.forward_backward(2, data_seed=1)
    model.chunks[0].offload_grad_buffers()


def test_memory_that_a_reduction_writes_to_is_not_freed(megatron_ranks):
    with pytest.raises(RankError, match=r"\d gradient reductions in flight"):
        megatron_ranks(2, offload_under_a_reduction)
