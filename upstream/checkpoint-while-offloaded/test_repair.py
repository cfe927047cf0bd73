import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from tests.unit_tests.dist_checkpointing import TempNamedDir
from tests.unit_tests.test_utilities import Utils


class TestSaveOfOffloadedTensors:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def test_save_names_the_offloaded_tensor(self, tmp_path_dist_ckpt):
        weight = torch.ones(4, device="cuda")
        rank = torch.distributed.get_rank()
        state_dict = {
            "weight": ShardedTensor.from_rank_offsets("weight", weight, replica_id=rank),
            "empty": ShardedTensor.from_rank_offsets("empty", torch.ones(0), replica_id=rank),
        }
        with TempNamedDir(tmp_path_dist_ckpt / "while_offloaded") as folder:
            storage = weight.untyped_storage()
            size = storage.size()
            storage.resize_(0)  # as offload_to_cpu() does
            try:
                with pytest.raises(RuntimeError, match="weight has no memory"):
                    dist_checkpointing.save(dict(state_dict), folder)
            finally:
                storage.resize_(size)
            weight.fill_(2.0)
            del state_dict["empty"]
            dist_checkpointing.save(dict(state_dict), folder)
