from unittest import mock

import pytest
import torch
from framework_utilities import import_alone
from megatron.core.distributed.fsdp import mcore_fsdp_adapter

for name in ("FullyShardedDataParallelV1", "FullyShardedDataParallelV2"):  # Newer Megatron-Core has them.
    if not hasattr(mcore_fsdp_adapter, name):
        setattr(mcore_fsdp_adapter, name, type(name, (), {}))
absent = ("megatron.bridge", "ray", "transformers")
value = import_alone("nemo_rl.models.value.workers.megatron_value_worker", *absent)
policy = import_alone(
    "nemo_rl.models.policy.workers.megatron_policy_worker", *absent, real=("nemo_rl.utils.timer",)
)
POLICY, VALUE = policy.MegatronPolicyWorkerImpl, value.MegatronValueWorkerImpl


class TestMethodThatRaises:
    def teardown_method(self):
        torch.set_grad_enabled(True)

    def worker(self):
        worker = mock.MagicMock(timer=policy.Timer())
        for name in ("eval", "modules"):
            getattr(worker.model, name).side_effect = RuntimeError
        worker.move_model.side_effect = RuntimeError
        return worker

    @pytest.mark.parametrize(
        "method, arguments",
        [
            (POLICY.get_logprobs, {"data": None}),
            (POLICY.get_topk_logits, {"data": None, "k": 1}),
            (POLICY.offload_before_refit, {}),
            (POLICY.offload_after_refit, {}),
            (VALUE.get_values, {"data": None}),
        ],
    )
    def test_gradients_are_on_again(self, method, arguments):
        with mock.patch.object(torch.cuda, "memory_allocated", return_value=0), pytest.raises(RuntimeError):
            with mock.patch.object(torch.cuda, "memory_reserved", return_value=0):
                method(self.worker(), **arguments)
        assert torch.is_grad_enabled()

    @pytest.mark.parametrize(
        "method, arguments", [(POLICY.train, {"loss_fn": None}), (POLICY.get_logprobs, {})]
    )
    def test_timer_starts_again(self, method, arguments):
        worker = self.worker()
        for _ in range(2):
            with pytest.raises(RuntimeError):
                method(worker, data=None, **arguments)
