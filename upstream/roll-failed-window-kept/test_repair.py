from unittest import mock

import pytest
from framework_utilities import import_alone

absent = ("codetiming", "datasets", "mcore_adapter", "peft", "ray", "tensordict", "transformers")
module = import_alone("roll.distributed.strategy.megatron_strategy", *absent)


class TestTrainStepThatRaises:
    @pytest.mark.parametrize("where", ["forward_backward_func", "optimizer.step"])
    def test_gradients_are_zeroed(self, where):
        strategy, chunk, batch = mock.MagicMock(), mock.MagicMock(), mock.MagicMock()
        strategy.configure_mock(enable_router_replay=False, use_sequence_packing=False)
        strategy.worker_config.use_dynamic_batching_in_train = False
        strategy.worker_config.training_args.per_device_train_batch_size = 1
        strategy.megatron_train_args.gradient_accumulation_steps = 1
        strategy.model.__iter__.side_effect = lambda: iter([chunk])
        strategy.model.__len__.return_value = 1
        strategy.optimizer.step.return_value = (True, 1.0, 0)
        strategy.configure_mock(**{f"{where}.side_effect": RuntimeError})
        batch.batch.batch_size = [1]
        with mock.patch.object(module, "mpu", mock.MagicMock()), pytest.raises(RuntimeError):
            module.MegatronTrainStrategy.train_step(strategy, batch, None)
        chunk.zero_grad_buffer.assert_called_once()
        strategy.optimizer.zero_grad.assert_called_once()
