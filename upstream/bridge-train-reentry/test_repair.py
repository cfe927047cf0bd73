import gc
from unittest import mock

from megatron.core.timers import Timers
from tests.unit_tests.framework_utilities import Off, import_alone

module = import_alone("megatron.bridge.training.train", "modelopt")


class TestTrainAgain:
    def setup_method(self):
        self.config = Off(param_sync_func=mock.MagicMock())
        cfg = Off(
            **{name: Off() for name in ("checkpoint", "ddp", "dist", "logger", "model", "optimizer", "validation")},
            train=Off(train_iters=0, manual_gc=True, manual_gc_interval=0),
        )
        train_state = Off(step=0, floating_point_operations_so_far=0)
        self.state = Off(cfg=cfg, train_state=train_state, timers=Timers(2, "minmax"))

    def teardown_method(self):
        gc.enable()

    def train(self):
        names = ("disable_forward_pre_hook", "get_forward_backward_func", "P2PCommunicator", "get_rerun_state_machine")
        with (
            mock.patch("torch.cuda.synchronize"),
            mock.patch("torch.distributed.barrier"),
            mock.patch.multiple(
                module,
                get_model_config=lambda _: self.config,
                get_num_microbatches=lambda: 1,
                is_full_iteration_cuda_graph=lambda _: False,
                should_disable_forward_pre_hook=lambda *_: True,
                should_fire=lambda *_: False,
                **{name: mock.MagicMock() for name in names},
            ),
        ):
            mocks = (mock.MagicMock() for _ in range(2))
            module.train(mock.MagicMock(), [mock.MagicMock()], None, None, None, None, self.state, *mocks)

    def test_second_call_starts_the_timer_again(self):
        self.train()
        self.train()

    def test_param_sync_func_survives_a_call_without_a_step(self):
        before = self.config.param_sync_func
        self.train()
        assert self.config.param_sync_func is before

    def test_garbage_collector_is_on_after_training(self):
        self.train()
        assert gc.isenabled()
