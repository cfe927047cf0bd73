import pytest

from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
    model_parallel_cuda_manual_seed,
)
from tests.unit_tests.test_utilities import Utils


class TestSeedsOfManyExpertRanks:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    # The expert seed is base + 1024 + 100 * ep + etp, the tensor-parallel one base + 2718 + tp.
    @pytest.mark.parametrize("tp_rank, ep_rank, etp_rank", [(6, 17, 0), (0, 16, 94), (7, 17, 1)])
    def test_expert_seed_differs_from_tensor_parallel_seed(self, tp_rank, ep_rank, etp_rank):
        model_parallel_cuda_manual_seed(
            123, tp_rank=tp_rank, ep_rank=ep_rank, etp_rank=etp_rank, force_reset_rng=True
        )
        assert get_expert_parallel_rng_tracker_name() in get_cuda_rng_tracker().get_states()

    def test_other_ranks_keep_their_seeds(self):
        model_parallel_cuda_manual_seed(
            123, tp_rank=6, ep_rank=16, etp_rank=0, force_reset_rng=True
        )
        assert get_cuda_rng_tracker().seeds_ == {123, 123 + 2718 + 6, 123 + 1024 + 1600}
