"""CUDA graphs that are captured and replayed compute what the calls that they hold compute."""

from __future__ import annotations

import pytest
import torch

import megatron_idempotent
from megatron_idempotent.patching.source import locate


def iterations() -> tuple[list[list[float]], list[bytes], int]:
    """Runs on a rank with a GPU: losses and gradients of one window, called and then in a graph."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron_idempotent.patches import full_cuda_graph_replayed as case

    megatron_idempotent.apply(only=["full-cuda-graph-replayed"])
    case.stand_in()
    model = case.build(overlap_grad_reduce=False)
    schedule = get_forward_backward_func()
    losses = [case.window(schedule, model, 2)]
    gradients = [model.gradients().numpy().tobytes()]
    wrapper = FullCudaGraphWrapper(schedule, cuda_graph_warmup_steps=1)
    for _ in range(4):
        losses.append(case.window(wrapper, model, 2))
        gradients.append(model.gradients().numpy().tobytes())
    return losses, gradients, case.Graph.replays


@pytest.mark.gpu
def test_a_full_iteration_graph_computes_the_bits_of_the_calls_in_it(gpu_ranks):
    ((losses, gradients, replays),) = gpu_ranks(1, iterations)
    assert replays == 3, "one warm-up; the call that captures replays too"
    assert all(each == losses[0] for each in losses)
    assert all(each == gradients[0] for each in gradients)


def optimizer_steps(graph: bool) -> list[float]:
    """Runs on a rank with a GPU: parameters after four steps of an optimizer that can be
    captured."""
    from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper

    megatron_idempotent.apply()
    weights = torch.nn.Parameter(torch.ones(8, device="cuda"))
    optimizer = torch.optim.AdamW([weights], lr=0.1, capturable=True)
    weights.grad = torch.zeros_like(weights)
    step = OptimizerCudaGraphWrapper(optimizer.step) if graph else optimizer.step
    for number in range(4):
        weights.grad.fill_(number + 1.0)
        step()
    torch.cuda.synchronize()
    found: list[float] = weights.detach().cpu().tolist()
    return found


@pytest.mark.gpu
@pytest.mark.skipif(
    locate("megatron.core.optimizer.optimizer_cuda_graph") is None,
    reason="this release has no OptimizerCudaGraphWrapper",
)
def test_an_optimizers_graph_takes_the_steps_of_the_optimizer(gpu_ranks):
    assert gpu_ranks(1, optimizer_steps, True) == gpu_ranks(1, optimizer_steps, False)
