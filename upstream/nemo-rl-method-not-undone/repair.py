"""NeMo-RL's workers turn gradients on again, and can start their timers, after an exception."""

from upstream.edits import Edit, Repair, before, decorate, replace

_POLICY = "nemo_rl.models.policy.workers.megatron_policy_worker:MegatronPolicyWorkerImpl"
_VALUE = "nemo_rl.models.value.workers.megatron_value_worker:MegatronValueWorkerImpl"


def _without_gradients(method: str) -> tuple[Edit, ...]:
    """Return `Edit`s that replace a method's own use of `torch.no_grad` by a decorator."""
    return (
        replace(method, "no_grad = torch.no_grad()", ""),
        replace(method, "no_grad.__enter__()", ""),
        replace(method, "no_grad.__exit__(", ""),
        decorate(method, "@torch.no_grad()"),
    )


def _restartable(method: str, label: str) -> Edit:
    """Return an `Edit` that lets a method reset its timer `label` before it starts the timer."""
    return before(
        method,
        f'self.timer.start("{label}")',
        f"""
        # An earlier call may have raised before it stopped this timer.
        self.timer.reset("{label}")
        """,
    )


REPAIR = Repair(
    edits=(
        *_without_gradients(f"{_POLICY}.get_logprobs"),
        *_without_gradients(f"{_POLICY}.get_topk_logits"),
        *_without_gradients(f"{_POLICY}.offload_before_refit"),
        *_without_gradients(f"{_POLICY}.offload_after_refit"),
        *_without_gradients(f"{_VALUE}.get_values"),
        _restartable(f"{_POLICY}.train", "train"),
        _restartable(f"{_POLICY}.get_logprobs", "get_logprobs"),
    ),
)
