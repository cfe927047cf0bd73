"""`destroy_model_parallel()` destroys the groups that `initialize_model_parallel()` created."""

from upstream.edits import Repair, after, replace

_DESTROY = "megatron.core.parallel_state:destroy_model_parallel"
_GROUPS = """

global _HIERARCHICAL_CONTEXT_PARALLEL_GROUPS
_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS = None
_HYBRID_DP_CP_GROUPS.clear()

global _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP
_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None

global _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO
_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO = None

# Without this torch keeps the groups and their communicators for ever. None is the default
# group, and a caller may have destroyed others.
for group in groups or []:
    if group is not None and group in torch.distributed.distributed_c10d._world.pg_map:
        torch.distributed.destroy_process_group(group)
"""

REPAIR = Repair(
    edits=(
        replace(
            _DESTROY,
            "_global_process_group_list = None",
            "groups, _global_process_group_list = _global_process_group_list, None",
        ),
        after(_DESTROY, "SymmetricMemoryManager.destroy()", _GROUPS),
    ),
    unit_tests=("test_parallel_state.py",),
    ranks=2,
)
