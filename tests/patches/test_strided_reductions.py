"""A sum over tensor-parallel ranks is what is returned, however the tensor lies in memory."""

from __future__ import annotations

import pytest
from ranks import built, needs_release, on_ranks

needs_release((0, 12), "the tests need a Megatron")


@on_ranks(2)
def test_each_layout_of_a_tensor_has_the_same_sum_to_the_bit() -> None:
    import torch
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    built(tp=2, with_optimizer=False, wire=False)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    drawn = torch.randn(6, 8, generator=generator).cuda()
    expected = drawn.clone()
    torch.distributed.all_reduce(expected)
    layouts = {
        "contiguous": drawn.clone(),
        "transposed": drawn.t().contiguous().t(),
        "part of a larger one": torch.cat([drawn, drawn], dim=1)[:, :8],
    }
    for layout, tensor in layouts.items():
        before = tensor.clone()
        summed = reduce_from_tensor_model_parallel_region(tensor)
        assert torch.equal(summed, expected), layout
        if not tensor.is_contiguous():
            assert torch.equal(tensor, before), layout  # the caller's stays


@pytest.mark.parametrize("transposed", [False, True])
@on_ranks(1)
def test_a_tensor_of_a_single_rank_is_returned_itself(transposed: bool) -> None:
    import torch
    from megatron.core.tensor_parallel import mappings

    from megatron_idempotent.megatron.layer_specs import takes

    built(tp=1, with_optimizer=False, wire=False)
    tensor = torch.ones(2, 3, device="cuda")
    tensor = tensor.t() if transposed else tensor
    arguments = [torch.distributed.group.WORLD] if takes(mappings._reduce, "group") else []
    assert mappings._reduce(tensor, *arguments) is tensor
