"""Setting up Megatron a second time is a bare AssertionError, even with the same values.

Symptom:
    `AssertionError: data parallel group is already initialized`, `num microbatches calculator is
    already initialized.` or `Rerun state machine is already initialized`, if a worker is set up
    again, a second trainer shares its process, or code asks for the rerun state machine before it
    is set up, which creates one.

Cause:
    Each global can be initialised once; a second call asserts.

Affects:
    Every release. No wrapper can know whether a second set-up means the first one:
    `ensure_initialized(model_parallel={...}, microbatches={...}, rerun={...})` initialises the
    globals that are not set yet, compares the others, and raises with both values if they differ.
    It does not cover the arguments of `megatron.training`.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/parallel_state.py,
    `initialize_model_parallel`, and similar functions.

Remove when:
    setting up twice with the same values does nothing.
"""

from __future__ import annotations

from typing import Any

from ._case import Helper

_TWO: dict[str, Any] = {"tensor_model_parallel_size": 2}


def reproduce(*, helped: bool) -> None:
    """Initialize the same process groups twice, which upstream refuses with an assertion.
    With `helped`, call `ensure_initialized` twice instead, which also sets up the microbatch
    calculator and the rerun state machine.
    """
    from megatron.core import parallel_state
    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

    from megatron_idempotent.window import ensure_initialized

    get_rerun_state_machine()  # creates one, disabled
    for _ in range(2):
        if not helped:
            parallel_state.initialize_model_parallel(**_TWO)
            continue
        ensure_initialized(
            model_parallel=_TWO,
            microbatches={
                "rank": 0,
                "rampup_batch_size": None,
                "global_batch_size": 8,
                "micro_batch_size": 2,
                "data_parallel_size": 1,
            },
            rerun={"mode": RerunMode.DISABLED},
        )


def control(*, helped: bool) -> list[int]:
    """Initialize the process groups once, as a control; return TP size, TP rank and DP size.
    With `helped`, call `ensure_initialized` afterwards, which finds the groups set up.
    """
    from megatron.core import parallel_state

    from megatron_idempotent.window import ensure_initialized

    parallel_state.initialize_model_parallel(**_TWO)
    if helped:
        ensure_initialized(model_parallel=_TWO)
    return [
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    ]


HELPER = Helper(
    summary="setting up groups, microbatch calculator or rerun machine again asserts",
    call="ensure_initialized",
    stock_error=r"AssertionError: .*group is already initialized",
)
