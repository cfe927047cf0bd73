import torch

from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import roll_tensor
from tests.unit_tests.test_utilities import Utils


class TestRollPackWithPadding:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def _roll(self, row, ends, padded_ends):
        ends, padded_ends = (
            None if borders is None else torch.tensor(borders, dtype=torch.int32, device="cuda")
            for borders in (ends, padded_ends)
        )
        packed_seq_params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            cu_seqlens_q_padded=padded_ends,
            cu_seqlens_kv_padded=padded_ends,
            max_seqlen_q=8,
            max_seqlen_kv=8,
        )
        rolled, _ = roll_tensor(
            torch.tensor([row], device="cuda"),
            cp_group=parallel_state.get_context_parallel_group(),
            packed_seq_params=packed_seq_params,
        )
        return rolled.tolist()[0]

    def test_no_token_crosses_into_another_sequence(self):
        row = [1, 2, 3, 4, 5, 0, 0, 0, 11, 12, 13, 14, 15, 16, 17, 0]
        rolled = [2, 3, 4, 5, 0, 0, 0, 0, 12, 13, 14, 15, 16, 17, 0, 0]
        assert self._roll(row, [0, 5, 12], [0, 8, 16]) == rolled

    def test_pack_without_padding(self):
        assert self._roll([1, 2, 3, 11, 12], [0, 3, 5], None) == [2, 3, 0, 12, 0]
