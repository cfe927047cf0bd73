import torch

import megatron.core.parallel_state as ps
from tests.unit_tests.test_utilities import Utils


def _group_count():
    return len(torch.distributed.distributed_c10d._world.pg_map)


class TestProcessGroupsAfterDestroy:
    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def test_cycles_leave_no_groups(self):
        Utils.initialize_model_parallel()
        Utils.destroy_model_parallel()
        count = _group_count()
        for _ in range(2):
            Utils.initialize_model_parallel(tensor_model_parallel_size=2)
            assert _group_count() > count
            Utils.destroy_model_parallel()
            assert _group_count() == count
            variables = vars(ps).values()
            assert not any(isinstance(v, torch.distributed.ProcessGroup) for v in variables)

    def test_default_group_and_groups_of_others_stay(self):
        Utils.initialize_distributed()
        initial_count = _group_count()
        Utils.initialize_model_parallel()
        other = torch.distributed.new_group()
        torch.distributed.destroy_process_group(ps.get_tensor_model_parallel_group())
        ps.destroy_model_parallel()
        count = torch.ones(1, device="cuda")
        torch.distributed.all_reduce(count)
        torch.distributed.all_reduce(count, group=other)
        assert count.item() == torch.distributed.get_world_size() ** 2
        torch.distributed.destroy_process_group(other)
        assert _group_count() == initial_count
