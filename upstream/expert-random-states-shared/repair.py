"""A saved random state has the expert stream of each expert-parallel rank, and a load its own."""

from upstream.edits import Repair, after, before

MODULE = "megatron.training.checkpointing"

REPAIR = Repair(
    edits=(
        before(
            f"{MODULE}:get_rng_state",
            "dp_world_size = get_pg_size(dp_group)",
            """
            ep_group = mpu.get_expert_model_parallel_group(check_initialized=False)
            ep_size = get_pg_size(ep_group)
            if ckpt_format == 'torch_dist' and ep_size > 1:
                # Replicas are not saved, but this stream differs between expert-parallel ranks.
                ep_rng_states = [None for i in range(ep_size)]
                torch.distributed.all_gather_object(
                    ep_rng_states,
                    rng_state['rng_tracker_states'].get('expert-parallel-rng'),
                    group=ep_group,
                )
                rng_state['expert_parallel_rng_states'] = ep_rng_states
            """,
        ),
        after(
            f"{MODULE}:load_checkpoint",
            "if args.data_parallel_random_init:",
            """
            ep_rng_states = rng_state.get('expert_parallel_rng_states', [])
            ep_group = mpu.get_expert_model_parallel_group(check_initialized=False)
            if len(ep_rng_states) == get_pg_size(ep_group):
                expert_rng_state = ep_rng_states[get_pg_rank(ep_group)]
                rng_state['rng_tracker_states']['expert-parallel-rng'] = expert_rng_state
            """,
        ),
    ),
    unit_tests=("test_checkpointing.py",),
    ranks=2,
)
