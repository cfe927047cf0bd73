"""Additions of Megatron above 0.19 beside the patches: readiness of parameters, more groups."""

from __future__ import annotations

import inspect

import pytest
from ranks import built, on_microbatch, on_ranks, same

import megatron_idempotent
from megatron_idempotent.patching.source import locate, read_body


def _defines(module: str, name: str) -> bool:
    path = locate(module)
    return path is not None and read_body(path, name) is not None


needs_readiness = pytest.mark.skipif(
    not _defines("megatron.core.utils", "ensure_params_ready"),
    reason="this release has no ensure_params_ready()",
)


@needs_readiness
@on_ranks(2)
def test_a_reader_that_starts_gathers_sees_what_it_would_see_without_overlap():
    """Parameters as a reader finds them at odd moments of three steps."""
    import torch
    from megatron.core.utils import ensure_params_ready

    def read_in_between(overlap: bool) -> list:
        model = built(overlap_param_gather=overlap)
        parameters = [p for chunk in model.chunks for p in chunk.parameters()]
        found = []

        def read(*_) -> None:
            ensure_params_ready(parameters)
            found.append(torch.cat([p.detach().flatten().clone() for p in parameters]))

        for seed in range(3):
            read()  # after a step: starts the gathers, and waits for them
            # In the middle of a window: between two of its microbatches.
            with on_microbatch(model, lambda index, loss: read() if loss is None else None):
                model.forward_backward(2, data_seed=seed)
            model.step()
            if seed == 1:
                for chunk in model.chunks if overlap else ():
                    chunk.start_param_sync()  # in flight
                read()
        megatron_idempotent.ensure_params_synced(model.chunks)
        return [*found, model.parameters()]

    plain, overlapped = read_in_between(False), read_in_between(True)
    assert len(plain) == len(overlapped) == 11
    assert all(map(same, plain, overlapped))


@needs_readiness
@on_ranks(2)
def test_a_reader_changes_nothing_inside_of_reading():
    """The caller gathers, and so a reader must find nothing to start."""
    from megatron.core.utils import ensure_params_ready

    model = built(overlap_param_gather=True)
    model.train_step(2, data_seed=0)
    step = megatron_idempotent.TrainStep(
        model.chunks, model.optimizer, None, forward=lambda model, rows: model(rows)
    )
    with step.reading():
        before = model.parameters()
        ensure_params_ready([p for chunk in model.chunks for p in chunk.parameters()])
        assert same(before, model.parameters())


@on_ranks(2)
def test_groups_of_weights_that_are_gathered_when_used_go_with_the_others():
    from megatron.core import parallel_state
    from torch.distributed import distributed_c10d

    megatron_idempotent.apply()
    known = inspect.signature(parallel_state.initialize_model_parallel).parameters
    for _ in range(3 if "gtp_remat_size" in known else 0):
        parallel_state.initialize_model_parallel(gtp_remat_size=2, expert_gtp_remat_size=2)
        parallel_state.destroy_model_parallel()
        assert len(distributed_c10d._world.pg_map) == 1
