import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from tests.unit_tests.dist_checkpointing import TempNamedDir
from tests.unit_tests.test_utilities import Utils


def _state_dict(value):
    weight = torch.full((4,), value)
    offset = (0, Utils.rank, Utils.world_size)
    return {'weight': ShardedTensor.from_rank_offsets('weight', weight, offset)}


class TestOverwrittenCheckpoint:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def test_interrupted_save_does_not_load(self, tmp_path_dist_ckpt):
        with TempNamedDir(tmp_path_dist_ckpt / 'overwritten_checkpoint') as ckpt_dir:
            dist_checkpointing.save(_state_dict(1.0), ckpt_dir, async_strategy='mcore')
            request = dist_checkpointing.save(
                _state_dict(2.0), ckpt_dir, async_sharded_save=True, async_strategy='mcore'
            )
            # Only the first rank writes, and nobody finalizes.
            async_fn = request.async_fn if Utils.rank == 0 else None
            request._replace(async_fn=async_fn, finalize_fns=[]).execute_sync()
            with pytest.raises(CheckpointingException):
                dist_checkpointing.load(_state_dict(0.0), ckpt_dir)

            # The next save is complete.
            dist_checkpointing.save(_state_dict(3.0), ckpt_dir, async_strategy='mcore')
            loaded = dist_checkpointing.load(_state_dict(0.0), ckpt_dir)
            assert torch.all(loaded['weight'] == 3.0)
