"""A full-iteration CUDA graph of another model, batch or step function is replayed.

Symptom:
    With full-iteration CUDA graphs, a second `train()` or any new `FullCudaGraphWrapper` does not
    run its own window: it replays the first graph and returns the first losses. The new model gets
    no gradient. A changed number of microbatches (batch size ramp-up) in one `train()` does the
    same. No error. After an exception during the capture, every later call fails with a bare
    AssertionError.

Cause:
    `FullCudaGraphWrapper` keeps its graphs, results and counters on the class, and
    `StaticBufferLoader` its input buffers, one each for training and for validation.

Affects:
    0.14 and later, on a GPU. Proven with real graphs on an H100; the CPU runtime has none, so the
    reproduction's stand-in there runs the schedule once instead of a capture, and does nothing
    instead of a replay. What the patch does: if the model's chunks, the number of microbatches, the
    forward-step function, the schedule, or the sequence and micro batch lengths differ from those
    of the graph, it resets the state of training, or of validation, including the warm-up. It keeps
    the graph of one model at a time, as upstream does: alternating models run without a graph, and
    so does a step function that is created again for each call. A new wrapper alone, which each
    `evaluate()` creates, keeps the graph. All ranks must change together, because the capture has
    barriers. Other arguments (`collect_non_loss_data`, which only one rank passes, and
    `force_all_reduce`) still have the values of the capture. The optimizer's own graph,
    `OptimizerCudaGraphWrapper`, is not covered.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/full_cuda_graph.py,
    `FullCudaGraphWrapper`; from 0.18 on a program can call its `reset_cuda_graph`, which keeps the
    input buffers.

Remove when:
    each graph belongs to the model and arguments that it was captured from.
    `upstream/full-cuda-graph-replayed` has the repair.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

from megatron_idempotent.megatron import schedules

from ._case import Fault, Original, Patch, address, target

_NEEDED = ("model", "data_iterator", "num_microbatches", "seq_length", "forward_only")
_NUMBERS = ("num_microbatches", "seq_length", "micro_batch_size", "decoder_seq_length")

#: Stage → references to the objects, and the numbers, that its graph is captured from.
_captured: dict[str, tuple[list[Callable[[], Any]], list[Any]]] = {}


def replay(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap `FullCudaGraphWrapper.__call__`: first drop a CUDA graph captured from other arguments.
    A graph is kept only if the call has the same model chunks, functions, number and size of
    microbatches, and sequence lengths as its capture.
    """
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    if any(name not in kwargs for name in _NEEDED):
        return original(self, *args, **kwargs)  # upstream raises and names the missing argument
    stage = "validation" if kwargs["forward_only"] else "training"
    functions = (self.forward_backward_func, kwargs.get("forward_step_func"))
    objects = [*schedules.chunks(kwargs["model"]), *(p for f in functions for p in _parts(f))]
    numbers = [kwargs.get(name) for name in _NUMBERS]
    if not _is_of(stage, objects, numbers):
        _forget(stage)
        _captured[stage] = ([_reference(value) for value in objects], numbers)
    graph = FullCudaGraphWrapper.cuda_graph[stage]
    try:
        return original(self, *args, **kwargs)
    except BaseException:
        if FullCudaGraphWrapper.cuda_graph[stage] is not graph:  # from a capture that failed
            _forget(stage)
        raise


def _is_of(stage: str, objects: list[Any], numbers: list[Any]) -> bool:
    references, captured_numbers = _captured.get(stage, ([], None))
    return (
        captured_numbers == numbers
        and len(references) == len(objects)
        and all(ref() is value for ref, value in zip(references, objects, strict=True))
    )


def _parts(function: Any) -> tuple[Any, ...]:
    # Each access to a bound method creates a new object.
    if isinstance(function, MethodType):
        return (function.__self__, function.__func__)
    return (function,)


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:  # None, or an object with slots
        return lambda: value


