from unittest import mock

import pytest
from framework_utilities import Off, import_alone

absent = ("huggingface_hub", "loguru", "megatron.bridge", "omegaconf", "peft", "ray", "transformers")
module = import_alone("skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper", *absent)


class TestForwardBackwardThatRaises:
    def setup_method(self):
        self.wrapper = module.MegatronModelWrapper.__new__(module.MegatronModelWrapper)
        self.chunk = mock.MagicMock()
        self.wrapper.__dict__.update(
            is_vlm=False, cfg=mock.MagicMock(), policy_loss_fn=None, actor_module=[self.chunk], _pending_grad_sync=None
        )
        self.wrapper._window_lost = False

    def run(self, forward_backward, **options):
        with mock.patch.multiple(
            module,
            get_forward_backward_func=lambda: forward_backward,
            get_model_config=lambda _: Off(),
            make_batch_generator=lambda *_, **__: iter(()),
            mpu=mock.MagicMock(),
        ):
            self.wrapper.forward_backward_mini_batch([], 1, 1, **options)

    def fail(self, **options):
        with pytest.raises(ZeroDivisionError):
            self.run(mock.MagicMock(side_effect=ZeroDivisionError), **options)

    def step(self):
        with mock.patch.object(module, "finalize_model_grads", mock.MagicMock()) as finalize:
            self.wrapper.run_pending_grad_sync()
        finalize.assert_called_once()

    def test_first_call_of_a_window(self):
        self.fail()
        self.chunk.zero_grad_buffer.assert_called_once()
        self.step()

    def test_later_call_of_a_window(self):
        self.wrapper._pending_grad_sync = {"num_tokens": None}
        self.fail()
        with pytest.raises(RuntimeError, match="whole window"):
            self.step()
        self.step()

    def test_forward_only(self):
        self.wrapper._pending_grad_sync = {"num_tokens": None}
        self.fail(forward_only=True)
        self.chunk.zero_grad_buffer.assert_not_called()
        self.step()
