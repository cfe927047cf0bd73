import gc
from types import SimpleNamespace
from unittest import mock

import pytest
from framework_utilities import import_alone
from megatron.core.distributed import DistributedDataParallel as DDP

module = import_alone("slime.backends.megatron_utils.model", "tqdm")


class TestTrainOncePerRollout:
    def setup_method(self):
        self.config = SimpleNamespace(no_sync_func=None, param_sync_func=None)
        self.model = [mock.MagicMock(spec=DDP)]
        self.args = mock.MagicMock(reset_optimizer_states=False, enable_mtp_training=False, manual_gc_interval=0)

    def teardown_method(self):
        gc.enable()

    def train(self, steps=1, step=lambda *args, **kwargs: ({}, 0.0)):
        ranks = {"get_data_parallel_rank.return_value": 1}
        with mock.patch.multiple(
            module,
            get_args=lambda: self.args,
            get_model_config=lambda _: self.config,
            mpu=mock.MagicMock(**ranks),
            train_one_step=step,
            should_disable_forward_pre_hook=lambda _: True,
        ):
            module.train(0, self.model, mock.MagicMock(), mock.MagicMock(), [], [1] * steps, [1] * steps)

    def test_second_rollout_accepts_no_sync_of_the_first(self):
        self.train()
        self.train()

    def test_custom_no_sync_is_rejected(self):
        self.config.no_sync_func = mock.MagicMock()
        with pytest.raises(AssertionError, match="no_sync_func"):
            self.train()

    def test_garbage_collector_is_on_between_rollouts(self):
        self.train()
        assert gc.isenabled()

    @pytest.mark.parametrize("steps", [0, 1])
    def test_param_sync_func_survives_a_rollout_without_a_step(self, steps):
        step = mock.MagicMock(side_effect=RuntimeError)
        try:
            self.train(steps, step)
        except RuntimeError:
            pass
        assert self.config.param_sync_func == self.model[0].start_param_sync
