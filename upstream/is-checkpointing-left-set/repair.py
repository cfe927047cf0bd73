"""`CheckpointFunction` sets its global flag in a context manager, which also clears it on error."""

from upstream.edits import Repair, before, replace, substitute

_RANDOM = "megatron.core.tensor_parallel.random"
_FORWARD = f"{_RANDOM}:CheckpointFunction.forward"
_BACKWARD = f"{_RANDOM}:CheckpointFunction.backward"

REPAIR = Repair(
    edits=(
        before(
            _RANDOM,
            "class CheckpointFunction(",
            '''
            @contextlib.contextmanager
            def _checkpointing():
                """Set state to checkpointing enabled for a block, even if that raises."""
                _set_checkpointing()
                try:
                    yield
                finally:
                    _unset_checkpointing()


            ''',
        ),
        replace(_FORWARD, "_set_checkpointing()", ""),
        substitute(_FORWARD, "with torch.no_grad()", "with _checkpointing(), torch.no_grad()"),
        replace(_FORWARD, "_unset_checkpointing()", ""),
        replace(_BACKWARD, "_set_checkpointing()", ""),
        substitute(_BACKWARD, "with _fork_rng()", "with _checkpointing(), _fork_rng()"),
        replace(_BACKWARD, "_unset_checkpointing()", ""),
    ),
    unit_tests=("tensor_parallel/test_random.py",),
)
