"""A `config.finalize_model_grads_func` of the caller's through calls of `train()`."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_idempotent.patching.source import locate

pytestmark = pytest.mark.skipif(
    locate("megatron.training.training") is None,
    reason="this release's wheel does not carry megatron.training",
)


def called(offloaded: bool) -> list[int]:
    """Runs on a rank: how often the caller's function ran, after each of three `train()` calls."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.training import get_args

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import program

    megatron_idempotent.apply()
    running = program.start(["--use-distributed-optimizer"])
    # The flag itself wants Transformer Engine, for the copies, of which there are none here.
    get_args().offload_optimizer_states = offloaded
    calls = []

    def custom(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        finalize_model_grads(*args, **kwargs)

    running.train(1)  # leaves what `train()` has set in the config
    running.train(1)
    running.config.finalize_model_grads_func = custom
    found = []
    for _ in range(3):
        running.train(1)
        found.append(len(calls))
    return found


@pytest.mark.parametrize("offloaded", [False, True])
def test_the_caller_s_function_is_called_once_a_step_in_every_train(offloaded, megatron_ranks):
    assert megatron_ranks(2, called, offloaded) == [[1, 2, 3]] * 2
