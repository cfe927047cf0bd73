"""Initialises Megatron's globals once; sets the config's functions and the seeds for training.

All functions are safe to repeat. A global that already has another value is an error.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from megatron.core import (
    distributed,
    num_microbatches_calculator,
    parallel_state,
    rerun_state_machine,
)
from megatron.core.tensor_parallel import random as megatron_random

from megatron_idempotent.megatron.ddp import checked_chunks
from megatron_idempotent.megatron.optimizers import LossScale
from megatron_idempotent.megatron.training import STAGE_OFFSET
from megatron_idempotent.patching.base import PerProcessDict

from .accumulation import configs_of

#: Name of a global → its object, and the arguments with which this module initialised it.
_initialised: dict[str, tuple[object, dict[str, Any]]] = PerProcessDict(__name__, "_initialised")


def ensure_initialized(
    *,
    model_parallel: Mapping[str, Any] | None = None,
    microbatches: Mapping[str, Any] | None = None,
    rerun: Mapping[str, Any] | None = None,
) -> list[str]:
    """Initialise Megatron's globals that are not set; raise if one is set to another value.

    Each argument holds the keyword arguments of one of Megatron's functions; None leaves that part
    alone. Missing arguments are compared as upstream's defaults. With `model_parallel` all ranks
    call it, because initialising creates process groups.

    Args:
        model_parallel: arguments of `parallel_state.initialize_model_parallel`.
        microbatches: arguments of `init_num_microbatches_calculator`.
        rerun: arguments of `initialize_rerun_state_machine`; upstream makes a machine of its own at
            first use.

    Returns:
        The names of the parts that this call has initialised.

    Raises:
        ValueError: a part is already set to another value, or to one that cannot be read back.
        TypeError: upstream's function does not take one of the arguments.

    Example:
        ensure_initialized(model_parallel={"pipeline_model_parallel_size": 2})
    """
    arguments = {"model_parallel": model_parallel, "microbatches": microbatches, "rerun": rerun}
    parts = [part for part in _parts() if arguments[part.name] is not None]
    missing = []
    # Compare all before anything is changed.
    for part in parts:
        values = _with_defaults(part.function, arguments[part.name] or {})
        if part.holder() is None:
            missing.append((part, values))
        else:
            _compare(part, values)
    for part, values in missing:
        part.initialise(**(arguments[part.name] or {}))
        _initialised[part.name] = part.holder(), values
    return [part.name for part, _ in missing]


class _Global(NamedTuple):
    """Describes one of Megatron's globals: how to initialise, read and compare it."""

    name: str
    function: Callable[..., Any]
    """Its signature has the arguments that are compared, and their defaults."""
    initialise: Callable[..., None]
    holder: Callable[[], object]
    """Returns the global's object, or None if it is not set."""
    values: Callable[[], dict[str, Any]]
    """Returns the arguments with which the global was initialised, if upstream keeps them."""
    remedy: str


def _parts() -> list[_Global]:
    calculator, machine = num_microbatches_calculator, rerun_state_machine
    return [
        _Global(
            "model_parallel",
            parallel_state.initialize_model_parallel,
            parallel_state.initialize_model_parallel,
            _groups,
            _group_sizes,
            "parallel_state.destroy_model_parallel()",
        ),
        _Global(
            "microbatches",
            calculator.init_num_microbatches_calculator,
            calculator.init_num_microbatches_calculator,
            lambda: calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR,
            _batch_sizes,
            "reconfigure_num_microbatches_calculator()",
        ),
        _Global(
            "rerun",
            machine.RerunStateMachine,
            machine.initialize_rerun_state_machine,
            lambda: machine._GLOBAL_RERUN_STATE_MACHINE,
            _rerun_values,
            "destroy_rerun_state_machine()",
        ),
    ]


def _compare(part: _Global, arguments: dict[str, Any]) -> None:
    name, remedy, current = part.name, part.remedy, part.values()
    holder, earlier = _initialised.get(name, (None, {}))
    if holder is part.holder():
        current = {**earlier, **current}  # upstream's values win over those remembered here
    defaults = _with_defaults(part.function, {}, partial=True)
    for key, value in arguments.items():
        if key == "rank":  # only decides who logs
            continue
        if key == "expert_tensor_parallel_size" and value is None:
            # None means the tensor-parallel size.
            value = arguments["tensor_model_parallel_size"]
        if key in current:
            if current[key] != value:
                raise ValueError(
                    f"ensure_initialized() got {key}={value!r}, and {name} is up with "
                    f"{current[key]!r}: call {remedy} first, or pass that value"
                )
        elif key not in defaults or value != defaults[key]:
            raise ValueError(
                f"ensure_initialized() got {key}={value!r}, and {name} was set up elsewhere, so "
                f"its value is not known: call {remedy} first, or leave it out"
            )


