"""slime's load of another checkpoint restores the arguments also if it raises."""

from upstream.edits import Repair, wrap

REPAIR = Repair(
    edits=(
        wrap(
            "slime.backends.megatron_utils.actor:MegatronTrainRayActor.load_other_checkpoint",
            "load_checkpoint(",
            "try:",
            """
            finally:
                # A caller may go on after a load that raised.
            """,
            below="= old_args",
        ),
    ),
)
