from unittest import mock

import pytest
from framework_utilities import import_alone
from megatron.core.distributed.fsdp import mcore_fsdp_adapter

for name in ("FullyShardedDataParallelV1", "FullyShardedDataParallelV2"):  # Newer Megatron-Core has them.
    if not hasattr(mcore_fsdp_adapter, name):
        setattr(mcore_fsdp_adapter, name, type(name, (), {}))
worker_module = "nemo_rl.models.policy.workers.megatron_policy_worker"
module = import_alone(worker_module, "megatron.bridge", "ray", "transformers")


class TestUseReferenceModel:
    @pytest.mark.parametrize("error", [None, RuntimeError])
    def test_policy_is_restored(self, error):
        worker = mock.MagicMock(cfg={"megatron_cfg": {"empty_unused_memory_level": 0}}, sampling_params=None)
        worker.model.state_dict.return_value = {"weight": "policy"}
        worker.reference_state_dict = {"weight": "reference"}
        loaded = []
        worker._apply_state_dict_to_model = lambda state, **_: loaded.append(state["weight"])
        try:
            with module.MegatronPolicyWorkerImpl.use_reference_model(worker):
                assert loaded == ["reference"]
                if error is not None:
                    raise error
        except RuntimeError:
            assert error is not None
        assert loaded == ["reference", "policy"]
        worker.enable_forward_pre_hook.assert_called_once()
