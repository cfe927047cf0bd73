import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestNoSyncContexts:
    def setup_method(self, method):
        Utils.initialize_model_parallel()
        self.model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(overlap_grad_reduce=True),
            torch.nn.Linear(4, 4).cuda(),
        )

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def syncs(self):
        return all(group.is_last_microbatch for group in self.model.bucket_groups)

    def test_inner_exit_does_not_end_outer_context(self):
        with self.model.no_sync():
            with self.model.no_sync():
                assert not self.syncs()
            assert not self.syncs()
        assert self.syncs()

    def test_exit_of_an_aborted_window_does_not_end_a_later_context(self):
        aborted = self.model.no_sync()
        aborted.__enter__()
        self.model.zero_grad_buffer()
        assert self.syncs()
        with self.model.no_sync():
            # As when the traceback of the aborted window is freed.
            aborted.__exit__(None, None, None)
            assert not self.syncs()
        assert self.syncs()

    def test_aborted_context_that_never_exits_does_not_hold_gradients(self):
        aborted = self.model.no_sync()
        aborted.__enter__()
        self.model.zero_grad_buffer()
        with self.model.no_sync():
            assert not self.syncs()
        assert self.syncs()
