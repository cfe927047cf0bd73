"""slime's actor switches back to its own weights before it sends or saves them."""

from upstream.edits import Repair, after, before, replace

_ACTOR = "slime.backends.megatron_utils.actor:MegatronTrainRayActor"

REPAIR = Repair(
    edits=(
        replace(f"{_ACTOR}.init", 'self._switch_model("actor")', ""),
        after(
            f"{_ACTOR}.init",
            "clear_memory()",
            """

            # recover to actor in the end.
            self._switch_model("actor")
            """,
        ),
        before(
            f"{_ACTOR}.save_model",
            "save(rollout_id, self.model, self.optimizer, self.opt_param_scheduler)",
            """
            # train_actor may have raised while the weights of another model were loaded.
            if self.role == "actor" and self._active_model_tag != "actor":
                self._switch_model("actor")

            """,
        ),
        before(
            f"{_ACTOR}.update_weights",
            "self.weight_updater.update_weights()",
            """
            if not self.args.offload_train and self._active_model_tag != "actor":
                self._switch_model("actor")
            """,
        ),
        before(
            f"{_ACTOR}.load_other_checkpoint",
            "load_checkpoint(",
            "self._active_model_tag = None",
        ),
    ),
)
