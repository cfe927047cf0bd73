from unittest import mock

import pytest
import torch
from megatron.core.timers import Timers
from tests.unit_tests.framework_utilities import Off, import_alone

module = import_alone("megatron.bridge.training.eval", "modelopt")


class TestUnfinishedEvaluate:
    def setup_method(self):
        self.timers = Timers(2, "minmax")
        self.config = Off(timers=self.timers)
        self.model = [torch.nn.Linear(1, 1)]
        names = ("dataset", "ddp", "model")
        self.train = Off(empty_unused_memory_level=0)
        cfg = Off(
            **{name: Off() for name in names},
            dist=Off(use_decentralized_pg=True),
            train=self.train,
            validation=Off(eval_iters=1, eval_global_batch_size=1, eval_micro_batch_size=1),
        )
        self.state = Off(cfg=cfg, timers=self.timers, start_time=0.0, train_state=Off(consumed_valid_samples=0))
        self.machine = mock.MagicMock()

    def evaluate(self, forward_backward):
        groups = mock.MagicMock(**{"dp.size.return_value": 1})
        with (
            mock.patch("torch.cuda.synchronize"),
            mock.patch("torch.distributed.barrier"),
            mock.patch("torch.distributed.all_reduce"),
            mock.patch("torch.tensor", return_value=mock.MagicMock()),
            mock.patch.multiple(
                module,
                P2PCommunicator=mock.MagicMock(),
                get_forward_backward_func=lambda **_: forward_backward,
                get_model_config=mock.MagicMock(),
                get_rerun_state_machine=lambda: self.machine,
                is_full_iteration_cuda_graph=lambda _: False,
                is_pp_last_stage=lambda _: False,
                should_fire=lambda *_: False,
            ),
        ):
            return module.evaluate(self.state, None, None, self.model, None, self.config, pg_collection=groups)

    def test_error(self):
        for _ in range(2):
            with pytest.raises(RuntimeError):
                self.evaluate(mock.MagicMock(side_effect=RuntimeError))
            assert self.model[0].training
            assert self.config.timers is self.timers
            self.machine.set_mode.assert_called_with(self.machine.get_mode())

    def test_time_limit(self):
        self.train.exit_duration_in_mins = 1
        for _ in range(2):
            assert self.evaluate(mock.MagicMock())[2]
            assert self.model[0].training
