"""Additions of Megatron above 0.19 beside the patches: readiness of parameters, more groups."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from megatron_idempotent.patching.source import locate, read_body


def _defines(module: str, name: str) -> bool:
    path = locate(module)
    return path is not None and read_body(path, name) is not None


needs_readiness = pytest.mark.skipif(
    not _defines("megatron.core.utils", "ensure_params_ready"),
    reason="this release has no ensure_params_ready()",
)


def windows_read_in_between(overlap: bool) -> list[Any]:
    """Runs on a rank: parameters as a reader finds them at odd moments of three steps."""
    import torch
    from megatron.core.utils import ensure_params_ready

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply()
    model = tiny.build(overlap_param_gather=overlap)
    parameters = [p for chunk in model.chunks for p in chunk.parameters()]
    found: list[Any] = []

    def read() -> None:
        ensure_params_ready(parameters)
        found.append(torch.cat([p.detach().flatten().clone() for p in parameters]))

    for seed in range(3):
        read()  # after a step: starts the gathers, and waits for them
        # In the middle of a window: between two of its microbatches.
        model.on_microbatch = lambda index, loss: read() if loss is None else None
        model.forward_backward(2, data_seed=seed)
        model.on_microbatch = None
        model.step()
        if seed == 1:
            for chunk in model.chunks:
                if overlap:
                    chunk.start_param_sync()  # in flight
            read()
    megatron_idempotent.ensure_params_synced(model.chunks)
    found.append(model.parameters())
    return found


@needs_readiness
def test_a_reader_that_starts_gathers_sees_what_it_would_see_without_overlap(megatron_ranks):
    import torch

    plain = megatron_ranks(2, windows_read_in_between, False)
    overlapped = megatron_ranks(2, windows_read_in_between, True)
    for one, other in zip(plain, overlapped, strict=True):
        assert len(one) == len(other) == 11
        assert all(map(torch.equal, one, other))


def read_with_hooks_off() -> bool:
    """Runs on a rank: a reader where the caller gathers, which must find nothing to start."""
    import torch
    from megatron.core.utils import ensure_params_ready

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply()
    model = tiny.build(overlap_param_gather=True)
    model.forward_backward(2, data_seed=0)
    model.step()
    step = megatron_idempotent.TrainStep(
        model.chunks, model.optimizer, None, forward=lambda model, rows: model(rows)
    )
    with step.reading():
        before = model.parameters()
        ensure_params_ready([p for chunk in model.chunks for p in chunk.parameters()])
        return torch.equal(before, model.parameters())


@needs_readiness
def test_a_reader_changes_nothing_inside_of_reading(megatron_ranks):
    assert megatron_ranks(2, read_with_hooks_off) == [True, True]


def cycles_with_gathered_weights() -> list[int]:
    """Runs on a rank: live groups after each cycle whose weights are gathered when used."""
    from megatron.core import parallel_state
    from torch.distributed import distributed_c10d

    import megatron_idempotent

    megatron_idempotent.apply()
    known = inspect.signature(parallel_state.initialize_model_parallel).parameters
    if "gtp_remat_size" not in known:
        return []
    live = []
    for _ in range(3):
        parallel_state.initialize_model_parallel(gtp_remat_size=2, expert_gtp_remat_size=2)
        parallel_state.destroy_model_parallel()
        live.append(len(distributed_c10d._world.pg_map))
    return live


def test_groups_of_weights_that_are_gathered_when_used_go_with_the_others(megatron_ranks):
    found = megatron_ranks(2, cycles_with_gathered_weights)
    if found == [[], []]:
        pytest.skip("this release has no weight rematerialisation")
    assert found == [[1, 1, 1]] * 2
