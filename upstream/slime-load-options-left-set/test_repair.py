from unittest import mock

import pytest
from framework_utilities import Off, import_alone

module = import_alone("slime.backends.megatron_utils.actor", "ray", "torch_memory_saver", "transformers")


class TestLoadOtherCheckpoint:
    @pytest.mark.parametrize("error", [None, FileNotFoundError])
    def test_arguments_are_restored(self, error):
        before = dict(load="own", no_load_optim=False, no_load_rng=False, finetune=False, ckpt_step=None)
        actor = module.MegatronTrainRayActor.__new__(module.MegatronTrainRayActor)
        actor.args = Off(**before, ref_ckpt_step=7)
        actor.model, actor.weights_backuper = [], mock.MagicMock()
        seen = []

        def load(*args, **kwargs):
            seen.append((actor.args.load, actor.args.ckpt_step))
            if error is not None:
                raise error
            return 0, 0

        with mock.patch.object(module, "load_checkpoint", load):
            try:
                actor.load_other_checkpoint("ref", "reference")
            except FileNotFoundError:
                pass
        assert seen == [("reference", 7)]
        assert {name: getattr(actor.args, name) for name in before} == before
