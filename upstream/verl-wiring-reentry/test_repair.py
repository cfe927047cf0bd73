from types import SimpleNamespace
from unittest import mock

import pytest
from framework_utilities import import_alone
from megatron.core.distributed import DistributedDataParallel as DDP

module = import_alone("verl.utils.megatron_utils", "transformers")


class TestRegisterMegatronTrainingHooks:
    def setup_method(self):
        self.config = SimpleNamespace(no_sync_func=None)

    def chunk(self):
        ddp_config = SimpleNamespace(overlap_grad_reduce=True)
        return mock.MagicMock(spec=DDP, config=self.config, ddp_config=ddp_config)

    def register(self, model):
        with mock.patch.object(module, "DDP", DDP):
            module.register_megatron_training_hooks(model, mock.MagicMock())

    @pytest.mark.parametrize("count", [1, 2])
    def test_chunks_may_share_a_config_and_be_registered_again(self, count):
        model = [self.chunk() for _ in range(count)]
        self.register(model)
        self.register(model)
        no_sync = [chunk.no_sync for chunk in model]
        assert self.config.no_sync_func == (no_sync if count > 1 else no_sync[0])

    def test_custom_no_sync_is_rejected(self):
        self.config.no_sync_func = mock.MagicMock()
        with pytest.raises(AssertionError, match="no_sync_func"):
            self.register([self.chunk()])
