import gc

import pytest

from tests.unit_tests.train_utilities import TrainProgram


class TestGarbageCollectionAfterTrain:
    def setup_method(self, method):
        self.program = TrainProgram("--manual-gc")

    def teardown_method(self, method):
        gc.enable()
        TrainProgram.destroy()

    @pytest.mark.parametrize("enabled", [True, False])
    def test_is_as_before(self, enabled):
        (gc.enable if enabled else gc.disable)()
        self.program.train(1)
        assert gc.isenabled() is enabled
