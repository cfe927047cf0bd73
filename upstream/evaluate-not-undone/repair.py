"""`evaluate()` undoes its changes also if it raises or runs into the time limit."""

from upstream.edits import Repair, before, substitute

_TRAINING = "megatron.training.training"
_EVALUATE = f"{_TRAINING}:evaluate"

REPAIR = Repair(
    edits=(
        substitute(_TRAINING, "import nullcontext", "import contextmanager, nullcontext"),
        before(
            _TRAINING,
            "def evaluate(",
            """
            @contextmanager
            def _undo_evaluation_on_error(model, config, rerun_mode):
                timers = config.timers
                try:
                    yield
                except BaseException:
                    # The caller may handle this and go on training.
                    for model_module in model:
                        model_module.train()
                    config.timers = timers
                    get_rerun_state_machine().set_mode(rerun_mode)
                    raise


            """,
        ),
        before(
            _EVALUATE,
            "timers('evaluate', log_level=0).start(barrier=True)",
            """
            # Evaluation may have ended before it stopped this timer.
            timers('evaluate', log_level=0).reset()
            """,
        ),
        substitute(
            _EVALUATE,
            "with torch.no_grad()",
            "with _undo_evaluation_on_error(model, config, rerun_mode), torch.no_grad()",
        ),
        before(
            _EVALUATE,
            "print_rank_0('Exiting during evaluation",
            """
            for model_module in model:
                model_module.train()
            """,
        ),
    ),
    unit_tests=("test_training.py", "test_eval_batch_size.py"),
)
