import pytest

from tests.unit_tests import train_utilities
from tests.unit_tests.train_utilities import TrainProgram


class TestParamSyncFuncAfterTrain:
    def setup_method(self, method):
        self.program = TrainProgram(
            "--overlap-grad-reduce", "--overlap-param-gather", "--use-distributed-optimizer"
        )
        self.sync_func = self.program.model[0].start_param_sync
        self.program.config.param_sync_func = self.sync_func

    def teardown_method(self, method):
        TrainProgram.destroy()

    def test_without_iterations(self):
        self.program.train(0)
        assert self.program.config.param_sync_func == self.sync_func

    def test_exception_in_first_iteration(self, monkeypatch):
        seen = []

        def unreadable(*_):
            seen.append(self.program.config.param_sync_func)
            raise ValueError("a microbatch that cannot be read")

        monkeypatch.setattr(train_utilities, "_forward_step", unreadable)
        with pytest.raises(ValueError, match="cannot be read"):
            self.program.train(1)
        assert seen == [None]
        assert self.program.config.param_sync_func == self.sync_func
