import pytest

from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    destroy_rerun_state_machine,
    initialize_rerun_state_machine,
)


class TestReplayedMicrobatches:
    def setup_method(self, method):
        destroy_rerun_state_machine()
        initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)

    def teardown_method(self, method):
        destroy_rerun_state_machine()

    @pytest.mark.parametrize("reruns", [1, 2, 3])
    def test_every_run_gets_the_same(self, reruns):
        data_iterator = RerunDataIterator(iter({"tokens": i, "shift": 1} for i in range(2)))
        for _ in range(1 + reruns):
            for i in range(2):
                microbatch = next(data_iterator)
                assert microbatch == {"tokens": i, "shift": 1}
                del microbatch["shift"]
            data_iterator.rewind()
        # The state goes into the checkpoint from which another machine runs the step again.
        assert data_iterator.state_dict()["saved_microbatches"] == [
            {"tokens": i, "shift": 1} for i in range(2)
        ]
