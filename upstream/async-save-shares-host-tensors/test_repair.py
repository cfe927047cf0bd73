import functools
import time

import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from tests.unit_tests.dist_checkpointing import TempNamedDir
from tests.unit_tests.test_utilities import Utils


def _write_once_stepped(stepped, write, *args, **kwargs):
    while not stepped.exists():
        time.sleep(0.1)
    write(*args, **kwargs)


class TestPersistentWorker:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def test_saves_host_tensors_as_they_were(self, tmp_path_dist_ckpt):
        exp_avg = torch.zeros(8)
        queue = AsyncCallsQueue(persistent=True)
        with (
            TempNamedDir(tmp_path_dist_ckpt / 'host_tensors') as ckpt_dir,
            TempNamedDir(tmp_path_dist_ckpt / 'host_tensors_stepped') as other_dir,
        ):
            request = dist_checkpointing.save(
                {'exp_avg': ShardedTensor.from_rank_offsets('exp_avg', exp_avg)},
                ckpt_dir,
                async_sharded_save=True,
                async_strategy='mcore',
            )
            stepped = other_dir / 'stepped'
            write = functools.partial(_write_once_stepped, stepped, request.async_fn)
            queue.schedule_async_request(request._replace(async_fn=write))
            exp_avg += 1
            stepped.touch()
            queue.maybe_finalize_async_calls(blocking=True)
            queue.close()

            template = {'exp_avg': ShardedTensor.from_rank_offsets('exp_avg', torch.ones(8))}
            loaded = dist_checkpointing.load(template, ckpt_dir)
        assert not loaded['exp_avg'].any()
