from unittest import mock

import pytest
from tests.unit_tests.framework_utilities import Off, import_alone

real = ("megatron.bridge.utils.import_utils",)
module = import_alone("megatron.bridge.training.checkpointing", "modelopt", real=real)


class TestLoadOfPretrainedCheckpoint:
    @pytest.mark.parametrize("error", [None, RuntimeError])
    def test_finetune_is_set_for_this_load_only(self, error):
        state = Off(cfg=Off(checkpoint=Off(load="own", pretrained_checkpoint="pretrained", finetune=False)))
        seen = []

        def load(folder, *args, **kwargs):
            seen.append((folder, state.cfg.checkpoint.finetune))
            if error is not None:
                raise error

        with mock.patch.multiple(
            module,
            checkpoint_exists=lambda folder: folder == "pretrained",
            is_hf_checkpoint_dir=lambda _: False,
            _has_global_non_persistent_checkpoint=lambda *_: False,
            _load_checkpoint_from_path=load,
        ):
            try:
                module.load_checkpoint(state, [], None, None)
            except RuntimeError:
                pass
        assert seen == [("pretrained", True)]
        assert state.cfg.checkpoint.finetune is False
