"""ensure_initialized() sets up once, and never hides that something is up otherwise."""

from __future__ import annotations

import re

BATCHES = {"rampup_batch_size": None, "global_batch_size": 8, "micro_batch_size": 2}


def said() -> list[str]:
    """Runs on a rank: what each of a series of calls returns or raises."""
    from megatron.core import parallel_state

    from megatron_idempotent.window import ensure_initialized

    heard = []

    def call(**parts):
        try:
            heard.append(str(ensure_initialized(**parts)))
        except (ValueError, TypeError) as error:
            heard.append(f"{type(error).__name__}: {error}")

    two = {"tensor_model_parallel_size": 2}
    call(model_parallel=two)
    call(model_parallel={**two, "expert_tensor_parallel_size": 2})
    call(model_parallel={})
    call(model_parallel={**two, "distributed_timeout_minutes": 5})
    call(microbatches={"rank": 0, "data_parallel_size": 1, **BATCHES}, model_parallel=two)
    call(microbatches={"rank": 1, "data_parallel_size": 1, **BATCHES})
    call(microbatches={"rank": 0, "data_parallel_size": 2, **BATCHES})
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**two)  # by somebody else
    call(model_parallel=two)
    call(model_parallel={**two, "distributed_timeout_minutes": 5})
    call(model_parallel={"tensor": 2})
    return heard


SAID = (
    r"^\['model_parallel'\]$",
    r"^\[\]$",
    r"^ValueError: .*tensor_model_parallel_size=1, and model_parallel is up with 2: call",
    r"^ValueError: .*distributed_timeout_minutes=5, and model_parallel is up with 30",
    r"^\['microbatches'\]$",
    r"^\[\]$",
    r"^ValueError: .*data_parallel_size=2, and microbatches is up with 1: call reconfigure",
    r"^\[\]$",
    r"^ValueError: .*distributed_timeout_minutes=5, and model_parallel was set up elsewhere",
    r"^TypeError: .*'tensor'",
)


def test_a_second_set_up_is_compared_with_the_first(megatron_ranks):
    for heard in megatron_ranks(2, said):
        for text, pattern in zip(heard, SAID, strict=True):
            assert re.search(pattern, text), text
