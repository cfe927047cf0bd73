"""Checked ranks refuse what a GPU would refuse, and take what it would take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def mixed_in_a_product() -> None:
    torch.ones(2, device="cuda") * torch.ones(2)


def mixed_in_a_backward() -> None:

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, value: Any) -> Any:
            return 2 * value

        @staticmethod
        def backward(_ctx: Any, gradient: Any) -> Any:
            return gradient * torch.full((2,), 2.0)

    Doubled.apply(torch.ones(2, device="cuda", requires_grad=True)).sum().backward()


def read_by_numpy() -> None:
    torch.ones(2).cuda().numpy()


def drawn_by_a_host_generator() -> None:
    torch.rand(2, device="cuda", generator=torch.Generator())


def reduced_from_the_host() -> None:
    dist.all_reduce(torch.ones(2))


def host_indexed_by_the_device() -> None:
    torch.ones(2)[torch.tensor([1], device="cuda")]


def made_like_a_device_tensor() -> None:
    torch.zeros_like(torch.ones(2, device="cuda")) + torch.ones(2)


def right() -> None:
    """Nothing of this is refused on a GPU."""
    device = torch.ones(2, device="cuda")
    device * torch.tensor(3.0) + torch.ones(2).cuda() + torch.ones(2).to("cuda")
    device.copy_(torch.ones(2))
    device[torch.tensor([1])] = 4.0
    device + torch.zeros(2, device=device.device) + device.new_ones(2)
    device.cpu().numpy()
    torch.ones(2).numpy()
    dist.all_reduce(device)
    dist.all_reduce(torch.ones(2), group=dist.new_group(backend="gloo"))
    dist.barrier()
    layer = torch.nn.Linear(2, 2).cuda()
    layer(device).sum().backward()
    torch.optim.AdamW(layer.parameters()).step()


#: What is said of each program that is refused.
REFUSED: dict[Callable[[], None], str] = {
    mixed_in_a_product: "aten.mul.Tensor: a tensor of shape (2,) is on the host",
    mixed_in_a_backward: "aten.mul.Tensor: a tensor of shape (2,) is on the host",
    read_by_numpy: "numpy() of a device tensor",
    drawn_by_a_host_generator: "rand: a host generator fills a device tensor",
    reduced_from_the_host: "is on the host, and the group is NCCL's",
    host_indexed_by_the_device: "aten.index.Tensor: a tensor of shape (2,)",
    made_like_a_device_tensor: "aten.add.Tensor: a tensor of shape (2,)",
}


def each_on_a_rank() -> dict[str, str]:
    """Runs on a rank: what each program is refused for, one after the other."""
    from megatron_idempotent.proof.cpu.errors import PlacementError

    right()
    found = {}
    for program in REFUSED:
        try:
            program()
        except PlacementError as error:
            found[program.__name__] = str(error)
    return found


def test_a_checked_rank_refuses_what_a_gpu_would(megatron_rank_pool, monkeypatch):
    monkeypatch.setattr(megatron_rank_pool, "device", "checked")
    for refused in megatron_rank_pool.run(2, each_on_a_rank):
        for program, said in REFUSED.items():
            assert said in refused[program.__name__]