def _forget(stage: str) -> None:
    import torch
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader

    # The last replay may still read the buffers, and write to the graph's memory.
    torch.cuda.synchronize()
    FullCudaGraphWrapper.cuda_graph[stage] = None
    FullCudaGraphWrapper.result[stage] = None
    FullCudaGraphWrapper.curr_iteration[stage] = 0
    StaticBufferLoader.static_buffers[stage].clear()


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`: a capture runs the code, a replay runs nothing.

    On a GPU it only counts the replays of real graphs.
    """

    replays = 0

    def register_generator_state(self, state: Any) -> None:
        """Do nothing, because the stand-in has no random generators."""

    def replay(self) -> None:
        """Count this replay in `Graph.replays`; run no code."""
        Graph.replays += 1


def stand_in() -> None:
    """Count each replay of a CUDA graph in this process, from now on, in `Graph.replays`.

    Without a GPU, stand-ins replace the graphs.
    """
    import contextlib

    import torch

    from megatron_idempotent.proof.cpu import is_enabled

    cuda: Any = torch.cuda
    if not is_enabled():

        class Counted(cuda.CUDAGraph):  # type: ignore[misc]
            def replay(self) -> None:
                Graph.replays += 1
                super().replay()

        cuda.CUDAGraph = Counted
        return
    cuda.CUDAGraph = Graph
    cuda.graph = lambda *_, **__: contextlib.nullcontext()
    cuda.graph_pool_handle = lambda: None


def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
    """Run the forward of one microbatch; return the model's output and the loss function.
    A microbatch is a dict, because upstream copies dicts into its static input buffers.
    """
    import torch

    tokens_BT = next(data_iterator)["tokens"]
    length = tokens_BT.shape[1]
    positions_BT = torch.arange(length, device="cuda").expand(*tokens_BT.shape)
    hidden = torch.ones(1, 1, length, length, device="cuda").tril() < 0.5

    def loss_func(loss_BT: Any) -> tuple[Any, dict[str, Any]]:
        loss = loss_BT.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return model(tokens_BT, positions_BT, hidden, labels=tokens_BT), loss_func


def window(
    schedule: Callable[..., Any], model: Any, microbatches: int, **overrides: Any
) -> list[Any]:
    """Run one window of a tiny model through `schedule`, from zero gradients; return its losses."""
    from megatron_idempotent.proof.cpu import tiny

    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    arguments = {
        "forward_step_func": forward_step,
        "data_iterator": ({"tokens": tokens} for tokens in tiny.microbatches(0)),
        "model": model.chunks,
        "num_microbatches": microbatches,
        "seq_length": tiny.SEQUENCE,
        "micro_batch_size": tiny.BATCH,
        "forward_only": False,
        **overrides,
    }
    return [float(result["loss"]) for result in schedule(**arguments)]


def build(**options: Any) -> Any:
    """Return a tiny model without an optimizer that a CUDA graph can capture on a GPU."""
    from megatron_idempotent.proof.cpu import is_enabled, tiny

    return tiny.build(with_optimizer=False, capturable=not is_enabled(), **options)


def reproduce() -> None:
    """Capture a CUDA graph of one model, then train a second model through a new wrapper.
    On stock Megatron the first graph is replayed, and the second model gets no gradient.
    """
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.core.pipeline_parallel import get_forward_backward_func

    stand_in()
    first, second = (build(seed=seed) for seed in (1, 2))
    schedule = get_forward_backward_func()
    expected = window(schedule, second, 3)
    wrapper = FullCudaGraphWrapper(schedule, cuda_graph_warmup_steps=1)
    for _ in range(2):
        window(wrapper, first, 2)
    wrapper = FullCudaGraphWrapper(schedule, cuda_graph_warmup_steps=1)
    losses = window(wrapper, second, 3)
    if losses != expected or not second.gradients().any():
        raise Fault(
            f"a window of 3 microbatches of the second model returned {len(losses)} losses, and "
            f"left {'a' if second.gradients().any() else 'no'} gradient"
        )


PATCH = Patch(
    "a full-iteration CUDA graph is replayed for another model or number of microbatches",
    target("core.full_cuda_graph:FullCudaGraphWrapper.__call__", replay),
    since="0.14",
    fixed_by=(
        (
            address("core.full_cuda_graph:FullCudaGraphWrapper.__call__"),
            "source != FullCudaGraphWrapper.captured_from[training_str]",
        ),
    ),
    ranks=1,
    loudness="both",
)
