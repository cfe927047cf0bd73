"""NeMo-RL's `use_reference_model` restores the policy also if its block raises."""

from upstream.edits import Repair, wrap

REPAIR = Repair(
    edits=(
        wrap(
            "nemo_rl.models.policy.workers.megatron_policy_worker:"
            "MegatronPolicyWorkerImpl.use_reference_model",
            "yield",
            "try:",
            """
            finally:
                # The block may have raised, and its caller may go on with the policy.
            """,
            below="...",
        ),
    ),
)
