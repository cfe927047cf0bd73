from unittest import mock

import pytest
from framework_utilities import import_alone

module = import_alone("mcore_adapter.trainer.trainer", "accelerate", "transformers")


class TestTrainAgain:
    def setup_method(self):
        self.options = mock.MagicMock(gradient_accumulation_steps=1, max_steps=1, per_device_train_batch_size=1)
        self.options.logging_steps = self.options.eval_steps = self.options.save_steps = None

    def prepare(self, chunks, config):
        trainer = mock.MagicMock(args=self.options, models_wrapped=chunks)
        trainer.model.config = config
        trainer.get_train_dataloader.return_value = [None]
        trainer.num_examples.return_value = 1
        with mock.patch.multiple(module, get_model_param_count=lambda *_, **__: 0, mpu=mock.MagicMock()):
            module.mpu.get_data_parallel_world_size.return_value = 1
            module.McaTrainer._prepare_train_loop(trainer, 1, self.options)

    @pytest.mark.parametrize("count", [1, 2])
    def test_second_training_accepts_no_sync_of_the_first(self, count):
        chunks, config = [mock.MagicMock() for _ in range(count)], mock.MagicMock(no_sync_func=None)
        self.prepare(chunks, config)
        self.prepare(chunks, config)
        no_sync = [chunk.no_sync for chunk in chunks]
        assert config.no_sync_func == (no_sync if count > 1 else no_sync[0])

    def test_custom_no_sync_is_rejected(self):
        with pytest.raises(AssertionError, match="no_sync_func"):
            self.prepare([mock.MagicMock()], mock.MagicMock())
