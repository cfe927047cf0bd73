import torch

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from tests.unit_tests.test_utilities import Utils


class TestLearnableSoftmaxOffset:
    def setup_method(self, method):
        Utils.initialize_model_parallel(tensor_model_parallel_size=2)

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def test_each_rank_counts_its_own_heads(self):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=32,
            num_attention_heads=4,
            tensor_model_parallel_size=2,
            softmax_type="learnable",
            use_cpu_initialization=True,
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        attention = DotProductAttention(
            config=config,
            layer_number=1,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            pg_collection=groups,
        )
        offset = attention.softmax_offset
        assert offset.shape == (2,)
        assert param_is_not_tensor_parallel_duplicate(offset, groups.tp)
        counted = torch.tensor([offset.numel()]).cuda()
        torch.distributed.all_reduce(counted, group=groups.tp)
        assert counted.item() == config.num_attention_heads
        assert (offset.partition_dim, offset.partition_stride) == (0, 1)
