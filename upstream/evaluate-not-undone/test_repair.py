import pytest

from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_timers, training
from tests.unit_tests import train_utilities
from tests.unit_tests.train_utilities import TrainProgram


class TestEvaluateThatEndsEarly:
    def setup_method(self, method):
        self.program = TrainProgram()
        self.program.config.timers = get_timers()
        self.mode = get_rerun_state_machine().get_mode()

    def teardown_method(self, method):
        TrainProgram.destroy()

    def evaluate(self, forward_step=train_utilities._forward_step):
        program = self.program
        return training.evaluate(
            forward_step, program.data[0], program.model, None, program.config, eval_iters=1
        )

    def check(self):
        assert all(module.training for module in self.program.model[0].modules())
        assert get_rerun_state_machine().get_mode() == self.mode
        assert self.program.config.timers is get_timers()
        self.program.args.exit_duration_in_mins = None
        losses, _, timelimit = self.evaluate()
        assert losses["lm loss"] > 0
        assert not timelimit

    def test_exception(self):
        def unreadable(*_):
            raise ValueError("a microbatch that cannot be read")

        with pytest.raises(ValueError, match="cannot be read"):
            self.evaluate(unreadable)
        self.check()

    def test_time_limit(self):
        self.program.args.exit_duration_in_mins = 1e-9
        _, _, timelimit = self.evaluate()
        assert timelimit
        self.check()
