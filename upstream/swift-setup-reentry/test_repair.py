from types import SimpleNamespace
from unittest import mock

import pytest
from framework_utilities import Off, import_alone
from megatron.core.distributed import DistributedDataParallel as DDP

module = import_alone('swift.megatron.trainers.base', 'mcore_bridge', 'modelscope', 'transformers')


class TestTrainAgain:

    def setup_method(self):
        self.config = SimpleNamespace(no_sync_func=None, param_sync_func=None)
        self.trainer = SimpleNamespace(
            args=Off(overlap_grad_reduce=True),
            call_event=mock.MagicMock(),
            config=self.config,
            optimizer=mock.MagicMock(),
            state=SimpleNamespace(iteration=0))

    def setup(self, chunks):
        self.trainer.wrapped_models = chunks
        with mock.patch.multiple(module, should_disable_forward_pre_hook=lambda _: True):
            module.BaseMegatronTrainer.setup_model_training(self.trainer)

    @pytest.mark.parametrize('count', [1, 2])
    def test_second_training_accepts_no_sync_of_the_first(self, count):
        chunks = [mock.MagicMock(spec=DDP) for _ in range(count)]
        self.setup(chunks)
        self.setup(chunks)
        no_sync = [chunk.no_sync for chunk in chunks]
        assert self.config.no_sync_func == (no_sync if count > 1 else no_sync[0])

    def test_custom_no_sync_is_rejected(self):
        self.config.no_sync_func = mock.MagicMock()
        with pytest.raises(AssertionError, match='no_sync_func'):
            self.setup([mock.MagicMock(spec=DDP)])

    def test_param_sync_func_survives_a_training_without_a_step(self):
        before = self.config.param_sync_func = mock.MagicMock()
        self.trainer.args.overlap_grad_reduce = False
        self.setup([mock.MagicMock(spec=DDP)])
        self.setup([mock.MagicMock(spec=DDP)])
        assert self.trainer._saved_param_sync_func is before
