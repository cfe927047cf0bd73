import torch

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestNoSyncContexts:
    def setup_method(self, method):
        Utils.initialize_model_parallel()
        self.model = FullyShardedDataParallel(
            config=TransformerConfig(num_attention_heads=1, num_layers=1),
            ddp_config=DistributedDataParallelConfig(
                data_parallel_sharding_strategy="optim",
                overlap_grad_reduce=True,
                use_megatron_fsdp=True,
            ),
            module=torch.nn.Sequential(torch.nn.Linear(4, 4)).cuda(),
            fsdp_unit_modules=[torch.nn.Linear],
        )

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def syncs(self):
        return self.model.module.is_last_microbatch

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
