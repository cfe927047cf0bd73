"""Offloads on CPU ranks move what they would move on a GPU, and certify sees what they lose."""

from __future__ import annotations

import pytest

from megatron_idempotent.patching.decide import installed
from megatron_idempotent.proof.certify import CHECKS, layout, run

OWN = "megatron_idempotent.proof.certify.adapters"
release = installed("megatron-core")
if release is None or release.release < (0, 16):
    pytest.skip("gradient buffers can be offloaded from 0.16 on", allow_module_level=True)


@pytest.fixture(autouse=True)
def importable(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))


def fault_of(pool, adapter, check, where="dp2", **options):
    if ":" not in adapter:
        adapter = f"planted_offloads:{adapter}"
    fault, _ = run.outcome_of(pool, adapter, CHECKS[check], layout(where), **options)
    return fault


def test_stock_megatron_drops_gradients_of_an_open_step_and_the_patch_refuses(megatron_rank_pool):
    options = "InParts", "offload-in-mid-step", "dp2-nooverlap"
    assert not fault_of(megatron_rank_pool, "InParts", "split-step", "dp2-nooverlap", stock=True)
    stock = fault_of(megatron_rank_pool, *options, stock=True)
    assert stock == "the step has moved no parameter"
    assert not fault_of(megatron_rank_pool, *options)


@pytest.mark.exhaustive
def test_stock_megatron_crashes_at_gradients_that_are_zeroed_meanwhile(megatron_rank_pool):
    options = "ZeroesBeforeLogprobs", "logprobs-while-offloaded"
    fault = fault_of(megatron_rank_pool, *options, stock=True)
    assert fault.startswith("rank "), fault
    assert " ended: " in fault
    assert not fault_of(megatron_rank_pool, *options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", ["dp2", "dp2-distopt", "dp2-bf16"])
def test_stock_megatron_offloads_between_steps(megatron_rank_pool, where):
    adapter, check = f"{OWN}:Megatron", "offload-between-steps"
    assert not fault_of(megatron_rank_pool, adapter, check, where, stock=True)


@pytest.mark.parametrize(
    ("bug", "check", "said"),
    [
        ("OffloadsNothing", "offload-between-steps", "offload() has moved and freed none of "),
        ("LeavesMomentsOnTheHost", "offload-between-steps", " tensors are on the host, the first "),
        ("LeavesGradientsFreed", "offload-between-steps", " tensors have no memory, the first is "),
        ("KeepsOneCopy", "logprobs-while-offloaded", "log-probs differ from the model's by "),
        ("OneRankRefusesTooLate", "offload-in-mid-step", "is refused on some ranks, and others "),
    ],
)
def test_an_offload_that_is_wrong_is_found(megatron_rank_pool, bug, check, said):
    assert said in fault_of(megatron_rank_pool, bug, check)


@pytest.mark.parametrize(
    ("adapter", "where"),
    [
        ("planted_offloads:KeepsGradients", "dp2"),
        ("planted_offloads:OneRankRefuses", "dp2"),
        (f"{OWN}:FSDPSplitStep", "dp2-fsdp2"),
    ],
)
def test_an_offload_in_an_open_step_may_keep_gradients_or_be_refused(
    megatron_rank_pool, adapter, where
):
    assert not fault_of(megatron_rank_pool, adapter, "offload-in-mid-step", where)


def tell_apart() -> list[object]:
    """Runs on a rank: what the two memories say of a tensor, and what is left after the block."""
    import torch

    from megatron_idempotent.proof.certify.memories import Memories

    names = ("cpu", "cuda", "to", "is_cuda", "device")
    before = {name: vars(torch.Tensor).get(name) for name in names}
    memories = Memories(None)  # type: ignore[arg-type]  # it asks for none of the subject here
    one = torch.ones(2)
    with memories.apart():
        copies = [one.cpu(), one.to("cpu"), one.to(device="cpu"), one.to(torch.device("cpu"))]
        copies.append(one.to(copies[0]))
        back = [copies[0].cuda(), copies[0].to("cuda"), copies[0].to(0), copies[0].to(one)]
        same = [one.cuda(), one.to("cuda:0"), one.to(torch.float32), copies[0].cpu()]
        said = [(each.is_cuda, each.device.type) for each in (one, *copies, *back)]
        shared = [each.data_ptr() in (one.data_ptr(), copies[0].data_ptr()) for each in same]
        apart = len({each.data_ptr() for each in (one, *copies, *back)}) == 10
        meta = torch.empty(2, device="meta").device.type
    after = {name: vars(torch.Tensor).get(name) for name in names}
    return [said, shared, apart, meta, before == after]


def test_host_and_device_are_told_apart_as_on_a_gpu(megatron_rank_pool):
    (found,) = megatron_rank_pool.run(1, tell_apart, distributed=False)
    said, shared, apart, meta, restored = found
    assert said == [(True, "cuda"), *[(False, "cpu")] * 5, *[(True, "cuda")] * 4]
    assert all(shared)
    assert apart
    assert meta == "meta"
    assert restored
