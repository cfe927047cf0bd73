"""`CudaRNGStatesTracker.set_states()` keeps a copy of the caller's dictionary."""

from upstream.edits import Repair, replace

REPAIR = Repair(
    edits=(
        replace(
            "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.set_states",
            "self.states_",
            """
            # A copy, as in get_states: fork() must not write into the caller's dictionary.
            self.states_ = dict(states)
            """,
        ),
    ),
    unit_tests=("tensor_parallel/test_random.py",),
)