def _with_defaults(
    function: Callable[..., Any], arguments: Mapping[str, Any], *, partial: bool = False
) -> dict[str, Any]:
    signature = inspect.signature(function)
    call = signature.bind_partial(**arguments) if partial else signature.bind(**arguments)
    call.apply_defaults()
    return dict(call.arguments)


def _groups() -> object:
    # Each initialisation makes another group object.
    if not parallel_state.model_parallel_is_initialized():
        return None
    return parallel_state.get_tensor_model_parallel_group()


def _group_sizes() -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": (
            parallel_state.get_virtual_pipeline_model_parallel_world_size()
        ),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def _batch_sizes() -> dict[str, Any]:
    calculator = num_microbatches_calculator
    micro = calculator.get_micro_batch_size()
    global_batch_size = calculator.get_current_global_batch_size()
    per_replica = micro * calculator.get_num_microbatches()
    return {
        "micro_batch_size": micro,
        "global_batch_size": global_batch_size,
        "data_parallel_size": global_batch_size // per_replica,
    }


def _rerun_values() -> dict[str, Any]:
    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    names = ("mode", "state_save_func", "state_restore_func", "result_rejected_tracker_filename")
    return {name: getattr(machine, name) for name in names}


def wire_train_config(
    model_chunks: Sequence[Any], optimizer: Any = None, *, align_grad_reduce: bool = False
) -> None:
    """Set the config's functions by which Megatron's schedules call DDP and the optimizer.
    They are `no_sync_func`, `grad_sync_func`, `param_sync_func`, `grad_scale_func` and
    `finalize_model_grads_func`.

    It always sets them: call it again after you have built another model or optimizer. Call it with
    the chunks of one model; chunks of virtual pipeline stages share one config, whose functions are
    then lists.

    Args:
        model_chunks: this rank's chunks, wrapped in Megatron's `DistributedDataParallel`.
        optimizer: what `get_megatron_optimizer` returned for them; None for a reference model,
            whose `grad_scale_func` stays None.
        align_grad_reduce: let the interleaved schedule dispatch the gradient reductions, at the
            same time on all pipeline stages. (`align_param_gather` is read from the DDP config.)

    Raises:
        ValueError: it got no list of chunks, an empty one, or a chunk is not wrapped in DDP.
    """
    chunks = checked_chunks(
        "wire_train_config()", model_chunks, None, or_in=lambda chunk: hasattr(chunk, "ddp_config")
    )
    ddp = chunks[0].ddp_config

    def per_chunk(method: str) -> Any:
        functions = [getattr(chunk, method) for chunk in chunks]
        return functions[0] if len(functions) == 1 else functions

    for config in configs_of(chunks):
        config.grad_scale_func = None if optimizer is None else LossScale(optimizer)
        config.finalize_model_grads_func = distributed.finalize_model_grads
        config.no_sync_func = per_chunk("no_sync") if ddp.overlap_grad_reduce else None
        # If they are aligned over the pipeline, the schedule dispatches reductions and gathers.
        align_grads = ddp.overlap_grad_reduce and align_grad_reduce
        config.grad_sync_func = per_chunk("start_grad_sync") if align_grads else None
        align_params = ddp.overlap_param_gather and ddp.align_param_gather
        config.param_sync_func = per_chunk("start_param_sync") if align_params else None


def seed_all(seed: int) -> int:
    """Seed Python, NumPy, torch and Megatron's trackers with `seed` + 100 × pipeline rank.

    Every rank calls it with the same seed, after `initialize_model_parallel`. The offset is added
    once, here: the patch `pipeline-seed-offset` sees seeds that already differ, and adds nothing.

    Returns:
        This rank's seed.

    Raises:
        ValueError: `seed` is negative or no integer.
        RuntimeError: model parallelism is not initialised.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed_all() takes a non-negative int, got {seed!r}")
    if not parallel_state.model_parallel_is_initialized():
        raise RuntimeError(
            "seed_all() needs the pipeline rank: initialise model parallelism first "
            "(parallel_state.initialize_model_parallel)"
        )
    stage = int(parallel_state.get_pipeline_model_parallel_rank())
    rank_seed: int = seed + STAGE_OFFSET * stage
    random.seed(rank_seed)
    numpy.random.seed(rank_seed % 2**32)
    torch.manual_seed(rank_seed)
    # Looked up at the call, because this module may have been imported before apply().
    megatron_random.model_parallel_cuda_manual_seed(rank_seed)
    return rank_seed
