import torch

from megatron.core.tensor_parallel.random import (
    CudaRNGStatesTracker,
    checkpoint,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from tests.unit_tests.test_utilities import Utils


def test_snapshot_of_rng_states_stays_as_it_is():
    tracker = CudaRNGStatesTracker()
    tracker.add("state", 123)
    snapshot = tracker.get_states()
    drawn = []
    for _ in range(2):
        tracker.set_states(snapshot)
        with tracker.fork("state"):
            drawn.append(torch.rand(8, device="cuda"))
    assert torch.equal(*drawn)


def test_second_backward_through_checkpoint_recomputes_the_same_dropout():
    Utils.initialize_model_parallel()
    model_parallel_cuda_manual_seed(123, force_reset_rng=True)

    def dropout(tensor):
        with get_cuda_rng_tracker().fork():
            return torch.nn.functional.dropout(tensor, 0.5)

    tensor = torch.ones(64, device="cuda", requires_grad=True)
    output = checkpoint(dropout, False, tensor)
    gradients = []
    for _ in range(2):
        tensor.grad = None
        output.sum().backward(retain_graph=True)
        gradients.append(tensor.grad)
    Utils.destroy_model_parallel()
    assert torch.equal(*gradients)
