from types import SimpleNamespace
from unittest import mock

import pytest
from megatron.core.distributed import DistributedDataParallel as DDP
from tests.unit_tests.framework_utilities import import_alone

module = import_alone("megatron.bridge.training.setup", "modelopt")


class TestSetupAgain:
    @pytest.fixture(autouse=True)
    def without_fsdp(self, monkeypatch):
        monkeypatch.setattr(module, "MEGATRON_FSDP_TYPES", ())

    def setup_method(self):
        self.config = SimpleNamespace(no_sync_func=None)
        self.ddp_config = SimpleNamespace(overlap_grad_reduce=True, overlap_param_gather=False)

    def wire(self, model):
        module._update_model_config_funcs(model, self.config, self.ddp_config, None)

    @pytest.mark.parametrize("chunks", [1, 2])
    def test_another_model_takes_over_the_config(self, chunks):
        first, second = ([DDP.__new__(DDP) for _ in range(chunks)] for _ in range(2))
        self.wire(first)
        self.wire(second)
        installed = self.config.no_sync_func
        assert (installed if chunks > 1 else [installed])[0].__self__ is second[0]

    def test_custom_function_is_rejected(self):
        self.config.no_sync_func = mock.MagicMock()
        with pytest.raises(AssertionError, match="no_sync_func"):
            self.wire([DDP.__new__(DDP)])
