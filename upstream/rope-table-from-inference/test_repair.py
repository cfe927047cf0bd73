import pytest
import torch

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from tests.unit_tests.test_utilities import Utils


class TestRotaryTablesFirstUsedByInference:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def _train(self, table):
        query = torch.ones(table.shape, device=table.device, requires_grad=True)
        (query * table).sum().backward()
        assert query.grad.equal(table)
        assert not table.requires_grad

    @pytest.mark.parametrize("rotary_class", [RotaryEmbedding, YarnRotaryEmbedding])
    def test_training_can_save_tables_for_backward(self, rotary_class):
        rotary = rotary_class(kv_channels=16, rotary_percent=1.0)

        def tables():
            # Longer than what YarnRotaryEmbedding computes when it is built.
            table = rotary(8192)
            table = table[0] if isinstance(table, tuple) else table
            return table, *rotary.get_cached_cos_sin(8192)

        with torch.inference_mode():
            tables()
        for table in tables():
            self._train(table)
