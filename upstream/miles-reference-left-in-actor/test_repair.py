import sys
from unittest import mock

import pytest
from framework_utilities import Off, import_alone

module = import_alone("miles.backends.megatron_utils.actor", "ray", "torch_memory_saver", "transformers")

EXPORT = "miles.backends.megatron_utils.hf_export"


class TestActorAfterAnotherModel:
    def setup_method(self):
        self.seen = []
        self.actor = actor = module.MegatronTrainRayActor.__new__(module.MegatronTrainRayActor)
        actor.args, actor.role, actor.with_ref, actor._asleep = Off(), "actor", True, False
        actor._heartbeat = mock.MagicMock()
        actor.model, actor.optimizer, actor.opt_param_scheduler = [], None, None
        actor.rollout_manager = mock.MagicMock()
        actor.weights_backuper = mock.MagicMock(backup_tags={"actor", "ref"})
        actor.weight_updater = mock.MagicMock(**{"update_weights.side_effect": self.record})
        actor._active_model_tag = "ref"

    def record(self, *args, **kwargs):
        self.seen.append(self.actor._active_model_tag)

    def call(self, name):
        arguments = {
            "export_hf": (0, "path"),
            "load_other_checkpoint": ("ref", "path"),
            "save_model": (0,),
            "update_weights": (Off(rollout_engines=[None]),),
        }
        with (
            mock.patch.object(module, "is_multi_lora_enabled", lambda _: False),
            mock.patch.dict(sys.modules, {EXPORT: mock.MagicMock(save_hf_model=self.record)}),
            mock.patch.object(module, "save", self.record),
            mock.patch.object(module, "load_checkpoint", side_effect=FileNotFoundError),
            mock.patch.object(module, "dist", mock.MagicMock()),
        ):
            getattr(self.actor, name)(*arguments[name])

    @pytest.mark.parametrize("name", ["update_weights", "save_model", "export_hf"])
    def test_own_weights_are_used(self, name):
        self.call(name)
        assert self.seen == ["actor"]
        self.actor.weights_backuper.restore.assert_called_once_with("actor")

    def test_weights_are_unknown_after_a_load_that_raised(self):
        self.actor._active_model_tag = "actor"
        with pytest.raises(FileNotFoundError):
            self.call("load_other_checkpoint")
        self.call("update_weights")
        self.actor.weights_backuper.restore.assert_called_once_with("actor")
