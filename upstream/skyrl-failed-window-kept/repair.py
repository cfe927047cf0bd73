"""SkyRL drops a window in which a call raised, and refuses the step that would have used it."""

from upstream.edits import Repair, after, first, wrap

_WRAPPER = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper:MegatronModelWrapper"

REPAIR = Repair(
    edits=(
        after(
            f"{_WRAPPER}.__init__",
            "self._pending_grad_sync: Optional[dict] = None",
            "self._window_lost = False",
        ),
        wrap(
            f"{_WRAPPER}.forward_backward_mini_batch",
            "with router_replay_schedule(replay_enabled)",
            "try:",
            """
            except BaseException:
                if not forward_only:
                    # This call's gradients cannot be told from those of earlier calls.
                    self._window_lost = self._window_lost or self._pending_grad_sync is not None
                    self._pending_grad_sync = None
                    for module in self.actor_module:
                        module.zero_grad_buffer()
                raise
            """,
        ),
        first(
            f"{_WRAPPER}.run_pending_grad_sync",
            """
            if self._window_lost:
                self._window_lost, self._pending_grad_sync = False, None
                for module in self.actor_module:
                    module.zero_grad_buffer()
                raise RuntimeError(
                    "A forward_backward raised after others had succeeded, and their gradients are lost. "
                    "Run the whole window again."
                )
            """,  # noqa: E501
        ),
    ),
)
