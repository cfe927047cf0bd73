import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from tests.unit_tests.dist_checkpointing import TempNamedDir
from tests.unit_tests.test_utilities import Utils


def _state_dict():
    weight, offset = torch.ones(4), (0, Utils.rank, Utils.world_size)
    return {'weight': ShardedTensor.from_rank_offsets('weight', weight, offset)}


class TestFailureOfRank0:
    def setup_method(self, method):
        Utils.initialize_model_parallel()
        self.error = OSError if Utils.rank == 0 else CheckpointingException

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    @pytest.mark.parametrize('name', ['metadata.json', 'integrity.json', '.metadata', '.'])
    def test_save_raises_on_all_ranks(self, tmp_path_dist_ckpt, name):
        with TempNamedDir(tmp_path_dist_ckpt / 'failed_dist_save') as folder:
            ckpt_dir = folder / 'ckpt'
            if Utils.rank == 0 and name != '.':
                (ckpt_dir / name).mkdir(parents=True)  # it cannot be opened as a file
            torch.distributed.barrier()
            with pytest.raises(CheckpointException if name == '.metadata' else self.error):
                dist_checkpointing.save(_state_dict(), ckpt_dir, verify_integrity=True)
            torch.distributed.barrier()

    def test_finalization_raises_on_all_ranks(self, tmp_path_dist_ckpt):
        queue = AsyncCallsQueue()
        with TempNamedDir(tmp_path_dist_ckpt / 'failed_dist_save') as folder:
            request = dist_checkpointing.save(
                _state_dict(), folder, async_sharded_save=True, async_strategy='mcore'
            )
            queue.schedule_async_request(request)
            if Utils.rank == 0:
                (folder / 'metadata.json').mkdir()
            with pytest.raises(self.error):
                queue.maybe_finalize_async_calls(blocking=True)
