import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from tests.unit_tests.dist_checkpointing import TempNamedDir
from tests.unit_tests.test_utilities import Utils


def _state_dict(value):
    return {
        'note': ShardedObject('note', 'n' * (1000 * value), (1,), (0,)),
        'weight': ShardedTensor.from_rank_offsets('weight', torch.full((64,), float(value))),
    }


def _load(ckpt_dir):
    strategy = TorchDistLoadShardedStrategy(cache_metadata=True)
    return dist_checkpointing.load(_state_dict(0), ckpt_dir, strategy)


class TestCachedMetadata:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def test_overwritten_checkpoint_is_read_by_its_own_metadata(self, tmp_path_dist_ckpt):
        with TempNamedDir(tmp_path_dist_ckpt / 'overwritten') as ckpt_dir:
            for value in (1, 2):
                dist_checkpointing.save(_state_dict(value), ckpt_dir, async_strategy='mcore')
                loaded = _load(ckpt_dir)
                assert loaded['note'] == 'n' * (1000 * value)
                assert torch.all(loaded['weight'] == value)

            # An unchanged checkpoint is read from the cache.
            first, second = (CachedMetadataFileSystemReader(ckpt_dir) for _ in range(2))
            assert first.read_metadata() is second.read_metadata()
