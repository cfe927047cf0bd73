import pytest

from megatron.training import get_timers
from tests.unit_tests import train_utilities
from tests.unit_tests.train_utilities import TrainProgram


class TestTrainAgain:
    def setup_method(self, method):
        self.program = TrainProgram()

    def teardown_method(self, method):
        TrainProgram.destroy()

    def test_second_call_starts_its_interval_anew(self):
        self.program.train(1)
        get_timers()("interval-time").set_elapsed(1000.0)
        self.program.train(1)
        assert get_timers()("interval-time").elapsed() < 500.0

    def test_call_after_one_that_raised(self, monkeypatch):
        def unreadable(*_):
            raise ValueError("a microbatch that cannot be read")

        with monkeypatch.context() as patched, pytest.raises(ValueError, match="cannot be read"):
            patched.setattr(train_utilities, "_forward_step", unreadable)
            self.program.train(0)
            self.program.train(1)
        assert get_timers()("interval-time")._started
