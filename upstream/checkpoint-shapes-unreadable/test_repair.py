import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from tests.unit_tests.dist_checkpointing import TempNamedDir
from tests.unit_tests.test_utilities import Utils


class TestTensorsMetadata:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def test_shapes_and_dtypes_are_read(self, tmp_path_dist_ckpt):
        weight = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
        with TempNamedDir(tmp_path_dist_ckpt / 'tensors_metadata') as ckpt_dir:
            state_dict = {'weight': ShardedTensor.from_rank_offsets('weight', weight)}
            dist_checkpointing.save(state_dict, ckpt_dir, async_strategy='mcore')
            metadata = dist_checkpointing.load_tensors_metadata(ckpt_dir)['weight']
            loaded = dist_checkpointing.load_plain_tensors(ckpt_dir)['weight']
        assert metadata.global_shape == (2, 3)
        assert metadata.dtype == torch.bfloat16
        assert torch.equal(loaded.cpu(), weight)
