"""`save_checkpoint()` raises on all ranks if one of them cannot write."""

from upstream.edits import Repair, after, before, replace, wrap

MODULE = "megatron.training.checkpointing"
SAVE = f"{MODULE}:save_checkpoint"
COLLECT = "with _collect_errors(write_errors):"
ONE_LOGGER = """
if not skip_weight_ckpt and (not torch.distributed.is_initialized() or is_last_rank()):
    def onelogger_finalize_fn():
        on_save_checkpoint_success(productive_metrics, args.async_save)
"""

REPAIR = Repair(
    edits=(
        before(
            MODULE,
            "def ensure_directory_exists",
            '''
            @contextlib.contextmanager
            def _collect_errors(errors):
                """Collects an exception, which `_raise_on_all_ranks` raises later."""
                try:
                    yield
                except Exception as e:
                    errors.append(e)


            def _raise_on_all_ranks(errors):
                """Waits for all ranks, and raises on all of them if one has collected an exception."""
                if torch.distributed.is_initialized():
                    failed = torch.tensor([len(errors)], device='cuda')
                    torch.distributed.all_reduce(failed)
                    if failed.item() > 0 and not errors:
                        raise RuntimeError('another rank could not write the checkpoint')
                if errors:
                    raise errors[0]


            ''',  # noqa: E501
        ),
        after(SAVE, "start_ckpt = time()", "write_errors = []"),
        wrap(
            SAVE,
            "optim_checkpoint_name = get_distributed_optimizer_checkpoint_name",
            COLLECT,
            until="...",
        ),
        wrap(SAVE, "optim_checkpoint_name = os.path.join(", COLLECT, until="..."),
        before(
            SAVE,
            "state_dict['num_floating_point_operations_so_far'] = ",
            """
            if ckpt_type == CheckpointType.GLOBAL:
                # The others must not enter the collectives of a save that rank 0 cannot enter.
                if rank == 0:
                    with _collect_errors(write_errors):
                        ensure_directory_exists(checkpoint_name, check_parent=False)
                _raise_on_all_ranks(write_errors)

            """,
        ),
        wrap(
            SAVE,
            "ensure_directory_exists(checkpoint_name)",
            COLLECT,
            until="torch.save(state_dict, checkpoint_name)",
        ),
        replace(
            SAVE,
            "if not args.async_save:\n    assert async_save_request is None",
            """
            if not args.async_save:
                assert async_save_request is None
                # Wait until all files are written, before the tracker names them.
                _raise_on_all_ranks(write_errors)
            """,
        ),
        replace(
            SAVE,
            "async_save_request.add_finalize_fn(iter_finalize_fn)",
            "async_save_request.add_finalize_fn(_collect_errors(write_errors)(iter_finalize_fn))",
        ),
        wrap(SAVE, "iter_finalize_fn()", COLLECT),
        before(
            SAVE,
            ONE_LOGGER,
            """
            if async_save_request is not None:
                async_save_request.add_finalize_fn(lambda: _raise_on_all_ranks(write_errors))
            else:
                _raise_on_all_ranks(write_errors)

            """,
        ),
    ),
    unit_tests=("test_checkpointing.py",),
    ranks=2,
)
