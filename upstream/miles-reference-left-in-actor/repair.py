"""miles' actor switches back to its own weights before it sends, saves or exports them."""

from upstream.edits import Repair, before

_ACTOR = "miles.backends.megatron_utils.actor:MegatronTrainRayActor"
_CALL = "self._use_actor_weights()"

REPAIR = Repair(
    edits=(
        before(
            _ACTOR,
            "def _set_replay_stage",
            """
            def _use_actor_weights(self) -> None:
                # train_actor may have raised while the weights of another model were loaded.
                if self.role == "actor" and not self._asleep and self._active_model_tag != "actor":
                    self._switch_model("actor")

            """,
        ),
        before(f"{_ACTOR}.save_model", "if is_multi_lora_enabled(self.args)", _CALL),
        before(f"{_ACTOR}.export_hf", "save_hf_model(self.args, rollout_id", _CALL),
        before(f"{_ACTOR}.update_weights", "self.weight_updater.update_weights()", _CALL),
        before(
            f"{_ACTOR}.load_other_checkpoint",
            "load_checkpoint(",
            "self._active_model_tag = None",
        ),
    ),
)
