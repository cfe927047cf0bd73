import pytest

from megatron.training import get_timers, training
from tests.unit_tests import train_utilities
from tests.unit_tests.train_utilities import TrainProgram


class TestIterationAfterTrain:
    def setup_method(self, method):
        self.program = TrainProgram()
        self.args = self.program.args

    def teardown_method(self, method):
        TrainProgram.destroy()

    def train(self, iterations):
        # The timer of an earlier call is still running.
        get_timers()._timers.pop("interval-time", None)
        self.program.train(iterations)

    def test_second_call_goes_on(self):
        self.train(2)
        assert self.args.iteration == 2
        operations = self.args.num_floating_point_operations_so_far
        assert operations > 0
        self.train(1)
        assert self.args.iteration == 3
        assert self.args.consumed_train_samples == 3 * self.args.global_batch_size
        assert self.args.num_floating_point_operations_so_far == operations * 3 / 2

    def test_skipped_iterations_count(self, monkeypatch):
        monkeypatch.setattr(training, "dummy_train_step", lambda data_iterator: None)
        self.args.iterations_to_skip = [1, 2]
        self.train(2)
        assert self.args.iteration == 2

    def test_exception_in_second_iteration(self, monkeypatch):
        forward_step = train_utilities._forward_step

        def unreadable(*args):
            if self.args.curr_iteration == 1:
                raise ValueError("a microbatch that cannot be read")
            return forward_step(*args)

        monkeypatch.setattr(train_utilities, "_forward_step", unreadable)
        with pytest.raises(ValueError, match="cannot be read"):
            self.train(3)
        assert self.args.iteration == 1
