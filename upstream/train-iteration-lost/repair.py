"""`train()` keeps `args.iteration` and the count of operations up to date while it runs."""

from upstream.edits import Repair, after, substitute

_TRAIN = "megatron.training.training:train"

REPAIR = Repair(
    edits=(
        after(
            _TRAIN,
            "num_floating_point_operations_so_far = args.num_floating_point_operations_so_far",
            "num_floating_point_operations_at_start = num_floating_point_operations_so_far",
        ),
        substitute(
            f"{_TRAIN}.get_e2e_base_metrics",
            "- args.num_floating_point_operations_so_far",
            "- num_floating_point_operations_at_start",
        ),
        after(_TRAIN, "args.skipped_train_samples += batch_size", "args.iteration = iteration"),
        after(
            _TRAIN,
            "num_floating_point_operations_so_far += num_floating_point_operations_in_batch",
            """
            # A later call of train() starts here, even if this one raises.
            args.iteration = iteration
            args.num_floating_point_operations_so_far = num_floating_point_operations_so_far
            """,
        ),
    ),
    unit_tests=("test_training.py", "test_num_floating_point_operations.py"),
)
