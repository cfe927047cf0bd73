from unittest import mock

import pytest

from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper
from tests.unit_tests import train_utilities
from tests.unit_tests.train_utilities import TrainProgram


class TestOptimizerStepAfterTrain:
    def setup_method(self, method):
        OptimizerCudaGraphWrapper.curr_iteration = 0
        self.program = TrainProgram("--optimizer-cuda-graph", "--use-distributed-optimizer")

    def teardown_method(self, method):
        TrainProgram.destroy()

    def test_exception_leaves_optimizer_alone(self, monkeypatch):
        def unreadable(*_):
            raise ValueError("a microbatch that cannot be read")

        monkeypatch.setattr(train_utilities, "_forward_step", unreadable)
        with pytest.raises(ValueError, match="cannot be read"):
            self.program.train(1)
        assert "step" not in vars(self.program.optimizer)

    def test_step_of_caller_is_wrapped_and_kept(self):
        step = mock.Mock(return_value=(True, 0.0, 0))
        self.program.optimizer.step = step
        self.program.train(1)
        step.assert_called_once_with()
        assert OptimizerCudaGraphWrapper.curr_iteration == 1
        assert self.program.optimizer.step is step
