import time

import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from tests.unit_tests.dist_checkpointing import TempNamedDir
from tests.unit_tests.test_utilities import Utils


def _state_dict(*steps):
    return {
        'exp_avg': ShardedTensor.from_rank_offsets('exp_avg', torch.ones(8)),
        'steps': ShardedObject('steps', steps, (1,), (0,)),
    }


def _schedule(queue, ckpt_dir, *steps):
    request = dist_checkpointing.save(
        _state_dict(*steps), ckpt_dir, async_sharded_save=True, async_strategy='mcore'
    )
    queue.schedule_async_request(request)


class TestAbortedSave:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def test_later_save_has_its_own_metadata(self, tmp_path_dist_ckpt):
        queue = AsyncCallsQueue(persistent=True)
        with (
            TempNamedDir(tmp_path_dist_ckpt / 'aborted_save') as aborted_dir,
            TempNamedDir(tmp_path_dist_ckpt / 'later_save') as later_dir,
        ):
            _schedule(queue, aborted_dir, *range(99))
            caller = queue.async_calls[0].async_caller
            while caller._persistent_comp_q.empty():
                time.sleep(0.1)
            queue.close(abort=True)
            assert queue.get_num_unfinalized_calls() == 0

            _schedule(queue, later_dir, 1)
            queue.maybe_finalize_async_calls(blocking=True)
            queue.close()
            loaded = dist_checkpointing.load(_state_dict(), later_dir)
            assert loaded['steps'] == (1,)
            assert not (aborted_dir / '.metadata').exists()
