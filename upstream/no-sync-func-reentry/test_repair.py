from megatron.training import get_timers
from tests.unit_tests.train_utilities import TrainProgram


class TestTrainAgainWithOverlappedGradReduce:
    def teardown_method(self, method):
        TrainProgram.destroy()

    def test_second_call_accepts_no_sync_func_of_the_first(self):
        program = TrainProgram("--overlap-grad-reduce", "--use-distributed-optimizer")
        program.train(1)
        # The timer of the first call is still running.
        get_timers()._timers.pop("interval-time")
        program.train(1)
        assert program.args.curr_iteration == 1
