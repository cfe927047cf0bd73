import torch

from megatron.core import parallel_state
from megatron.core.tensor_parallel import random
from tests.unit_tests.test_utilities import Utils


class TestSeedForTrainingAfterInference:
    def setup_method(self, method):
        Utils.initialize_model_parallel(tensor_model_parallel_size=2)

    def teardown_method(self, method):
        random.initialize_rng_tracker(force_reset=True)
        Utils.destroy_model_parallel()

    def test_tensor_parallel_ranks_draw_different_numbers(self):
        random.model_parallel_cuda_manual_seed(
            123, inference_rng_tracker=True, force_reset_rng=True
        )
        random.model_parallel_cuda_manual_seed(123)
        with random.get_cuda_rng_tracker().fork():
            drawn = torch.rand(8, device="cuda")
        group = parallel_state.get_tensor_model_parallel_group()
        all_drawn = [torch.empty_like(drawn) for _ in range(group.size())]
        torch.distributed.all_gather(all_drawn, drawn, group=group)
        assert not torch.equal(*all_drawn)

    def test_reading_or_seeding_for_inference_keeps_inference_tracker(self):
        random.model_parallel_cuda_manual_seed(
            123, inference_rng_tracker=True, force_reset_rng=True
        )
        tracker = random.get_cuda_rng_tracker()
        random.model_parallel_cuda_manual_seed(123, inference_rng_tracker=True)
        assert random.get_cuda_rng_tracker() is tracker
        assert tracker.is_inference_rng_tracker
