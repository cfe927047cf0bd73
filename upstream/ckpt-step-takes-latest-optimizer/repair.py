"""A load with `ckpt_step` takes everything from that step, also from step 0."""

from upstream.edits import Repair, after, replace, substitute

MODULE = "megatron.training.checkpointing"
STEP = ("getattr(args, 'ckpt_step', None)", "getattr(args, 'ckpt_step', None) is not None")
LOAD = f"{MODULE}:load_checkpoint"

REPAIR = Repair(
    edits=(
        substitute(f"{MODULE}:get_load_checkpoint_path_by_args", *STEP),
        substitute(f"{MODULE}:_load_base_checkpoint", *STEP),
        after(
            f"{MODULE}:_load_base_checkpoint",
            "iteration = args.ckpt_step",
            """
            if non_persistent_iteration != iteration:
                non_persistent_iteration = -1
            """,
        ),
        substitute(LOAD, "a manual read of the tracker file", "next to the file of the model"),
        replace(LOAD, "tracker_filename = get_checkpoint_tracker_filename(load_dir)", ""),
        replace(LOAD, "iteration, release = read_metadata(tracker_filename)", ""),
        replace(LOAD, "model_checkpoint_name = get_checkpoint_name", ""),
        replace(
            LOAD,
            "optim_checkpoint_name = get_distributed_optimizer_checkpoint_name(",
            "optim_checkpoint_name = get_distributed_optimizer_checkpoint_name(checkpoint_name)",
        ),
    ),
    unit_tests=("test_checkpointing.py",),
    after=("adam-step-shared",),
)
