import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestStartParamSyncTwice:
    def setup_method(self, method):
        Utils.initialize_model_parallel()
        self.model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(
                use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
            ),
            torch.nn.Linear(8, 8).cuda(),
        )
        (self.group,) = self.model.bucket_groups
        self.rank = torch.distributed.get_rank()
        self.set_shard(1.0)

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def set_shard(self, factor):
        """Fill this rank's shard of the parameter buffer, as an optimizer step does."""
        shards = self.model.buffers[0].param_data.chunk(Utils.world_size)
        with torch.no_grad():
            shards[self.rank].fill_(factor * (1 + self.rank))

    def gathered(self):
        self.group.finish_param_sync()
        shards = self.model.buffers[0].param_data.chunk(Utils.world_size)
        return [shard[0].item() for shard in shards]

    def test_second_start_keeps_the_gather_in_flight(self):
        self.model.start_param_sync()
        handle = self.group.param_gather_handle
        self.model.start_param_sync()
        assert self.group.param_gather_handle is handle
        assert self.gathered() == [1.0 + rank for rank in range(Utils.world_size)]

    def test_outdated_gather_is_replaced(self):
        self.model.start_param_sync()
        # No forward uses the bucket; finish_grad_sync() then marks the values as outdated.
        self.group.param_gather_dispatched = False
        self.group.param_gather_handle.wait()
        self.set_shard(10.0)
        self.model.start_param_sync()
        assert self.gathered() == [10.0 * (1 + rank) for rank in range(Utils.world_size)]
