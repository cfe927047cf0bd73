"""A file that cannot be read raises, on all ranks that read it and before weights are loaded."""

from upstream.edits import Repair, after, before, replace

MODULE = "megatron.training.checkpointing"
BASE = f"{MODULE}:_load_base_checkpoint"

REPAIR = Repair(
    edits=(
        replace(
            f"{MODULE}:read_metadata",
            "sys.exit()",
            """
            # The other ranks learn it in the reduction below.
            iteration = torch.iinfo(torch.long).max
            """,
        ),
        before(
            f"{MODULE}:read_metadata",
            "return max_iter, release",
            """
            if max_iter == torch.iinfo(torch.long).max:
                raise RuntimeError(f'a rank cannot read the iteration in {tracker_filename}')
            """,
        ),
        replace(
            BASE,
            "sys.exit()",
            "raise RuntimeError(f'could not load the checkpoint {checkpoint_name}') from e",
        ),
        after(
            BASE,
            "release, return_base_dir=False)",
            """
            optim_checkpoint_name = get_distributed_optimizer_checkpoint_name(checkpoint_name)
            if (
                not (release or args.finetune or args.no_load_optim)
                and args.use_distributed_optimizer
                and maybe_msc.os.path.isfile(optim_checkpoint_name)
            ):
                # This file is read after weights are loaded.
                with maybe_msc.open(optim_checkpoint_name, 'rb') as f:
                    if f.read(2) == b'PK' and not zipfile.is_zipfile(f):
                        raise RuntimeError(f'{optim_checkpoint_name} is truncated')
            """,
        ),
        after(MODULE, "import types", "import zipfile"),
    ),
    unit_tests=("test_checkpointing.py",),
    rereads=("ckpt-step-takes-latest-optimizer",),
    ranks=2,
    leaves="a missing iteration or random state still ends the process, "
    "and a missing optimizer file raises after the weights are loaded",
)
