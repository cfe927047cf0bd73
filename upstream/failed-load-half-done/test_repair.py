import os
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor, serialization
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from tests.unit_tests.dist_checkpointing import TempNamedDir
from tests.unit_tests.test_utilities import Utils


class TestFailureOfOneRank:
    def setup_method(self, method):
        Utils.initialize_model_parallel()
        self.weights = {name: torch.ones(8) for name in ("padded", "shared", "split")}

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def _state_dict(self):
        rank, offset = Utils.rank, (0, Utils.rank, Utils.world_size)
        make, weights = ShardedTensor.from_rank_offsets, self.weights
        return {
            "padded": make("padded", weights["padded"], offset, allow_shape_mismatch=True),
            "shared": make("shared", weights["shared"], replica_id=rank),
            "split": make("split", weights["split"], offset),
        }

    def _save(self, folder):
        dist_checkpointing.save(self._state_dict(), folder)
        for weight in self.weights.values():
            weight.fill_(2.0)

    def _strategy(self, fully_parallel):
        strategy = TorchDistLoadShardedStrategy()
        return FullyParallelLoadStrategyWrapper(strategy) if fully_parallel else strategy

    @pytest.mark.parametrize("fully_parallel", [False, True])
    def test_truncated_file_is_found_before_reading(self, tmp_path_dist_ckpt, fully_parallel):
        with TempNamedDir(tmp_path_dist_ckpt / "failed_load") as folder:
            self._save(folder)
            if Utils.rank == 0:
                for path in folder.glob("__1_*.distcp"):
                    os.truncate(path, path.stat().st_size - 8)
            torch.distributed.barrier()
            with pytest.raises(CheckpointingException, match="bytes"):
                dist_checkpointing.load(
                    self._state_dict(), folder, self._strategy(fully_parallel)
                )
            assert all((weight == 2.0).all() for weight in self.weights.values())

    @pytest.mark.parametrize("fully_parallel", [False, True])
    @pytest.mark.parametrize(
        "owner,name",
        [
            (TorchDistLoadShardedStrategy, "load"),
            (FileSystemReader, "read_data"),
            (serialization, "load_common_state_dict"),
            (serialization, "verify_checkpoint"),
        ],
    )
    def test_error_of_one_rank_is_raised_on_all(
        self, tmp_path_dist_ckpt, owner, name, fully_parallel
    ):
        with TempNamedDir(tmp_path_dist_ckpt / "failed_load") as folder:
            self._save(folder)
            error = PermissionError("not on this node")
            effect = error if Utils.rank == 1 else getattr(owner, name)
            with mock.patch.object(owner, name, side_effect=effect, autospec=True):
                with pytest.raises((CheckpointException, PermissionError, CheckpointingException)):
                    dist_checkpointing.load(
                        self._state_dict(), folder, self._strategy(fully_parallel)
                    )
            torch.distributed.barrier()
