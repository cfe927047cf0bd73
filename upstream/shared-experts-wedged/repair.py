"""The first piece of overlapped shared experts starts again after a forward that raised."""

from upstream.edits import Repair, before

REPAIR = Repair(
    edits=(
        before(
            "megatron.core.transformer.moe.shared_experts:overlap_state_check.decorator.wrapper",
            "self._overlap_state == required_state",
            """
            # An exception between two pieces leaves the state, and a new forward starts again.
            if required_state == SharedExpertState.IDLE:
                self._overlap_state = SharedExpertState.IDLE
            """,
        ),
    ),
    unit_tests=("transformer/moe/test_shared_experts.py",),
)
